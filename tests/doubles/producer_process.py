"""Starts whole producer processes with scripted engines against a real server."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from forked_programs import PYTHONPATH, ForkedProgram
from penstock.schemas.config import RunConfig

PROGRAM = """
import sys
import time
from pathlib import Path
import msgspec
import scripted_engine
from penstock.producers.__main__ import main
from penstock.schemas.config import RunConfig
config = msgspec.json.decode(sys.argv[1], type=RunConfig)
sys.exit(main(config, runs=Path(sys.argv[2]), producer_id=sys.argv[3], engine_factory=scripted_engine.start))
"""


class ProducerProcesses:
    """Starts producers that write their output to `<folder>/<id>.log`; `kill_all` ends those still alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[ForkedProgram] = []

    def __call__(
        self,
        config: RunConfig,
        url: str,
        producer_id: str = "producer-0",
        *,
        log: str = "",
        environment: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> ForkedProgram:
        """Starts a producer. log: the log's name, if not the id. engine: arguments of the ScriptedEngine."""
        variables = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "REDIS_URL": url,
            "SCRIPTED_ENGINE": json.dumps(engine),
            "PENSTOCK_LOG": "text",
            **(environment or {}),
        }
        arguments = [msgspec.json.encode(config).decode(), str(self._folder), producer_id]
        process = ForkedProgram(PROGRAM, arguments, variables, self._folder / f"{log or producer_id}.log")
        self._processes.append(process)
        return process

    def log(self, name: str = "producer-0") -> str:
        return (self._folder / f"{name}.log").read_text()

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
