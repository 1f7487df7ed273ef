"""The trainer's findings about one producer's rows: the gap between engine and trainer, and a quarantine."""

import msgspec


class ProducerParity(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's findings about one producer instance. A quarantine applies to the instance: after a restart the
    same producer is another instance.

    gap: |engine - trainer| in nats, mean over the tokens of its last judged groups; None before the first.
    quarantined_s: unix time since which its groups are not trained; 0 if they are trained.
    reason: why it is quarantined, in a sentence.
    """

    producer_id: str
    gap: float | None = None
    quarantined_s: float = 0.0
    reason: str = ""


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
        finding = None if value is None else decode_parity(value)
    except msgspec.DecodeError:
        return None
    return finding if finding is not None and finding.quarantined_s else None
