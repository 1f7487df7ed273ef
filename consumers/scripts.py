"""The trainer's writes to Redis, each a script that refuses a trainer of an older epoch.

`allow-oom` lets them through at the memory limit: a commit is what frees memory, so it must not be refused there.
Payloads never pass through a script (ARGV is slow at 16 kB and more); dead letters are the rare exception.
"""

from typing import Any

import redis

from schemas.keys import Commit, Keys

_HEAD = "#!lua flags=allow-oom\n"

_FENCE = (
    _HEAD
    + """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch ~= tonumber(ARGV[1]) then
  return redis.error_reply('FENCED this trainer is of epoch ' .. ARGV[1] .. ', the run is in epoch ' .. epoch)
end
"""
)

_OPEN_EPOCH = (
    _HEAD
    + """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if tonumber(ARGV[1]) < epoch or (tonumber(ARGV[1]) == epoch and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[2]) then
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is open already')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[2])
redis.call('HDEL', KEYS[1], 'finished')
return redis.call('HGETALL', KEYS[1])
"""
)

# ARGV: epoch, target, floor (the highest index the trainer knows to be released), policy version
_RELEASE = (
    _FENCE
    + """
local cursor = math.max(tonumber(redis.call('HGET', KEYS[1], 'released') or '0'), tonumber(ARGV[3]))
local target = tonumber(ARGV[2])
while cursor < target do
  cursor = cursor + 1
  redis.call('XADD', KEYS[2], '*', 'index', cursor, 'version', ARGV[4])
end
redis.call('HSET', KEYS[1], 'released', cursor)
return cursor
"""
)

# ARGV: epoch, policy version, index...
_RELEASE_AGAIN = (
    _FENCE
    + """
for i = 3, #ARGV do
  redis.call('XADD', KEYS[2], '*', 'index', ARGV[i], 'version', ARGV[2])
end
return #ARGV - 2
"""
)

# ARGV: epoch, policy version, manifest, manifests to keep, parent version of the epoch's first policy or ''
_ANNOUNCE = (
    _FENCE
    + """
redis.call('XADD', KEYS[2], '*', 'manifest', ARGV[3])
redis.call('XTRIM', KEYS[2], 'MAXLEN', ARGV[4])
redis.call('HSET', KEYS[1], 'policy_version', ARGV[2], 'announced:' .. ARGV[1], ARGV[2])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'fork:' .. ARGV[1], ARGV[5]) end
return ARGV[2]
"""
)

# ARGV: epoch, policy version, first n, last n. A prompt asked for twice (after a lost reply) is there already.
_EVALUATE = (
    _FENCE
    + """
local added = 0
for n = tonumber(ARGV[3]), tonumber(ARGV[4]) do
  local reply = redis.pcall('XADD', KEYS[2], ARGV[2] .. '-' .. n, 'n', n)
  if type(reply) ~= 'table' then added = added + 1 end
end
return added
"""
)

# ARGV: epoch, index, reason, payload
_DEAD_LETTER = (
    _FENCE
    + """
if ARGV[2] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 0 end
local id = redis.call('XADD', KEYS[2], '*', 'index', ARGV[2], 'reason', ARGV[3], 'payload', ARGV[4])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[3], ARGV[2], id) end
return 1
"""
)

# ARGV: epoch, checkpoint, first rollout entry to keep, first evaluation result to keep
_COMMIT = (
    _FENCE
    + """
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2])
redis.call('XTRIM', KEYS[3], 'MINID', ARGV[4])
return redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
"""
)

_FINISH = (
    _FENCE
    + """
redis.call('HSET', KEYS[1], 'finished', '1')
return redis.call('XLEN', KEYS[2])
"""
)


class FencedError(RuntimeError):
    """A newer trainer has taken the run over; this one must stop."""


class Scripts:
    """One method per script. Each takes a client so that the connection's retry loop stays the only one."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._keys = keys
        self._scripts = {
            name: client.register_script(text)
            for name, text in {
                "open_epoch": _OPEN_EPOCH,
                "release": _RELEASE,
                "release_again": _RELEASE_AGAIN,
                "announce": _ANNOUNCE,
                "evaluate": _EVALUATE,
                "dead_letter": _DEAD_LETTER,
                "commit": _COMMIT,
                "finish": _FINISH,
            }.items()
        }

    def open_epoch(self, epoch: int, owner: str) -> dict[bytes, bytes]:
        """Raises the run's epoch and returns the commit hash. `owner` makes a repeated call after a lost reply safe."""
        flat = self._run("open_epoch", [self._keys.commit], epoch, owner)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def release(self, epoch: int, target: int, floor: int, version: int) -> int:
        """Releases indexes up to `target`; returns the release cursor."""
        return self._run("release", [self._keys.commit, self._keys.prompts], epoch, target, floor, version)

    def release_again(self, epoch: int, version: int, indexes: list[int]) -> None:
        for start in range(0, len(indexes), 1000):
            self._run(
                "release_again",
                [self._keys.commit, self._keys.prompts],
                epoch,
                version,
                *indexes[start : start + 1000],
            )

    def announce(self, epoch: int, version: int, manifest: bytes, keep: int, parent: int | None) -> None:
        fork = "" if parent is None else parent
        self._run("announce", [self._keys.commit, self._keys.policy], epoch, version, manifest, keep, fork)

    def evaluate(self, epoch: int, version: int, num_prompts: int) -> int:
        """Asks for evaluation prompts 1 to `num_prompts`; returns how many were not asked for before."""
        return self._run("evaluate", [self._keys.commit, self._keys.evaluations], epoch, version, 1, num_prompts)

    def dead_letter(self, epoch: int, index: int | None, reason: str, payload: bytes) -> None:
        keys = [self._keys.commit, self._keys.dead, self._keys.dead_index]
        self._run("dead_letter", keys, epoch, "" if index is None else index, reason, payload)

    def commit(self, epoch: int, checkpoint: str, keep_rollouts: bytes, keep_results: bytes) -> int:
        """Points the run at `checkpoint` and trims what it no longer needs; returns the rollout entries trimmed."""
        keys = [self._keys.commit, self._keys.rollouts, self._keys.evaluation_results]
        return self._run("commit", keys, epoch, checkpoint, keep_rollouts, keep_results)

    def finish(self, epoch: int) -> int:
        """Marks the run finished; returns the prompts still open."""
        return self._run("finish", [self._keys.commit, self._keys.prompts], epoch)

    def _run(self, name: str, keys: list[str], *args: Any) -> Any:
        try:
            return self._scripts[name](keys=keys, args=args)
        except redis.ResponseError as error:
            if "FENCED" in str(error):
                raise FencedError(str(error).partition("FENCED ")[2]) from error
            raise


def forks_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """The fork table in the commit hash: epoch to the version its first policy equals."""
    return _by_epoch(commit, Commit.FORK)


def announced_of(commit: dict[bytes, bytes]) -> dict[int, int]:
    """Epoch to the last version announced in it."""
    return _by_epoch(commit, Commit.ANNOUNCED)


def _by_epoch(commit: dict[bytes, bytes], prefix: bytes) -> dict[int, int]:
    return {int(field.removeprefix(prefix)): int(value) for field, value in commit.items() if field.startswith(prefix)}
