"""Spans of a group's trace: what a producer did for it travels beside the group, for the trainer to export.

Names, as of November 2026. The proposal for reinforcement learning (open-telemetry/semantic-conventions-genai, issue
88, a draft) has `rl.loop` as root, `rl.sample`, `rl.reward`, `rl.train` and `rl.sync` in it, and `rl.run.id`,
`rl.system`, `rl.algorithm`, `rl.model.name`, `rl.environment.name`, `rl.loop.iteration`, `rl.*.batch_size`,
`rl.sync.bytes`; its loop is one iteration of a synchronous trainer, here it is one group's way through the pipeline.
A second proposal (alibaba/loongsuite-semantic-conventions-genai, issue 27) adds `rl.sample.turns`,
`rl.sample.output_tokens` and `rl.reward.score`. Calls and tools are the GenAI conventions' `chat`, `execute_tool` and
`invoke_agent` (in development). What neither has, waits above all, is `penstock.*`.
"""

from collections.abc import Mapping, Sequence

import msgspec

from penstock.schemas.rollout import RecordError

ROOT, QUEUE, SAMPLE, REWARD = "rl.loop", "penstock.queue", "rl.sample", "rl.reward"
STREAM, BATCH, TRAIN, SYNC = "penstock.stream", "penstock.batch", "rl.train", "rl.sync"

Value = str | int | float | Sequence[str | int]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A span of a group's trace.

    start_s, end_s: seconds since the epoch.
    id: by which others name it as their `parent`, within the group; random if empty. The parent "" is the root.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Value] = {}
    id: str = ""
    parent: str = ""
    error: str = ""


class ProducerSpans(msgspec.Struct, frozen=True, array_like=True):
    """The spans of one attempt at a group, in the field `spans` of its entry, by the producer that appended it."""

    producer_id: str
    spans: tuple[Span, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ProducerSpans)


def encode_spans(spans: ProducerSpans) -> bytes:
    return _encoder.encode(spans)


def decode_spans(data: bytes) -> ProducerSpans:
    """Raises RecordError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"spans: {error}") from error
