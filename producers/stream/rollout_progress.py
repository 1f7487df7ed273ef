"""The progress of groups that are sampled in one turn, saved for the producer that takes their claims over."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from penstock.producers.observe.running_loop import running_s
from penstock.producers.stream.in_flight import Claim
from penstock.producers.stream.progress_store import LARGEST_SHARE, ProgressStore, Saved
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_entry, encode_entry

BATCH_BYTES = 1024 * 1024
"""Groups are written together up to this size: one write costs more than encoding a short group."""


class RolloutProgress:
    """Saves what groups of one turn have sampled and finds what others have saved.

    A group's progress is one string, written as a whole: concurrent writers leave the last one's.
    """

    def __init__(self, store: ProgressStore, instance: str) -> None:
        self._store = store
        self._instance = instance
        self._saving = asyncio.Lock()
        self._encoding_s = 0.0
        """Processor seconds that encoding has taken."""

    async def run(self) -> None:
        """Waits half of `progress_s`, or longer if encoding would take more than its share of the processor's time, and
        saves; runs until cancelled. Groups are written as a whole: without the wait the cost of long rollouts would
        grow with the square of their length.

        A group loses with its producer what it has sampled since it was last saved: half of `progress_s`, half of that
        if it was too young for one saving, and the time between its turns in two of them.
        """
        saving_s, pause_s = 0.0, self._store.config.progress_s / 2
        while pause_s:
            await asyncio.sleep(max(pause_s, saving_s / LARGEST_SHARE))
            before = self._encoding_s
            await self.save(pause_s / 2)
            saving_s = (saving_s + self._encoding_s - before) / 2  # a slow one puts the next off by half of its time

    async def save(self, min_age_s: float = 0.0) -> None:
        """Saves what has grown, the oldest groups first.

        min_age_s: younger groups are left out: most short ones are done before the next saving.
        """
        store = self._store
        if not store.config.progress_s:
            return
        async with self._saving:
            started = time.monotonic()
            if store.connection.is_full:
                await store.make_room()
            now = running_s()
            batch: dict[Claim, tuple[int, bytes]] = {}
            num_bytes = 0
            for claim in store.table:
                if store.is_closed:
                    break
                # An evaluation is asked for again as a whole, and its index is another prompt's key.
                if claim.evaluation_id is not None or now - (claim.generating_since or 0.0) < min_age_s:
                    continue
                began = time.thread_time()
                payload = self._payload(claim)
                self._encoding_s += time.thread_time() - began
                if payload is not None:
                    batch[claim] = payload
                    num_bytes += len(payload[1])
                    if num_bytes >= BATCH_BYTES:
                        await self._write(batch)
                        batch, num_bytes = {}, 0
            await self._write(batch)
            store.metrics.progress_write_s.observe(time.monotonic() - started)

    async def find(self, claim: Claim) -> RolloutGroup | None:
        """Returns a claim's group as far as an earlier holder sampled it, if that was saved and can be read."""
        if claim.evaluation_id is not None:
            return None
        if (payload := await self._store.read(claim, self._store.commands.get)) is None:
            return None
        try:
            found = _decoded(claim, payload)
        except RecordError as error:
            self._store.unreadable(claim, error)
            return None
        return None if await self._store.is_quarantined(claim, found.samplers, found.producer_id) else found

    async def left_by_the_dead(self, claim: Claim) -> RolloutGroup | None:
        """Returns the unfinished group of a claim that no producer continues; None if it is unknown, or converses. Its
        progress is dropped with the claim: it may be what ends its producers."""
        if claim.evaluation_id is not None:
            return None
        claim.has_progress = True
        store = self._store
        payload: Any = await store.tried(lambda: store.commands.get(store.keys.progress(claim.index, claim.run_id)))
        with contextlib.suppress(RecordError):
            return None if payload is None else _decoded(claim, payload)
        return None

    def _payload(self, claim: Claim) -> tuple[int, bytes] | None:
        """Returns the tokens and encoding of a claim's group, and reserves its room; None if there is nothing new, or
        no room."""
        group = None if claim.in_flight is None else claim.in_flight.so_far()
        if group is None:
            return None
        num_tokens = sum(rollout.num_sampled_tokens for rollout in group.rollouts)
        saved = self._store.saved.setdefault(claim, Saved())
        if num_tokens <= saved.num_tokens:
            return None
        try:
            payload, _ = encode_entry(group.finished_by(self._instance), dead=True)  # its prompt has the images
        except (RecordError, UnicodeEncodeError) as error:
            self._store.fail("size", "%s: %s", claim, error)
            return None
        if not self._store.has_room(claim, len(payload)):
            return None
        saved.num_bytes = len(payload)
        return num_tokens, payload

    async def _write(self, batch: Mapping[Claim, tuple[int, bytes]]) -> None:
        """Writes the tokens and encodings of claims' groups."""
        store = self._store
        if not batch or store.is_closed:
            return
        pipeline = store.commands.pipeline(transaction=False)
        for claim, (_, payload) in batch.items():
            pipeline.set(store.keys.progress(claim.index, claim.run_id), payload, ex=store.ttl_s)
            claim.has_progress = True  # of a batch that fails Redis may have a part
        if await store.tried(pipeline.execute) is not None:
            for claim, (num_tokens, payload) in batch.items():
                await store.written(claim, store.saved.get(claim) or Saved(), num_tokens, len(payload), len(payload))


def _decoded(claim: Claim, payload: bytes) -> RolloutGroup:
    """Raises RecordError: it cannot be read, or is of another index."""
    found = decode_entry(payload, dead=True)
    if found.index != claim.index:
        raise RecordError(f"index: {found.index}, expected {claim.index}")
    return found
