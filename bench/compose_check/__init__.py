"""Brings up compose.yaml with podman and looks at what it does: `make compose-check`."""
