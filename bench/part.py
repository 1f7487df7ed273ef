"""`python -m bench.part MODULE:FUNCTION JOB RESULT`: one measurement in a process of its own.

FUNCTION takes the job, of the type in its annotation, and returns what it measured; it may be a coroutine. Both files
are JSON. Imports what every environment has.
"""

import asyncio
import importlib
import inspect
import sys
import typing
from pathlib import Path

import msgspec


def main(function_path: str, job_file: str, result_file: str) -> None:
    module, _, name = function_path.partition(":")
    function = getattr(importlib.import_module(module), name)
    job_type, *_ = typing.get_type_hints(function).values()
    found = function(msgspec.json.decode(Path(job_file).read_bytes(), type=job_type))
    if inspect.iscoroutine(found):
        found = asyncio.run(found)
    Path(result_file).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
