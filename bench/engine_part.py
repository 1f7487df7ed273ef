"""The measured process of the rows that drive an engine: `python -m bench.engine_part KIND SETTINGS RESULT`.

A process of its own per engine, as a producer is: what one measurement leaves behind cannot slow down the next.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from penstock.schemas.config import load_config

from bench.pauses import PauseSettings, measure_pauses
from bench.streaming import StreamingSettings, measure_streaming

KINDS = ("streaming", "pauses")


def main(argv: Sequence[str] | None = None) -> int:
    """Reads its settings, measures, writes the result; both files are JSON."""
    kind, settings_file, result_file = sys.argv[1:] if argv is None else argv
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    result = asyncio.run(_measure(kind, Path(settings_file).read_bytes()))
    partial = Path(result_file).with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(result))
    partial.replace(result_file)
    return 0


async def _measure(kind: str, settings: bytes) -> Any:
    if kind == "streaming":
        streaming = msgspec.json.decode(settings, type=StreamingSettings)
        return await measure_streaming(load_config(Path(streaming.run_file)), streaming)
    if kind == "pauses":
        pauses = msgspec.json.decode(settings, type=PauseSettings)
        return await measure_pauses(load_config(Path(pauses.run_file)), pauses)
    raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")


if __name__ == "__main__":
    sys.exit(main())
