"""Claims: the prompts that this producer is responsible for, and how they return to others if it fails."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from penstock.producers.observe.running_loop import running_s
from penstock.producers.stream.connection import BLOCK_MS, ProducerConnection
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Field, Keys, number_in
from penstock.schemas.process.outage import has_code
from penstock.schemas.rollout import one_line

log = logging.getLogger(__name__)

Fields = dict[bytes, bytes]

IDS_PER_COMMAND = 512
SHOWN_BYTES = 50
"""How much of an invalid field a message quotes; a field may be of any size."""
FREE_AT_ONCE_MS = 10**9
"""The idle time that frees a claim for takeover at once."""


class Claims:
    """Takes prompts from the two streams of one run into the in-flight table, and keeps them claimed.

    Each claim is an entry pending in the consumer group under this producer's id. A producer that finds an entry idle
    for `claim_idle_s` may take it over. That counts as another attempt, unless the group's progress grew for as long
    before: a group that kills its producers does so at once, or at the token where the last one stopped.

    streams: the streams to take from; None takes from both. `keep` and `hand_back` apply to the whole table.
    one_at_a_time: takes a single new prompt if one is there, without waiting in the server.
    """

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        producer_id: str,
        table: InFlightTable,
        config: ProducersConfig,
        streams: tuple[str, ...] | None = None,
        one_at_a_time: bool = False,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._consumer = producer_id
        self._table = table
        self._config = config
        self._streams = streams or (keys.evaluations, keys.prompts)
        self._one_at_a_time = one_at_a_time
        self._accepted: list[Claim] = []
        """Claims in the table that `take` has not returned yet."""
        self._more_waiting = True
        self._reply_lost = False
        self._recoveries_seen = 0
        self.refresh_s = config.claim_idle_s / 3
        """Interval at which claims are refreshed."""
        self._takeover_from = 0.0
        self.run_id = ""
        """The run that releases prompts; empty until it is known."""

    async def open(self) -> None:
        """Creates missing consumer groups, and frees the claims of an earlier process of this id."""
        await self._connection.retrying(self._create_groups)
        await self._connection.retrying(self._free_former_claims)

    async def take(self) -> list[Claim]:
        """Adds claims to the table and returns them: lost ones found again, one taken over, or new ones.

        Waits in the server for at most `BLOCK_MS`; returns none if nothing came. New ones are evaluations up to the
        free room and prompts up to a share of it.
        """
        return await self._connection.retrying(self._take)

    async def take_lost(self) -> list[Claim]:
        """Adds what is free for takeover to the table and returns it: at most one entry; see `take`."""
        return await self._connection.retrying(self._take_lost)

    async def keep(self) -> None:
        """Waits `refresh_s`, then tells Redis that the claims in the table are alive; runs until cancelled.

        A group past its deadline is no longer kept, so that a hanging generation cannot hold its prompt for ever.
        """
        while True:
            await asyncio.sleep(self.refresh_s)
            async with self._table.marking:
                # An empty refresh would count as an answer of Redis, so it does not go through the connection.
                if kept := self.to_be_kept():
                    await self._connection.retrying(partial(self.refresh, kept))

    async def hand_back(self) -> int:
        """Makes every claim of this id available to the other producers at once; returns how many there were.

        Call it only once nothing claims or runs any more.
        """
        await self.find_lost()
        claims = list(self._table)
        if claims:
            await self._make_free(claims)
        return len(claims)

    async def find_lost(self) -> None:
        """Adds claims of this id whose reply was lost to the table: the last read may have been cancelled after the
        server executed it."""
        await self._connection.retrying(self._adopt_lost)

    async def give_back(self, claim: Claim) -> None:
        """Makes one claim that was never started available to the other producers at once."""
        await self._make_free([claim])

    async def _make_free(self, claims: list[Claim]) -> None:
        async with self._table.marking:
            await self._connection.retrying(lambda: self._hand_back(claims))

    async def _take(self) -> list[Claim]:
        # A command that fails halfway leaves claims in the table that no later command would return.
        if not self._accepted:
            await self._find()
        return self._returned()

    async def _take_lost(self) -> list[Claim]:
        try:
            for stream in self._streams:
                if self._accepted or await self.take_over(stream) is not None:
                    break
        except ResponseError as error:
            _raise_unless_no_group(error)  # the next claim creates it again
        return self._returned()

    def _returned(self) -> list[Claim]:
        found, self._accepted = self._accepted, []
        return found

    async def _find(self) -> None:
        try:
            if self._connection.num_recoveries != self._recoveries_seen:
                self._observe_recovery()
            if self._reply_lost:
                await self._adopt_lost()
                self._reply_lost = False
                if self._accepted:
                    return
            if time.monotonic() >= self._takeover_from:
                for stream in self._streams:
                    if await self.take_over(stream) is not None:
                        return
                self._takeover_from = time.monotonic() + self.refresh_s
            # Between sending the command and receiving its reply, entries may be ours unknown to us.
            self._reply_lost = True
            await self._read_new()
            self._reply_lost = False
        except ResponseError as error:
            _raise_unless_no_group(error)
            log.warning("the prompts stream has lost its consumer group (an emptied Redis?): creating it again")
            await self._create_groups()

    def _observe_recovery(self) -> None:
        # While Redis was away no claim could be refreshed: give every live producer time to do so.
        self._recoveries_seen = self._connection.num_recoveries
        self._takeover_from = time.monotonic() + self._config.claim_idle_s
        self._reply_lost = True

    async def _read_new(self) -> None:
        table, streams = self._table, self._streams
        num_prompts = 1 if self._one_at_a_time else table.most_prompts
        counts = [num_prompts] * len(streams)
        if self._more_waiting or self._one_at_a_time:
            if self._keys.evaluations in streams:
                counts[streams.index(self._keys.evaluations)] = table.most_evaluations
            pipeline = self._connection.commands.pipeline(transaction=False)
            for stream, count in zip(streams, counts, strict=True):
                pipeline.execute_command(*self._group_read(), "COUNT", count, "STREAMS", stream, ">")
            replies = [part for reply in await pipeline.execute() for part in reply]
        else:
            replies = await self._connection.blocking.execute_command(
                *self._group_read(), "COUNT", num_prompts, "BLOCK", BLOCK_MS, "STREAMS", *streams, *[">"] * len(streams)
            )
        entries = {name.decode(): part for name, part in replies}
        self._more_waiting = any(len(entries.get(s, ())) == n for s, n in zip(streams, counts, strict=True))
        for stream in streams:
            for entry_id, fields in entries.get(stream, ()):
                await self._accept(stream, entry_id, fields, num_deliveries=1)

    def _group_read(self) -> tuple[str, ...]:
        return "XREADGROUP", "GROUP", PRODUCERS_GROUP, self._consumer

    async def _accept(self, stream: str, entry_id: bytes, fields: Fields, num_deliveries: int) -> Claim | None:
        """Adds an entry's claim to the table and returns it; None if there is nothing to start.

        An entry that names no task, or is of an earlier run of this name, is removed: the trainer's reconciliation
        releases its index again. An entry is already in the table if Redis has lost the claim but not the entry, or
        received the entry again.
        """
        if (stream, entry_id) in self._table:
            return None
        is_evaluation, before = stream == self._keys.evaluations, fields
        if is_evaluation:
            version, _, n = entry_id.partition(b"-")
            before = {**fields, Field.INDEX: n, Field.VERSION: version, Field.ATTEMPT: b"0"}
        try:
            released = _number(Field.ATTEMPT, before.get(Field.ATTEMPT, b"0"))
            claim = Claim(
                stream=stream,
                entry_id=entry_id,
                index=_number(Field.INDEX, before.get(Field.INDEX)),
                version=_number(Field.VERSION, before.get(Field.VERSION)),
                run_id=await self._run_of(before.get(Field.RUN_ID, b"").decode(errors="replace")),
                attempt=released + num_deliveries,
                attempt_released=released,
                evaluation_id=entry_id.decode() if is_evaluation else None,
                environment=before.get(Field.ENVIRONMENT, b"").decode(errors="replace"),
                task=_number(Field.TASK, before.get(Field.TASK, b"0")),
                num_handed_back=_number(Field.TRIES_LOST, before.get(Field.TRIES_LOST, b"0")),
            )
        except ValueError as error:
            log.error("%s entry %s names no task of this run, removed: %s", stream, entry_id.decode(), error)
            pipeline = self._connection.commands.pipeline(transaction=True)
            pipeline.execute_command("XACK", stream, PRODUCERS_GROUP, entry_id)
            pipeline.execute_command("XDEL", stream, entry_id)
            await pipeline.execute()
            return None
        self._table.add(claim)
        self._accepted.append(claim)
        return claim

    async def _run_of(self, run_id: str) -> str:
        """Returns the run of a prompt. Raises ValueError if it is not the run that releases them now."""
        if run_id and run_id != self.run_id:
            found: Any = await self._connection.commands.hget(self._keys.commit, Commit.RUN_ID.decode())
            self.run_id = (found or b"").decode()
            if run_id != self.run_id:
                raise ValueError(f"field run_id = {run_id[:SHOWN_BYTES]!r}, and this is run {self.run_id}")
        return run_id

    async def take_over(self, stream: str) -> Claim | None:
        """Takes over one entry that was not refreshed for `claim_idle_s`; returns None if there is none.

        One at a time: it may have to run alone, and the other producers take the next ones meanwhile.
        """
        redis, idle_ms = self._connection.commands, int(self._config.claim_idle_s * 1000)
        # Our own idle entries are groups past their deadline, about to be settled here.
        num_rows = len(self._table) + 1
        pending: Any = await redis.xpending_range(stream, PRODUCERS_GROUP, "-", "+", num_rows, idle=idle_ms)
        row = next((row for row in pending if (stream, row["message_id"]) not in self._table), None)
        if row is None:
            return None
        entry_id, holder, num_deliveries = row["message_id"], row["consumer"], row["times_delivered"]
        taken: Any = await redis.xclaim(stream, PRODUCERS_GROUP, self._consumer, idle_ms, [entry_id])
        if not taken:
            return None
        claim = await self._accept(stream, entry_id, taken[0][1], num_deliveries + 1)
        if claim is not None:
            log.warning(
                "took %s over from %s, attempt %d", claim, one_line(holder.decode(errors="replace")), claim.attempt
            )
        return claim

    async def _adopt_lost(self) -> None:
        num_adopted = 0
        redis = self._connection.commands
        for stream, entry_id, num_deliveries in await self._own_pending():
            if (stream, entry_id) in self._table:
                continue
            # RETRYCOUNT keeps the count: the prompt was delivered once, only the reply was lost.
            claimed: Any = await redis.xclaim(
                stream, PRODUCERS_GROUP, self._consumer, 0, [entry_id], retrycount=num_deliveries
            )
            if claimed and await self._accept(stream, entry_id, claimed[0][1], num_deliveries):
                num_adopted += 1
        if num_adopted:
            log.warning("found %d claims of this producer whose reply was lost", num_adopted)

    async def _own_pending(self) -> list[tuple[str, bytes, int]]:
        """Returns (stream, entry id, number of deliveries) of everything claimed under this id."""
        found: list[tuple[str, bytes, int]] = []
        for stream in self._streams:
            start = "-"
            while True:
                try:
                    rows: Any = await self._connection.commands.xpending_range(
                        stream, PRODUCERS_GROUP, start, "+", IDS_PER_COMMAND, self._consumer
                    )
                except ResponseError as error:
                    _raise_unless_no_group(error)
                    break
                found += [(stream, row["message_id"], row["times_delivered"]) for row in rows]
                if len(rows) < IDS_PER_COMMAND:
                    break
                start = "(" + rows[-1]["message_id"].decode()
        return found

    async def _create_groups(self) -> None:
        for stream in (self._keys.prompts, self._keys.evaluations):
            try:
                await self._connection.commands.xgroup_create(stream, PRODUCERS_GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not has_code(error, "BUSYGROUP"):
                    raise

    async def _free_former_claims(self) -> None:
        # An earlier process of this id died holding these. That counts as an attempt, and they are free for every
        # producer, so that a restarted one does not begin with those that have to run alone, one after another.
        pipeline = self._connection.commands.pipeline(transaction=False)
        former = await self._own_pending()
        for stream, entry_id, _ in former:
            pipeline.xclaim(stream, PRODUCERS_GROUP, self._consumer, 0, [entry_id], idle=FREE_AT_ONCE_MS, justid=True)
        if former:
            try:
                await pipeline.execute()
            except ResponseError as error:
                _raise_unless_no_group(error)  # Redis was emptied in between: nothing is left to free
            log.warning("an earlier process of this id left %d claims: free for takeover", len(former))

    def to_be_kept(self) -> dict[tuple[str, bool], list[bytes]]:
        """Returns entry ids by stream and by whether their count of attempts is reset."""
        oldest = running_s() - self._config.generation_deadline_s
        kept: dict[tuple[str, bool], list[bytes]] = {}
        for claim in self._table:
            if claim.generating_since is None or claim.generating_since >= oldest:
                kept.setdefault((claim.stream, claim.has_proved), []).append(claim.entry_id)
        return kept

    async def refresh(self, kept: dict[tuple[str, bool], list[bytes]]) -> None:
        """Tells Redis that these claims are alive; `kept` is what `to_be_kept` returns."""
        pipeline = self._connection.commands.pipeline(transaction=False)
        for (stream, have_proved), ids in kept.items():
            count = 0 if have_proved else None
            for start in range(0, len(ids), IDS_PER_COMMAND):
                chunk: Any = ids[start : start + IDS_PER_COMMAND]
                pipeline.xclaim(stream, PRODUCERS_GROUP, self._consumer, 0, chunk, retrycount=count, justid=True)
        try:
            await pipeline.execute()
        except ResponseError as error:
            _raise_unless_no_group(error)  # the next claim creates it again

    async def _hand_back(self, claims: list[Claim]) -> None:
        """Adds a new entry in place of each claimed prompt: a claimed entry cannot be returned to its stream, and a new
        one reaches a waiting producer without a search for idle claims. An evaluation's id names it and cannot be used
        twice, so its claim is marked idle for the next producer that looks. So is the claim of conversations that can
        be continued: agents wait for them, and behind new prompts they might wait for each other."""
        pipeline = self._connection.commands.pipeline(transaction=True)
        for claim in claims:
            before, stream, entry_id = claim.num_attempts_before, claim.stream, claim.entry_id
            if claim.evaluation_id is None and not (claim.converses and claim.has_progress):
                fields = {
                    Field.INDEX: claim.index,
                    Field.VERSION: claim.version,
                    Field.ATTEMPT: before,
                    Field.TRIES_LOST: claim.num_handed_back + claim.has_begun,
                    Field.ENVIRONMENT: claim.environment,
                    Field.TASK: claim.task,
                } | ({Field.RUN_ID: claim.run_id} if claim.run_id else {})
                pipeline.xadd(stream, fields)  # type: ignore[arg-type]
                pipeline.execute_command("XACK", stream, PRODUCERS_GROUP, entry_id)
                pipeline.execute_command("XDEL", stream, entry_id)
            else:
                ids: Any = [entry_id]
                num = max(0, before - claim.attempt_released)  # the entry keeps the attempts it was released with
                own = self._consumer
                pipeline.xclaim(stream, PRODUCERS_GROUP, own, 0, ids, idle=FREE_AT_ONCE_MS, retrycount=num, justid=True)
        try:
            await pipeline.execute()
        except ResponseError as error:
            _raise_unless_no_group(error)  # an emptied Redis: the trainer requests its evaluations again
        for claim in claims:
            self._table.remove(claim)


def _number(name: bytes, field: bytes | None) -> int:
    number = number_in(field)
    if number is None:
        found = repr(field if field is None else field[:SHOWN_BYTES])
        raise ValueError(f"field {name.decode()} = {found}, expected a number of at most 18 digits")
    return number


def _raise_unless_no_group(error: ResponseError) -> None:
    """Raises `error` again unless it is that the consumer group is missing."""
    if not has_code(error, "NOGROUP"):
        raise error
