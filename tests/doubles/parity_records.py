"""Writes records of producers' parity, as a trainer does, and corrupted ones."""

from penstock.schemas.keys import Keys
from penstock.schemas.producer_parity import ProducerParity, encode_parity

INSTANCES = {name: f"{name}-1" for name in ("sound", "bad", "again", "torn", "deep")}
"""The live producers, and their instances."""
SAYS = "engine and trainer differ \x1b[2J[bold] by 0.31 nats"


def write_parity(client, keys: Keys) -> None:
    """Writes one producer without fault, one in quarantine, one restarted after its quarantine, two with unreadable
    fields, and a field that is not text."""
    found = {
        "sound-1": ProducerParity(producer_id="sound", gap=2e-4),
        "bad-1": ProducerParity(producer_id="bad", gap=0.31, quarantined_s=1e9, reason=SAYS),
        "again-0": ProducerParity(producer_id="again", gap=0.5, quarantined_s=1e9, reason="of before"),
    }
    fields = {instance: encode_parity(each) for instance, each in found.items()}
    client.hset(
        keys.parity, mapping={**fields, "torn-1": b'{"producer_id"', "deep-1": b"[" * 100_000, b"\xff": b"\xff"}
    )
