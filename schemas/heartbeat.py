"""The heartbeat of a producer: sent every few seconds, under a key that expires when it stops."""

import msgspec

from penstock.schemas.policy import UNKNOWN_VERSION
from penstock.schemas.rollout import EngineFingerprint

HEARTBEAT_TTL_S = 15


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    claimed_s: float
    attempt: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    producer_id: str
    host: str
    pid: int
    policy_version: int
    in_flight: tuple[InFlight, ...]
    tokens_per_s: float
    num_tokens_generated: int
    num_groups_appended: int
    num_weight_loads_failed: int
    metrics_port: int
    fingerprint: EngineFingerprint
    sent_s: float
    last_error: str = ""
    endpoint: str = ""
    """URL at which agents reach this producer; empty without an endpoint."""
    instance: str = ""
    """Unique to each start of a producer, as in `RolloutGroup.sampled_by`. Empty in earlier releases."""
    run_id: str = ""
    """Of the run whose weights the engine holds, see `penstock.schemas.keys.Commit`; empty before the first."""
    unreadable_version: int = UNKNOWN_VERSION
    """The newest policy, if a chunk on the way to it cannot be read or is wrong."""


encode_heartbeat = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Heartbeat)


def decode_heartbeat(value: bytes) -> Heartbeat:
    """Decodes a heartbeat. Raises msgspec.DecodeError for anything else."""
    try:
        return _decoder.decode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error
