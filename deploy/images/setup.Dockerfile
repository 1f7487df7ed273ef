# Makes the passwords of a run once and gives each part its own. Standard library only.
FROM docker.io/library/python:3.11.13-slim-bookworm

# The modules that hand_out imports, laid out as the package `penstock`, which is not installed here.
COPY schemas/__init__.py schemas/keys.py /opt/penstock/penstock/schemas/
COPY deploy/__init__.py /opt/penstock/penstock/deploy/
COPY deploy/security /opt/penstock/penstock/deploy/security
COPY deploy/images/__init__.py deploy/images/hand_out.py /opt/penstock/penstock/deploy/images/
ENV PYTHONPATH=/opt/penstock
# A new volume takes over owner and mode of the folder that it covers.
RUN useradd --uid 10001 --create-home penstock \
    && install --directory --owner=penstock --group=penstock --mode=0700 /secrets \
    && install --directory --owner=penstock --group=penstock \
        /handout/redis /handout/producer /handout/trainer /handout/observer /handout/operator
USER penstock
# A one-shot: its exit status is the health check.
HEALTHCHECK NONE
ENTRYPOINT ["python3", "-m", "penstock.deploy.images.hand_out"]
