"""Every Lua script of a run: the trainer's writes to Redis, which refuse a trainer of an older epoch, and what the
commands of operators run.

`allow-oom` lets them run at the memory limit: a commit frees memory, so it must not be refused there.
Payloads never pass through a script (ARGV is slow at 16 kB and more); dead letters, and the run's description when it
starts, are the rare exceptions.
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import redis

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.reader import LARGEST_CLOCK, Refused
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Keys
from penstock.schemas.process.outage import takes_no_more

log = logging.getLogger(__name__)

MOST_PENDING = 1_000_000
"""More prompts than any credit allows to be open at once."""

INDEXES_PER_CALL = 1000
MOST_RENEWED = 10
"""How often one script runs again because a stream was made anew."""

_HEAD = "#!lua flags=allow-oom\n"

_OF_THIS_RUN = """
local there = redis.call('HGET', KEYS[1], 'run_id')
if there and there ~= run_id then
  return redis.error_reply('FENCED run ' .. there .. ' has begun here under the name of this one, ' .. run_id)
end
"""

# ARGV begins with the trainer's epoch and ends with its run's id, which is removed; KEYS begins with the commit hash.
_FENCE = f"""
local run_id = table.remove(ARGV)
{_OF_THIS_RUN}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED this trainer is of epoch ' .. ARGV[1] .. ', the run is in epoch ' .. epoch)
elseif epoch < tonumber(ARGV[1]) then
  return redis.error_reply('GONE this trainer is of epoch ' .. ARGV[1] .. ', redis knows of epoch ' .. epoch)
end
"""

_UNFENCED = {
    # ARGV: epoch, owner, lease in ms, id of a new run
    "open_epoch": """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if tonumber(ARGV[1]) < epoch or (tonumber(ARGV[1]) == epoch and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2]) then
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is open already')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2])
if not redis.call('HGET', KEYS[1], 'run_id') then redis.call('HSET', KEYS[1], 'run_id', ARGV[4]) end
redis.call('HDEL', KEYS[1], 'finished')
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
for i = 3, 4 do redis.call('XTRIM', KEYS[i], 'MAXLEN', 0) end
return redis.call('HGETALL', KEYS[1])
""",
    # ARGV: epoch, owner, release cursor, run id, field, value, field, value...
    "restore": f"""
local run_id = ARGV[4]
{_OF_THIS_RUN}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch > tonumber(ARGV[1]) or (epoch == tonumber(ARGV[1]) and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2]) then
  return redis.error_reply('FENCED this trainer is of epoch ' .. ARGV[1] .. ', the run is in epoch ' .. epoch)
end
local released = math.max(tonumber(redis.call('HGET', KEYS[1], 'released') or '0'), tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2], 'released', released, 'run_id', run_id)
redis.call('HDEL', KEYS[1], 'finished')
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return epoch
""",
    # ARGV: owner, lease in ms
    "hold_lease": """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""",
    "leave_lease": "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end",
}

_FENCED = {
    "check": "return epoch",
    # ARGV: epoch, policy version, index before the first, then environment and number of each index's task. Those
    # released already (after a lost reply) are not released again.
    "release": """
local index = tonumber(ARGV[3])
local released = tonumber(redis.call('HGET', KEYS[1], 'released') or '0')
for i = 4, #ARGV, 2 do
  index = index + 1
  if index > released then
    redis.call(
      'XADD', KEYS[2], '*', 'index', index, 'version', ARGV[2], 'environment', ARGV[i], 'task', ARGV[i + 1],
      'run_id', run_id)
    redis.call('HSET', KEYS[3], index, ARGV[i + 1] .. ' ' .. ARGV[i])
  end
end
released = math.max(released, index)
redis.call('HSET', KEYS[1], 'released', released)
return released
""",
    # ARGV: epoch, policy version, then index, environment and number of each task. Letters that a requeue or a rollback
    # has voided no longer block new ones. Redis may have lost the tasks of the first release.
    "release_again": """
for i = 3, #ARGV, 3 do
  redis.call('HDEL', KEYS[3], ARGV[i])
  redis.call(
    'XADD', KEYS[2], '*', 'index', ARGV[i], 'version', ARGV[2], 'environment', ARGV[i + 1], 'task', ARGV[i + 2],
    'run_id', run_id)
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 2] .. ' ' .. ARGV[i + 1])
end
return (#ARGV - 2) / 3
""",
    # ARGV: epoch, the producers' group, the most claims possible. Removes entries that were delivered and are
    # unclaimed.
    "drop_unreachable": """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local delivered
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[2])) do
  local group = {}
  for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
  if group['name'] == ARGV[2] then delivered = group['last-delivered-id'] end
end
if not delivered then return 0 end
local claimed = {}
for _, claim in ipairs(redis.call('XPENDING', KEYS[2], ARGV[2], '-', '+', ARGV[3])) do claimed[claim[1]] = true end
local dropped = 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', delivered)) do
  if not claimed[entry[1]] then dropped = dropped + redis.call('XDEL', KEYS[2], entry[1]) end
end
return dropped
""",
    # ARGV: epoch, field, value, field, value...
    "describe": """
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return epoch
""",
    # ARGV: epoch, field, value, field, value... Other fields are removed.
    "note_parity": """
local kept = {}
for i = 2, #ARGV, 2 do
  kept[ARGV[i]] = true
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not kept[field] then redis.call('HDEL', KEYS[2], field) end
end
return epoch
""",
    # ARGV: epoch, policy version, manifest or '' (announced already), whole manifest or '', oldest version kept, parent
    # version of the epoch's first policy or ''. Existing entries (after a lost reply) are not added again.
    "announce": """
local floor = tonumber(ARGV[5])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[3], ARGV[2], ARGV[4]) end
if ARGV[3] ~= '' then
  local id = ARGV[2] .. '-1'
  if #redis.call('XRANGE', KEYS[2], id, id) == 0 then redis.call('XADD', KEYS[2], id, 'manifest', ARGV[3]) end
  redis.call('HSET', KEYS[1], 'policy_version', ARGV[2], 'announced:' .. ARGV[1], ARGV[2])
  if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'fork:' .. ARGV[1], ARGV[6]) end
end
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[5] .. '-0')
for _, version in ipairs(redis.call('HKEYS', KEYS[3])) do
  if (tonumber(version) or floor) < floor then redis.call('HDEL', KEYS[3], version) end
end
return ARGV[2]
""",
    # ARGV: epoch, then entry id (ascending), environment and number of each held-out prompt. XADD fails for one that
    # was requested before. All in one script: on a stream that was emptied, ids of an older version could not follow
    # those of a newer one.
    "evaluate": """
local added = 0
for i = 2, #ARGV, 3 do
  local reply = redis.pcall(
    'XADD', KEYS[2], ARGV[i], 'environment', ARGV[i + 1], 'task', ARGV[i + 2], 'run_id', run_id)
  if type(reply) ~= 'table' then added = added + 1 end
end
return added
""",
    # ARGV: epoch, index or '', reason, payload, rollout entry or '', producer or '', traceback or ''.
    # A letter repeated after a lost reply is the newest.
    "dead_letter": """
if ARGV[2] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 0 end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if ARGV[5] ~= '' and newest and newest[2][8] == ARGV[5] then return 0 end
local fields = {'index', ARGV[2], 'reason', ARGV[3], 'payload', ARGV[4], 'entry', ARGV[5]}
for i, name in ipairs({'producer', 'traceback'}) do
  if ARGV[5 + i] ~= '' then table.insert(fields, name); table.insert(fields, ARGV[5 + i]) end
end
local id = redis.call('XADD', KEYS[2], '*', unpack(fields))
if ARGV[2] ~= '' then redis.call('HSET', KEYS[3], ARGV[2], id) end
return 1
""",
    # ARGV: epoch, then ids of held-out prompts
    "drop_evaluations": "for i = 2, #ARGV do redis.call('XDEL', KEYS[2], ARGV[i]) end",
    # ARGV: epoch, first entry to keep
    "trim_results": "return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])",
    # KEYS: the images of the rollouts, streams, the rollouts' first. ARGV: epoch, then the largest first number of an
    # entry id for each stream. Deletes streams that hold, or held, larger ones: nothing, or nothing with the ids it
    # needs, can be added to them. Returns their names.
    "renew": """
local renewed = {}
for i = 3, #KEYS do
  local flat = redis.call('EXISTS', KEYS[i]) == 1 and redis.call('XINFO', 'STREAM', KEYS[i]) or {}
  for j = 1, #flat, 2 do
    if flat[j] == 'last-generated-id' and tonumber(string.match(flat[j + 1], '%d+')) > tonumber(ARGV[i - 1]) then
      redis.call('DEL', KEYS[i])
      if i == 3 then redis.call('DEL', KEYS[2]) end
      renewed[#renewed + 1] = KEYS[i]
    end
  end
end
return renewed
""",
    # ARGV: epoch, checkpoint, first rollout entry to keep, index up to which the checkpoints hold every task, then the
    # images of the entries before
    "commit": """
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2])
for _, index in ipairs(redis.call('HKEYS', KEYS[3])) do
  if tonumber(index) <= tonumber(ARGV[4]) then redis.call('HDEL', KEYS[3], index) end
end
for i = 5, #ARGV do redis.call('HDEL', KEYS[4], ARGV[i]) end
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
""",
    "finish": """
redis.call('HSET', KEYS[1], 'finished', '1')
return redis.call('XLEN', KEYS[2])
""",
}

SCRIPTS = {
    **{name: _HEAD + script for name, script in _UNFENCED.items()},
    **{name: _HEAD + _FENCE + script for name, script in _FENCED.items()},
}
"""The text of each script, by the method that runs it."""


# KEYS: commit, dead_index, requeued; ARGV: index, letter, index, letter... A letter is taken only if it is the current
# one of its index, which it is until the trainer releases the index again.
REQUEUE_DEAD = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'finished') == '1' then return redis.error_reply('FINISHED') end
local taken = {}
for i = 1, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
    taken[#taken + 1] = ARGV[i]
  end
end
return taken
"""
"""Of `penstock dead requeue`: returns the indexes whose letters were taken."""

# KEYS: stream; ARGV: first id, count, field
INDEXES_ON_STREAM = """#!lua flags=no-writes,allow-oom
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local value = ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == ARGV[3] then value = entry[2][i + 1] end
  end
  found[#found + 1] = entry[1]
  found[#found + 1] = value
end
return found
"""
"""Of `penstock audit`: returns the ids and indexes of entries without their payloads."""


class FencedError(RuntimeError):
    """A newer trainer has taken over the run, or another run has begun under its name; this one must stop."""


class GoneError(RuntimeError):
    """Redis has lost this trainer's epoch: it was emptied, or returned to an older state."""


_REFUSALS = {"FENCED": FencedError, "GONE": GoneError}
"""By the code in a script's answer."""


class Scripts:
    """A trainer's writes to a run, one method per script: each is made under the epoch that it has opened.

    Every script is retried as `TrainerConnection.call` does, except where a method says otherwise. If Redis has lost
    the epoch, `on_gone` is called, and the script runs again.
    """

    def __init__(
        self,
        connection: TrainerConnection,
        keys: Keys,
        on_gone: Callable[[], None] | None = None,
        lease_s: float = 1.0,
    ) -> None:
        self.connection = connection
        self.keys = keys
        self.epoch = -1
        """-1 until `open_epoch`."""
        self.run_id = ""
        """See `penstock.schemas.keys.Commit`; empty until `open_epoch`."""
        self._version = -1
        """The newest policy announced or to be evaluated."""
        self._has_renewed = False
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._lease_ms = int(lease_s * 1000)
        self._on_gone = on_gone
        self._scripts = {name: connection.client.register_script(text) for name, text in SCRIPTS.items()}

    def open_epoch(self, epoch: int, run_id: str = "") -> dict[bytes, bytes]:
        """Raises the run's epoch, takes the lease whoever holds it, and returns the commit hash. Evaluations that an
        earlier trainer asked for are dropped. run_id: of a run that Redis does not hold; a new one if it is empty."""
        self.epoch = epoch
        keys = [self.keys.commit, self.keys.lease, self.keys.evaluations, self.keys.evaluation_results]
        args = epoch, self._owner, self._lease_ms, run_id or new_run_id()
        flat = self.connection.call(lambda _: self._call("open_epoch", keys, args))
        commit = dict(zip(flat[::2], flat[1::2], strict=True))
        self.run_id = commit[Commit.RUN_ID].decode()
        return commit

    def restore(self, released: int, fields: Mapping[str, str | int]) -> int:
        """Restores `fields` of the commit hash of an unfinished run; returns the epoch that was there, -1 for none. Not
        retried."""
        args = (self.epoch, self._owner, released, self.run_id, *chain(*fields.items()))
        return self._call("restore", [self.keys.commit], args)

    def hold_lease(self) -> bool:
        """Takes a free lease, or renews this trainer's; False if another holds it. Not retried."""
        return bool(self._call("hold_lease", [self.keys.lease], (self._owner, self._lease_ms)))

    def leave_lease(self) -> None:
        """Gives this trainer's lease up. Not retried."""
        self._call("leave_lease", [self.keys.lease], (self._owner,))

    def check(self) -> None:
        """Raises FencedError if a newer epoch is open."""
        self._run("check", [])

    def describe(self, fields: Mapping[str, bytes]) -> None:
        """Writes the run's description; see `penstock.schemas.description`."""
        self._run("describe", [self.keys.description], *chain(*fields.items()))

    def note_tasks(self, tasks: Mapping[int, ReleasedTask]) -> None:
        """Writes the tasks of released indexes, as their releases did: Redis may have lost them."""
        fields = ((index, f"{task.number} {task.environment}") for index, task in tasks.items())
        self._run("describe", [self.keys.tasks], *chain(*fields))

    def note_parity(self, fields: Mapping[str, bytes]) -> None:
        """Writes the findings about the producers' rows, by instance, in place of the earlier ones."""
        self._run("note_parity", [self.keys.parity], *chain(*fields.items()))

    def release(self, after: int, tasks: Sequence[ReleasedTask], version: int) -> int:
        """Releases the indexes that follow `after`, one for each task; returns the release cursor."""
        keys, cursor = [self.keys.prompts, self.keys.tasks], after
        for start in range(0, len(tasks), INDEXES_PER_CALL):
            part = tasks[start : start + INDEXES_PER_CALL]
            cursor = self._run("release", keys, version, after + start, *chain(*part))
        return cursor

    def release_again(self, version: int, tasks: Sequence[tuple[int, ReleasedTask]]) -> None:
        """Releases indexes once more, each with its task."""
        keys = [self.keys.prompts, self.keys.dead_index, self.keys.tasks]
        for start in range(0, len(tasks), INDEXES_PER_CALL):
            part = ((index, *task) for index, task in tasks[start : start + INDEXES_PER_CALL])
            self._run("release_again", keys, version, *chain(*part))

    def drop_unreachable(self) -> int:
        """Removes prompts that were delivered and that no producer has claimed: no producer can get them any more.
        Returns how many."""
        return self._run("drop_unreachable", [self.keys.prompts], PRODUCERS_GROUP, MOST_PENDING)

    def announce(self, version: int, manifest: bytes, anchor: bytes, floor: int, parent: int | None = None) -> None:
        """Puts `manifest` onto the policy stream and `anchor` among the anchors, either unless it is empty; then drops
        everything older than version `floor`. parent: of an epoch's first policy after a resume."""
        keys, self._version = [self.keys.policy, self.keys.anchors], max(self._version, version)
        self._run("announce", keys, version, manifest, anchor, floor, "" if parent is None else parent)

    def evaluate(self, prompts: Sequence[tuple[str, ReleasedTask]]) -> int:
        """Requests held-out prompts, by entry id, ascending; returns how many were not requested before."""
        if not prompts:
            return 0
        # A policy may be evaluated before it is announced, and a request that is repeated adds nothing either.
        self._version = max(self._version, int(prompts[-1][0].partition("-")[0]))
        requests = [*chain(*((entry_id, *task) for entry_id, task in prompts))]
        added: int = self._run("evaluate", [self.keys.evaluations], *requests)
        return added or (self._run("evaluate", [self.keys.evaluations], *requests) if self.renew() else 0)

    def drop_evaluations(self, entry_ids: Sequence[str]) -> None:
        """Withdraws requested held-out prompts."""
        self._run("drop_evaluations", [self.keys.evaluations], *entry_ids)

    def trim_results(self, first: str) -> None:
        """Removes the answers to held-out prompts before entry `first`."""
        self._run("trim_results", [self.keys.evaluation_results], first)

    def renew(self) -> bool:
        """Deletes the streams whose entry ids are used up, as if Redis had lost them; returns whether there were any.

        One XADD with the largest id is enough, and whoever may append may send it. Until the stream is gone nothing can
        be added: producers wait, and `has_renewed` tells the trainer to release what was lost.
        """
        keys = self.keys
        by_clock = [
            keys.rollouts, keys.prompts, keys.evaluation_results, keys.dead, keys.dead_rollouts,
        ]  # fmt: skip
        limits = [
            *((key, LARGEST_CLOCK) for key in by_clock),
            (keys.evaluations, self._version),
            (keys.policy, self._version),
        ]
        renewed = self._run("renew", [keys.images, *(key for key, _ in limits)], *(limit for _, limit in limits))
        for name in renewed:
            log.warning(
                "%s: its entry ids are used up; it is made anew, and what it held is released again", name.decode()
            )
        self._has_renewed |= bool(renewed)
        return bool(renewed)

    def has_renewed(self) -> bool:
        """Returns True once after `renew` has deleted a stream."""
        had, self._has_renewed = self._has_renewed, False
        return had

    def dead_letter(self, refused: Refused) -> None:
        index = "" if refused.index is None else refused.index
        origin = refused.entry_id, refused.producer, refused.traceback
        keys = [self.keys.dead, self.keys.dead_index]
        self._run("dead_letter", keys, index, refused.reason, refused.payload, *origin)

    def commit(self, checkpoint: str, keep_rollouts: bytes, forget_tasks: int = 0, images: Sequence[bytes] = ()) -> int:
        """Points the run at `checkpoint`, trims the rollouts up to it, their images, and the tasks of indexes up to
        `forget_tasks`; returns the number of rollout entries trimmed."""
        keys = [self.keys.rollouts, self.keys.tasks, self.keys.images]
        return self._run("commit", keys, checkpoint, keep_rollouts, forget_tasks, *images)

    def finish(self) -> int:
        """Marks the run finished; returns the number of prompts still open."""
        return self._run("finish", [self.keys.prompts])

    def _run(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """Runs a fenced script, with the commit hash before `keys` and the epoch before `args`."""

        def run(_: redis.Redis) -> Any:
            return self._call(name, [self.keys.commit, *keys], (self.epoch, *args, self.run_id))

        num_renewed = 0
        while True:
            try:
                return self.connection.call(run)
            except GoneError:
                if self._on_gone is None:
                    raise
                self._on_gone()  # the server may be emptied again before the next try
            except redis.ResponseError as error:
                if not takes_no_more(error) or num_renewed == MOST_RENEWED:
                    raise
                num_renewed += 1
                self.renew()  # another thread may have been faster

    def _call(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        try:
            return self._scripts[name](keys=keys, args=args)
        except redis.ResponseError as error:
            code, _, problem = str(error).partition(" ")
            if code in _REFUSALS:
                raise _REFUSALS[code](problem) from error
            raise


def new_run_id() -> str:
    """Returns an id for a run that begins."""
    return uuid.uuid4().hex[:12]


def forks_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """Returns the fork table in the commit hash: epoch to the version that its first policy equals."""
    return _by_epoch(commit, Commit.FORK)


def announced_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """Returns the last version announced in each epoch."""
    return _by_epoch(commit, Commit.ANNOUNCED)


def _by_epoch(commit: dict[bytes, bytes], prefix: bytes) -> dict[int, int]:
    return {int(field.removeprefix(prefix)): int(value) for field, value in commit.items() if field.startswith(prefix)}
