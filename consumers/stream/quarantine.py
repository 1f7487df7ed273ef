"""Quarantine: producer instances whose groups are not trained, stored in Redis for them and for the next trainer."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from penstock.consumers.stream.scripts import Scripts
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.producer_parity import ProducerParity, encode_parity, quarantine_in
from penstock.schemas.rollout import one_line

log = logging.getLogger(__name__)

NOTE_S = 2.0
"""How often the findings about producers are written to Redis; a quarantine is written at once."""
MOST_KEPT = 1000
"""Newest quarantines kept: groups of an instance that is gone may still be on the stream."""


class Quarantine:
    """The quarantined producer instances, including those of earlier trainers.

    alive: findings by producer id about the producers that send heartbeats, as of the last `note`.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        fields = scripts.connection.call(lambda client: client.hgetall(scripts.keys.parity))
        found = {name.decode(errors="replace"): quarantine_in(value) for name, value in fields.items()}
        self._held = {name: each for name, each in found.items() if each is not None}
        self._watched: Mapping[str, ProducerParity] = {}
        self._noted_at = 0.0
        self.alive: dict[str, ProducerParity] = {}

    def holds(self, samplers: Iterable[str]) -> bool:
        """Returns whether one of the instances that sampled a group is quarantined."""
        return not self._held.keys().isdisjoint(samplers)

    def are_others(self, instances: Iterable[str]) -> bool:
        """Returns whether a producer is alive that is neither quarantined nor one of `instances`."""
        return not self._everyone() <= {*self._held, *instances}

    def add(self, instance: str, found: ProducerParity) -> None:
        """Quarantines an instance: its groups are no longer trained."""
        self._held[instance] = found
        while len(self._held) > MOST_KEPT:
            del self._held[next(iter(self._held))]
        log.error(
            "producer %s is quarantined, its groups are released again and not trained until it is started again: %s",
            one_line(found.producer_id),
            found.says,
        )
        alive = self._everyone()
        self._tell(alive)
        self._look(alive)

    def note(self, watched: Mapping[str, ProducerParity]) -> None:
        """Writes the findings to Redis, at most every `NOTE_S`. watched: by instance, quarantined or not."""
        self._watched = watched
        if time.monotonic() - self._noted_at >= NOTE_S:
            self.note_again()

    def note_again(self) -> None:
        """Writes the findings to Redis, which may have lost them."""
        keys = self._scripts.keys
        ids = dict.fromkeys(each.producer_id for each in self._found.values())
        self._tell(self._instances([keys.producer(each) for each in ids]))

    def look_around(self) -> None:
        """Logs an error if the run has producers and all of them are quarantined."""
        if self._held:
            self._look(self._everyone())

    @property
    def _found(self) -> dict[str, ProducerParity]:
        return {**self._watched, **self._held}

    def _tell(self, alive: AbstractSet[str]) -> None:
        found = self._found
        self._noted_at = time.monotonic()
        self.alive = {each.producer_id: each for instance, each in found.items() if instance in alive}
        kept = {name: encode_parity(each) for name, each in found.items() if name in alive or name in self._held}
        if kept or self._watched:
            self._scripts.note_parity(kept)

    def _look(self, alive: AbstractSet[str]) -> None:
        if alive and self._held.keys() >= alive:
            held = [self._held[instance] for instance in alive]
            says = ", ".join(sorted(f"{one_line(each.producer_id)}: {each.cause}" for each in held))
            log.error(
                "every producer that is alive is quarantined, so that nothing is sampled for this run (%s). Fix them "
                "and start them again; if they are sound, look at the trainer: ask `penstock parity`",
                says,
            )

    def _everyone(self) -> set[str]:
        """Returns the instances of the run that are alive."""
        pattern = self._scripts.keys.producer_pattern
        return self._instances(
            self._scripts.connection.call(lambda client: list(client.scan_iter(pattern, count=1000)))
        )

    def _instances(self, names: Sequence[str | bytes]) -> set[str]:
        """Returns the instances that send the heartbeats of these keys."""
        beats: Any = self._scripts.connection.call(lambda client: client.mget(names)) if names else ()
        found = set()
        for value in beats:
            try:
                heartbeat = decode_heartbeat(value or b"")
            except msgspec.DecodeError:
                continue
            found.add(heartbeat.instance or heartbeat.producer_id)
        return found
