"""The journals of groups that converse: what their agents were told is in Redis before they are told it."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.producers.stream.in_flight import Claim
from penstock.producers.stream.progress_store import ProgressStore, Saved
from penstock.schemas.images import MAX_IMAGES_BYTES
from penstock.schemas.rollout import MAX_ENTRY_BYTES

LARGEST_JOURNAL = 4 * MAX_ENTRY_BYTES + MAX_IMAGES_BYTES
"""The most bytes of one journal that are read: calls take up to twice an entry, their text as much again,
and there are their images."""
_HOLDER = b"holder\n"


class JournalHolder(NamedTuple):
    """The producer that keeps a journal; the journal's first element in Redis."""

    instance: str
    producer_id: str

    def encoded(self) -> bytes:
        return _HOLDER + f"{self.instance}\n{self.producer_id}".encode()

    @classmethod
    def of(cls, element: bytes | None) -> "JournalHolder | None":
        """Returns the holder that a journal's first element names; None without one."""
        if element is None or not element.startswith(_HOLDER):
            return None
        instance, _, producer_id = element.removeprefix(_HOLDER).decode(errors="replace").partition("\n")
        return cls(instance, producer_id)


@dataclass(slots=True, eq=False, kw_only=True)
class Journal(Saved):
    """What a group of conversations leaves to the producer that continues it, one entry after another.

    num_entered, size: sampled tokens in the entries, and their bytes.
    num_written: entries that Redis has; None while that is unknown.
    num_recoveries: outages of Redis before it was written; a later one may have lost it.
    has_begun: it was written, with this producer as its holder.
    has_moved: another producer continues the group, or will.
    is_given_up: there was no room for it.
    """

    claim: Claim
    entries: list[bytes] = field(default_factory=list)
    num_entered: int = 0
    size: int = 0
    num_written: int | None = None
    num_recoveries: int = 0
    has_begun: bool = False
    has_moved: bool = False
    is_given_up: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, entry: bytes, num_tokens: int = 0) -> None:
        """Adds an encoded entry. num_tokens: sampled tokens in it."""
        if not self.is_given_up:
            self.entries.append(entry)
            self.num_entered += num_tokens
            self.size += len(entry)

    def clear(self) -> None:
        Saved.clear(self)  # a class with slots is another one than `super` knows
        self.num_written = None

    def give_up(self) -> None:
        """Keeps nothing from now on."""
        self.entries, self.is_given_up = [], True

    def restart(self) -> None:
        """Forgets what was entered; the next entries replace what Redis has."""
        self.entries, self.num_entered, self.size = [], 0, 0
        self.clear()


class Journals:
    """Keeps journals in Redis, each as a list under its index, to which entries are appended.

    The first element names the holder, the last producer to begin; the others begin with the instance that wrote them,
    and only the holder's count. A producer that was taken for dead finds another holder there and gives the group up.
    """

    def __init__(self, store: ProgressStore, holder: JournalHolder) -> None:
        self._store = store
        self._holder = holder
        self._prefix = holder.instance.encode() + b"/"

    async def append(self, journal: Journal) -> None:
        """Appends the entries that Redis does not have; all of them the first time, and if it may have lost some.
        Without room for all of them none is kept: the group could not be continued from some."""
        store = self._store
        store.saved[journal.claim] = journal
        async with journal.lock:
            if store.connection.is_full:
                await store.make_room()
            if journal.num_recoveries != store.connection.num_recoveries:
                journal.num_written, journal.num_recoveries = None, store.connection.num_recoveries
            if journal.has_begun and journal.num_written is None:  # a whole one again, if it is still this producer's
                await self.find_moved([journal])
            while not await self._is_appended(journal):
                pass

    async def _is_appended(self, journal: Journal) -> bool:
        """Appends once, unless there is no need. Returns False if Redis had lost what came before."""
        store, claim, num_entries = self._store, journal.claim, len(journal.entries)
        if journal.has_moved or store.is_closed or not store.holds(claim):
            return True
        if not journal.is_given_up and num_entries == (journal.num_written or 0):
            return True
        if journal.is_given_up or not store.has_room(claim, journal.size):
            journal.give_up()
            if claim.has_progress:
                await store.forget(claim)
            return True
        elements = [self._prefix + entry for entry in journal.entries[journal.num_written or 0 :]]
        key = store.keys.progress(claim.index, claim.run_id)
        pipeline = store.commands.pipeline(transaction=True)
        if journal.num_written is None:
            pipeline.delete(key)
            elements.insert(0, self._holder.encoded())
        pipeline.rpush(key, *elements)
        pipeline.lindex(key, 0)
        pipeline.expire(key, store.ttl_s)
        num_tokens, num_bytes = journal.num_entered, journal.size
        journal.num_written, claim.has_progress = None, True  # unless the answer says otherwise
        if (answers := await store.tried(pipeline.execute)) is None:
            return True
        length, first, _ = answers[-3:]
        holder = JournalHolder.of(first)
        if holder is None or (holder == self._holder and length <= num_entries):
            return False
        journal.has_moved |= holder != self._holder
        if not journal.has_moved:
            journal.has_begun, journal.num_written = True, num_entries
            await store.written(claim, journal, num_tokens, num_bytes, sum(map(len, elements)))
        return True

    async def find_moved(self, journals: Collection[Journal]) -> None:
        """Finds out which journals another producer has begun to continue."""
        store = self._store
        journals = [journal for journal in journals if journal.has_begun]
        if not journals:
            return
        pipeline = store.commands.pipeline(transaction=False)
        for journal in journals:
            key = store.keys.progress(journal.claim.index, journal.claim.run_id)
            pipeline.lindex(key, 0)
            pipeline.expire(key, store.ttl_s)  # an agent may be silent for long
        if (answers := await store.tried(pipeline.execute)) is not None:
            for journal, first in zip(journals, answers[::2], strict=True):
                journal.has_moved |= JournalHolder.of(first) not in (None, self._holder)

    async def holder_of(self, index: int, run_id: str = "") -> JournalHolder | None:
        """Returns the producer that keeps the journal of an index of a run; None without one.

        Raises:
            RedisError: it cannot be read.
        """
        return JournalHolder.of(await self._store.commands.lindex(self._store.keys.progress(index, run_id), 0))

    async def read(self, claim: Claim) -> list[bytes]:
        """Returns the entries of a claim's last holder; none if there is nothing to continue from."""
        elements = await self._store.read(claim, lambda key: self._store.commands.lrange(key, 0, -1))
        if not elements or (holder := JournalHolder.of(elements[0])) is None:
            return []
        prefix = holder.instance.encode() + b"/"
        entries = [element.removeprefix(prefix) for element in elements if element.startswith(prefix)]
        if (num_bytes := sum(map(len, entries))) > LARGEST_JOURNAL:
            self._store.unreadable(claim, f"{num_bytes:,} bytes, expected at most {LARGEST_JOURNAL:,}")
            return []
        return entries
