"""The trainer's findings about one producer's rows: the gap between engine and trainer, and a quarantine."""

import msgspec


class ProducerParity(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's findings about one producer instance. A quarantine applies to the instance: after a restart the
    same producer is another instance.

    gap: |engine - trainer| in nats, mean over the tokens of its last groups that were recomputed under the policy that
        sampled them; None before the first.
    num_rows: rows recomputed in this way, over all its groups.
    quarantined_s: unix time since which its groups are not trained; 0 if they are trained.
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
    """Decodes findings. Raises msgspec.DecodeError for anything else."""
    try:
        return _decoder.decode(value)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deep") from error


def quarantine_in(value: bytes | None) -> ProducerParity | None:
    """Returns the finding in a field of the hash if it is a quarantine, else None."""
    try:
        found = None if value is None else decode_parity(value)
    except msgspec.DecodeError:
        return None
    return found if found is not None and found.quarantined_s else None
