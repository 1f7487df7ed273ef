"""Quarantine: producer instances whose groups are not trained, stored in Redis for them and for the next trainer."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.heartbeat import Heartbeat, decode_heartbeat
from penstock.schemas.producer_parity import ProducerParity, encode_parity, quarantine_in
from penstock.schemas.rollout import RolloutGroup, one_line

log = logging.getLogger(__name__)

NOTE_S = 2.0
"""How often the findings about producers are written to Redis; a quarantine is written at once."""
SHOWN_S = 600.0
"""How long a quarantine is shown of a producer that has ended and was not started again."""
MOST_KEPT = 1000
"""Newest quarantines kept: groups of an instance that is gone may still be on the stream."""


class Quarantine:
    """The quarantined producer instances, including those of earlier trainers. The last producer that is alive is never
    one of them.

    shown: findings by producer id as of the last `note`, about the producers that send heartbeats, and about those that
        were quarantined in the last `SHOWN_S` and are not judged anew yet: a quarantined producer ends.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        fields = scripts.connection.call(lambda client: client.hgetall(scripts.keys.parity))
        findings = {name.decode(errors="replace"): quarantine_in(value) for name, value in fields.items()}
        self._quarantined = {name: finding for name, finding in findings.items() if finding is not None}
        self._measured: Mapping[str, ProducerParity] = {}
        self._noted_at = 0.0
        self.shown: dict[str, ProducerParity] = {}

    def holds(self, samplers: Iterable[str]) -> bool:
        """Returns whether one of the instances that sampled a group is quarantined."""
        return not self._quarantined.keys().isdisjoint(samplers)

    def add(self, instance: str, finding: ProducerParity, *, refuses: bool) -> None:
        """Quarantines an instance: its groups are no longer trained. If no other producer is alive it is not, and the
        run goes on with it.

        Raises:
            RunFailedError: no other producer is alive, and the run `refuses` to be trained from this one.
        """
        name = one_line(finding.producer_id)
        alive = self._instances()
        if alive <= {*self._quarantined, instance}:
            if refuses:
                raise RunFailedError(
                    f'producer {name} cannot be trained from (parity.gate = "refuse"), and no other is alive: '
                    f"{finding.reason}"
                )
            log.warning('%s is trained from all the same (parity.gate = "warn"): %s', name, finding.reason)
            return
        self._quarantined[instance] = finding
        while len(self._quarantined) > MOST_KEPT:
            del self._quarantined[next(iter(self._quarantined))]
        log.error(
            "producer %s is quarantined, its groups are released again and not trained until it is started again: %s",
            name,
            finding.reason,
        )
        self._write(alive)

    def hold(self, groups: Iterable[RolloutGroup], reason: str) -> None:
        """Quarantines whoever sampled these groups, the last producer that is alive too: the run ends."""
        for group in groups:
            for instance in group.sampled_by:
                self._quarantined[instance] = ProducerParity(
                    producer_id=group.producer_id, quarantined_s=time.time(), reason=reason
                )
        self._write(self._instances())

    def note(self, measured: Mapping[str, ProducerParity]) -> None:
        """Writes the findings to Redis, at most every `NOTE_S`. measured: by instance, quarantined or not."""
        self._measured = measured
        if time.monotonic() - self._noted_at >= NOTE_S:
            self.note_again()

    def note_again(self) -> None:
        """Writes the findings to Redis, which may have lost them."""
        ids = dict.fromkeys(finding.producer_id for finding in self._findings.values())
        self._write(self._instances([self._scripts.keys.producer(producer_id) for producer_id in ids]))

    @property
    def _findings(self) -> dict[str, ProducerParity]:
        return {**self._measured, **self._quarantined}

    def _write(self, alive: set[str]) -> None:
        findings = self._findings
        self._noted_at = time.monotonic()
        newest = [finding for finding in self._quarantined.values() if time.time() - finding.quarantined_s < SHOWN_S]
        live = [finding for name, finding in findings.items() if name in alive]
        self.shown = {finding.producer_id: finding for finding in (*newest, *live)}
        kept = {name: finding for name, finding in findings.items() if name in alive or name in self._quarantined}
        if kept or self._measured:
            self._scripts.note_parity({name: encode_parity(finding) for name, finding in kept.items()})

    def _instances(self, names: Sequence[str] | None = None) -> set[str]:
        """Returns the instances that send the heartbeats of these keys, or any."""
        return {beat.instance or beat.producer_id for beat in live_heartbeats(self._scripts, names)}


def live_heartbeats(scripts: Scripts, names: Sequence[str | bytes] | None = None) -> list[Heartbeat]:
    """Returns the heartbeats of these keys; of every producer of the run without them."""
    call, pattern = scripts.connection.call, scripts.keys.producer_pattern
    if names is None:
        names = call(lambda client: list(client.scan_iter(pattern, count=1000)))
    values: Any = call(lambda client: client.mget(names)) if names else ()
    heartbeats = []
    for value in values:
        try:
            heartbeats.append(decode_heartbeat(value or b""))
        except msgspec.DecodeError:
            continue
    return heartbeats
