"""The measured process of the rows that drive an engine: `python -m bench.pipeline.engine_part JOB RESULT`."""

import asyncio
import sys
from pathlib import Path

import msgspec

from bench.pipeline.streaming import StreamingSettings, measure_streaming
from penstock.schemas.config import load_config


def main(job_file: str, result_file: str) -> None:
    """Reads its settings, measures, writes the result."""
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=StreamingSettings)
    found = asyncio.run(measure_streaming(load_config(Path(job.run_file)), job))
    Path(result_file).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
