"""A task folder in Harbor's format."""

from pathlib import Path

TASK_TOML = """schema_version = "1.1"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 512
storage_mb = 64
"""
DOCKERFILE = """FROM python:3.12-slim
# What the agent finds.
WORKDIR /app
ENV GREETING="Hello, world!"
COPY names.txt data/ ./
COPY names.txt /srv/all/
"""
TEST_SH = """#!/bin/bash
if [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def make_task(folder: Path, **files: str | None) -> Path:
    """Makes a task folder. files: by path, in which `__` stands for a slash and the last `_` for a dot; None leaves one
    out."""
    found: dict[str, str | None] = {
        "task.toml": TASK_TOML,
        "instruction.md": "<!-- harbor-canary GUID 00 -->\n\nWrite $GREETING to hello.txt in /app.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/names.txt": "Ada\n",
        "environment/data/more.txt": "Grace\n",
        "tests/test.sh": TEST_SH,
    }
    for name, text in files.items():
        path = name.replace("__", "/")
        found[path if path in found or path.endswith("Dockerfile") else ".".join(path.rsplit("_", 1))] = text
    for name, text in found.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder
