"""What the trainer has found of one producer's rows: the gap between engine and trainer, and a quarantine."""

import msgspec


class ProducerParity(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer has found of one instance of a producer. A quarantine is of the instance: the same producer,
    started again, is another.

    gap: |engine - trainer| in nats, mean over the tokens of its last groups that were recomputed under the very policy
        that sampled them; None before the first.
    num_rows: so recomputed, of all its groups.
    quarantined_s: unix time since which its groups are not trained; 0 if they are.
    cause: as in `penstock.consumers.parity.report.CAUSES`; "unexplained" if the check could not tell or was not made;
        "refused" if the trainer refuses its groups.
    says: the finding in a sentence.
    """

    producer_id: str
    gap: float | None = None
    num_rows: int = 0
    quarantined_s: float = 0.0
    cause: str = ""
    says: str = ""


encode_parity = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ProducerParity)


def decode_parity(value: bytes) -> ProducerParity:
    """Raises msgspec.DecodeError for anything else."""
    try:
        return _decoder.decode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error


def quarantine_in(value: bytes | None) -> ProducerParity | None:
    """The quarantine that a field of the hash tells of, if it does."""
    try:
        found = None if value is None else decode_parity(value)
    except msgspec.DecodeError:
        return None
    return found if found is not None and found.quarantined_s else None
