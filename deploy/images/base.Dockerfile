# Shared by producers and the trainer: Python, the engine (3.5 GB) and every other requirement, installed once. The
# project itself is a thin layer on top, so that a changed line of it installs none of this again.
FROM docker.io/library/python:3.11.13-slim-bookworm

ARG ENGINE=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# The engine compiles kernels when it starts, and its CPU build links to libnuma.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home penstock

COPY deploy/images/requirements-${ENGINE}.txt /tmp/requirements.txt
# The CPU build of torch is on an index of its own; if a mirror has it too, the first try finds it there.
RUN python3 -m venv /opt/venv \
    && torch=$(grep -o '^torch==.*+cpu$' /tmp/requirements.txt || true) \
    && { [ -z "$torch" ] \
        || /opt/venv/bin/pip install --no-cache-dir --no-deps "$torch" \
        || /opt/venv/bin/pip install --no-cache-dir --no-deps "$torch" --index-url "$TORCH_CPU_INDEX"; } \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --requirement /tmp/requirements.txt

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
# A new volume takes over owner and mode of the folder that it covers.
RUN install --directory --owner=penstock --group=penstock /runs /models /workspace
WORKDIR /workspace
USER penstock
