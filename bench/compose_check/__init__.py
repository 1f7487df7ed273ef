"""Brings up compose.yaml with podman and checks its behaviour: `make compose-check`."""
