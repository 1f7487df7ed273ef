# Stands in for a published image if no registry is reachable: the program of a Debian package, started by the same
# arguments and as the same kind of user as the published image. Only for `make compose-check`.
FROM docker.io/library/python:3.11.13-slim-bookworm

ARG PACKAGE
RUN apt-get update \
    && apt-get install --yes --no-install-recommends "$PACKAGE" wget \
    && rm -rf /var/lib/apt/lists/*

# The user of the program, its data folder, the command in front of the service's own, and who starts it: the published
# Redis starts as root and gives that up.
ARG USER_NAME
ARG FOLDER
ARG PROGRAM
ARG STARTED_BY
RUN install --directory --owner="$USER_NAME" "$FOLDER" \
    && printf '#!/bin/sh\nexec %s "$@"\n' "$PROGRAM" > /start \
    && chmod 0755 /start
WORKDIR $FOLDER
USER $STARTED_BY
ENTRYPOINT ["/start"]
