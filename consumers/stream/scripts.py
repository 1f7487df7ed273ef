"""The trainer's writes to Redis: scripts that refuse a trainer of an older epoch.

`allow-oom` lets them run at the memory limit: a commit frees memory, so it must not be refused there.
Payloads never pass through a script (ARGV is slow at 16 kB and more); dead letters, and the run's description when it
starts, are the rare exceptions.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import redis

from penstock.consumers.stream.ledger import ReleasedTask
from penstock.consumers.stream.reader import Refused
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Keys

MOST_PENDING = 1_000_000
"""More prompts than any credit allows to be open at once."""

INDEXES_PER_CALL = 1000

_HEAD = "#!lua flags=allow-oom\n"

# ARGV begins with the trainer's epoch, KEYS with the commit hash.
_FENCE = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED this trainer is of epoch ' .. ARGV[1] .. ', the run is in epoch ' .. epoch)
elseif epoch < tonumber(ARGV[1]) then
  return redis.error_reply('GONE this trainer is of epoch ' .. ARGV[1] .. ', redis knows of epoch ' .. epoch)
end
"""

# ARGV: epoch, owner, lease in ms
_OPEN_EPOCH = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if tonumber(ARGV[1]) < epoch or (tonumber(ARGV[1]) == epoch and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2]) then
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is open already')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2])
redis.call('HDEL', KEYS[1], 'finished')
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return redis.call('HGETALL', KEYS[1])
"""

# ARGV: epoch, owner, release cursor, field, value, field, value...
_RESTORE = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch > tonumber(ARGV[1]) or (epoch == tonumber(ARGV[1]) and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2]) then
  return redis.error_reply('FENCED this trainer is of epoch ' .. ARGV[1] .. ', the run is in epoch ' .. epoch)
end
local released = math.max(tonumber(redis.call('HGET', KEYS[1], 'released') or '0'), tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2], 'released', released)
redis.call('HDEL', KEYS[1], 'finished')
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return epoch
"""

_CHECK = "return epoch"

# ARGV: owner, lease in ms
_HOLD_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_LEAVE_LEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

# ARGV: epoch, policy version, index before the first, then environment and number of each index's task. Those released
# already (after a lost reply) are not released again.
_RELEASE = """
local index = tonumber(ARGV[3])
local released = tonumber(redis.call('HGET', KEYS[1], 'released') or '0')
for i = 4, #ARGV, 2 do
  index = index + 1
  if index > released then
    redis.call(
      'XADD', KEYS[2], '*', 'index', index, 'version', ARGV[2], 'environment', ARGV[i], 'task', ARGV[i + 1])
    redis.call('HSET', KEYS[3], index, ARGV[i + 1] .. ' ' .. ARGV[i])
  end
end
released = math.max(released, index)
redis.call('HSET', KEYS[1], 'released', released)
return released
"""

# ARGV: epoch, policy version, then index, environment and number of each task. Letters that a requeue or a rollback has
# voided no longer block new ones. Redis may have lost the tasks of the first release.
_RELEASE_AGAIN = """
for i = 3, #ARGV, 3 do
  redis.call('HDEL', KEYS[3], ARGV[i])
  redis.call(
    'XADD', KEYS[2], '*', 'index', ARGV[i], 'version', ARGV[2], 'environment', ARGV[i + 1], 'task', ARGV[i + 2])
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 2] .. ' ' .. ARGV[i + 1])
end
return (#ARGV - 2) / 3
"""

# ARGV: epoch, the producers' group, the most claims possible. Removes entries that were delivered and are unclaimed.
_DROP_UNREACHABLE = """
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
"""

# ARGV: epoch, field, value, field, value...
_DESCRIBE = """
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
return epoch
"""

# ARGV: epoch, field, value, field, value... Other fields are removed.
_NOTE_PARITY = """
local kept = {}
for i = 2, #ARGV, 2 do
  kept[ARGV[i]] = true
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not kept[field] then redis.call('HDEL', KEYS[2], field) end
end
return epoch
"""

# ARGV: epoch, policy version, manifest or '' (announced already), whole manifest or '', oldest version kept, parent
# version of the epoch's first policy or ''. Existing entries (after a lost reply) are not added again.
_ANNOUNCE = """
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
"""

# ARGV: epoch, then entry id (ascending), environment and number of each held-out prompt. XADD fails for one that was
# requested before. All in one script: on a stream that was emptied, ids of an older version could not follow those of a
# newer one.
_EVALUATE = """
local added = 0
for i = 2, #ARGV, 3 do
  local reply = redis.pcall('XADD', KEYS[2], ARGV[i], 'environment', ARGV[i + 1], 'task', ARGV[i + 2])
  if type(reply) ~= 'table' then added = added + 1 end
end
return added
"""

# ARGV: epoch, index or '', reason, payload, rollout entry or '', producer or '', traceback or ''.
# A letter repeated after a lost reply is the newest.
_DEAD_LETTER = """
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
"""

# ARGV: epoch, checkpoint, first rollout entry to keep, first evaluation result to keep, index up to which the
# checkpoints hold every task
_COMMIT = """
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2])
for _, index in ipairs(redis.call('HKEYS', KEYS[4])) do
  if tonumber(index) <= tonumber(ARGV[5]) then redis.call('HDEL', KEYS[4], index) end
end
redis.call('XTRIM', KEYS[3], 'MINID', ARGV[4])
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
"""

_FINISH = """
redis.call('HSET', KEYS[1], 'finished', '1')
return redis.call('XLEN', KEYS[2])
"""


class FencedError(RuntimeError):
    """A newer trainer has taken over the run; this one must stop."""


class GoneError(RuntimeError):
    """Redis has lost this trainer's epoch: it was emptied, or returned to an older state."""


_REFUSALS = {"FENCED": FencedError, "GONE": GoneError}
"""By the code in a script's answer."""


class Scripts:
    """One method per script. Each takes a client so that the connection's retry loop stays the only one.

    If Redis has lost the epoch, `restore` is called, and the script runs once more.
    """

    def __init__(self, client: redis.Redis, keys: Keys, restore: Callable[[], None] | None = None) -> None:
        self._keys = keys
        self._restore = restore
        unfenced = {
            "open_epoch": _OPEN_EPOCH,
            "restore": _RESTORE,
            "hold_lease": _HOLD_LEASE,
            "leave_lease": _LEAVE_LEASE,
        }
        fenced = {
            "check": _CHECK,
            "describe": _DESCRIBE,
            "note_parity": _NOTE_PARITY,
            "release": _RELEASE,
            "release_again": _RELEASE_AGAIN,
            "drop_unreachable": _DROP_UNREACHABLE,
            "announce": _ANNOUNCE,
            "evaluate": _EVALUATE,
            "dead_letter": _DEAD_LETTER,
            "commit": _COMMIT,
            "finish": _FINISH,
        }
        scripts = unfenced | {name: _FENCE + script for name, script in fenced.items()}
        self._scripts = {name: client.register_script(_HEAD + script) for name, script in scripts.items()}

    def open_epoch(self, epoch: int, owner: str, lease_s: float = 1.0) -> dict[bytes, bytes]:
        """Raises the run's epoch, takes the lease whoever holds it, and returns the commit hash. `owner` makes a
        repeated call after a lost reply safe."""
        keys = [self._keys.commit, self._keys.lease]
        flat = self._run("open_epoch", keys, epoch, owner, int(lease_s * 1000))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def restore(self, epoch: int, owner: str, released: int, fields: Mapping[str, str | int]) -> int:
        """Restores `fields` of the commit hash of an unfinished run; returns the epoch that was there, -1 for none."""
        return self._run("restore", [self._keys.commit], epoch, owner, released, *chain(*fields.items()))

    def check(self, epoch: int) -> None:
        """Raises FencedError if a newer epoch is open."""
        self._run("check", [self._keys.commit], epoch)

    def describe(self, epoch: int, fields: Mapping[str, bytes]) -> None:
        """Writes the run's description; see `penstock.schemas.description`."""
        self._run("describe", [self._keys.commit, self._keys.description], epoch, *chain(*fields.items()))

    def note_tasks(self, epoch: int, tasks: Mapping[int, ReleasedTask]) -> None:
        """Writes the tasks of released indexes, as their releases did: Redis may have lost them."""
        fields = ((index, f"{task.number} {task.environment}") for index, task in tasks.items())
        self._run("describe", [self._keys.commit, self._keys.tasks], epoch, *chain(*fields))

    def note_parity(self, epoch: int, fields: Mapping[str, bytes]) -> None:
        """Writes the findings about the producers' rows, by instance, in place of the earlier ones."""
        self._run("note_parity", [self._keys.commit, self._keys.parity], epoch, *chain(*fields.items()))

    def hold_lease(self, owner: str, lease_s: float) -> bool:
        """Takes a free lease, or renews `owner`'s; False if another holds it."""
        return bool(self._run("hold_lease", [self._keys.lease], owner, int(lease_s * 1000)))

    def leave_lease(self, owner: str) -> None:
        self._run("leave_lease", [self._keys.lease], owner)

    def release(self, epoch: int, after: int, tasks: Sequence[ReleasedTask], version: int) -> int:
        """Releases the indexes that follow `after`, one for each task; returns the release cursor."""
        keys, cursor = [self._keys.commit, self._keys.prompts, self._keys.tasks], after
        for start in range(0, len(tasks), INDEXES_PER_CALL):
            part = tasks[start : start + INDEXES_PER_CALL]
            cursor = self._run("release", keys, epoch, version, after + start, *chain(*part))
        return cursor

    def release_again(self, epoch: int, version: int, tasks: Sequence[tuple[int, ReleasedTask]]) -> None:
        """Releases indexes once more, each with its task."""
        keys = [self._keys.commit, self._keys.prompts, self._keys.dead_index, self._keys.tasks]
        for start in range(0, len(tasks), INDEXES_PER_CALL):
            part = ((index, *task) for index, task in tasks[start : start + INDEXES_PER_CALL])
            self._run("release_again", keys, epoch, version, *chain(*part))

    def drop_unreachable(self, epoch: int) -> int:
        """Removes prompts that were delivered and that no producer has claimed: no producer can get them any more.
        Returns how many."""
        keys = [self._keys.commit, self._keys.prompts]
        return self._run("drop_unreachable", keys, epoch, PRODUCERS_GROUP, MOST_PENDING)

    def announce(
        self, epoch: int, version: int, manifest: bytes, anchor: bytes, floor: int, parent: int | None
    ) -> None:
        """Puts `manifest` onto the policy stream and `anchor` among the anchors, either unless it is empty; then drops
        everything older than version `floor`. parent: of an epoch's first policy after a resume."""
        keys = [self._keys.commit, self._keys.policy, self._keys.anchors]
        self._run("announce", keys, epoch, version, manifest, anchor, floor, "" if parent is None else parent)

    def evaluate(self, epoch: int, prompts: Sequence[tuple[str, ReleasedTask]]) -> int:
        """Requests held-out prompts, by entry id, ascending; returns how many were not requested before."""
        requests = ((entry_id, *task) for entry_id, task in prompts)
        return self._run("evaluate", [self._keys.commit, self._keys.evaluations], epoch, *chain(*requests))

    def dead_letter(self, epoch: int, refused: Refused) -> None:
        keys = [self._keys.commit, self._keys.dead, self._keys.dead_index]
        index = "" if refused.index is None else refused.index
        origin = refused.entry_id, refused.producer, refused.traceback
        self._run("dead_letter", keys, epoch, index, refused.reason, refused.payload, *origin)

    def commit(
        self, epoch: int, checkpoint: str, keep_rollouts: bytes, keep_results: bytes, forget_tasks: int = 0
    ) -> int:
        """Points the run at `checkpoint`, trims the streams up to it, and forgets the tasks of indexes up to
        `forget_tasks`; returns the number of rollout entries trimmed."""
        keys = [self._keys.commit, self._keys.rollouts, self._keys.evaluation_results, self._keys.tasks]
        return self._run("commit", keys, epoch, checkpoint, keep_rollouts, keep_results, forget_tasks)

    def finish(self, epoch: int) -> int:
        """Marks the run finished; returns the number of prompts still open."""
        return self._run("finish", [self._keys.commit, self._keys.prompts], epoch)

    def _run(self, name: str, keys: list[str], *args: Any) -> Any:
        try:
            return self._call(name, keys, args)
        except GoneError:
            if self._restore is None:
                raise
            self._restore()
            return self._call(name, keys, args)

    def _call(self, name: str, keys: list[str], args: tuple[Any, ...]) -> Any:
        try:
            return self._scripts[name](keys=keys, args=args)
        except redis.ResponseError as error:
            code, _, problem = str(error).partition(" ")
            if code in _REFUSALS:
                raise _REFUSALS[code](problem) from error
            raise


def forks_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """Returns the fork table in the commit hash: epoch to the version that its first policy equals."""
    return _by_epoch(commit, Commit.FORK)


def announced_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """Returns the last version announced in each epoch."""
    return _by_epoch(commit, Commit.ANNOUNCED)


def _by_epoch(commit: dict[bytes, bytes], prefix: bytes) -> dict[int, int]:
    return {int(field.removeprefix(prefix)): int(value) for field, value in commit.items() if field.startswith(prefix)}
