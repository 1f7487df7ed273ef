"""ACL users of a run, with the least rights that its parts need.

A user's rights are selectors: each names keys and the commands that may touch them. A command is allowed if one
selector allows all of it. The commands of a script are checked one by one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.schemas.keys import Keys

ADMIN = "admin"
ROLES = ("producer", "trainer", "observer", "operator")


class Right(NamedTuple):
    """`commands` on `keys` (what follows the run's tag, with `*` at most at the end)."""

    keys: str
    commands: str
    read_only: bool = False


# What every client sends around its commands. None of them touches a key.
_CONNECTION = "ping select echo multi exec discard time"

_PRODUCER = (
    Right("prompts evaluations", "xgroup|create xreadgroup xpending xclaim xack xdel"),
    # A prompt is handed back as a new entry.
    Right("prompts rollouts evaluation_results dead_rollouts", "xadd"),
    Right("policy", "xread xrevrange xrange", read_only=True),
    Right("anchors run", "hgetall", read_only=True),
    Right("chunks commit parity", "hget", read_only=True),
    Right("parity", "hmget", read_only=True),
    Right("producers:* progress:*", "get set del"),
    # Of conversations.
    Right("progress:*", "hset hget hgetall hdel expire"),
)

_READING = "hget hgetall hmget hkeys hlen hexists xlen xrange xrevrange xread xpending get mget exists type ttl pttl"
_TRAINER = (
    Right("*", _READING, read_only=True),
    Right("*", "evalsha"),
    # Whoever may write what a run says of itself names the modules that its producers import.
    Right("commit dead_index run anchors chunks tasks parity", "hset hdel"),
    Right("prompts evaluations policy dead", "xadd"),
    Right("rollouts evaluation_results policy", "xtrim"),
    Right("lease", "set del"),
    Right("prompts", "xdel"),
    Right("prompts", "xinfo|groups", read_only=True),
)
_OBSERVER = (
    # EVAL_RO (in `penstock audit`) may call the commands of its user that read.
    Right("*", f"{_READING} xinfo|stream xinfo|groups xinfo|consumers eval_ro", read_only=True),
)
_OPERATOR = (*_PRODUCER, *_TRAINER, *_OBSERVER, Right("requeued", "hset"))
_RIGHTS: Mapping[str, tuple[str, tuple[Right, ...]]] = {
    # role: (commands without a key, rights). SCAN shows the names of all keys of the server to any user.
    "producer": ("", _PRODUCER),
    "trainer": ("script|load info scan", _TRAINER),
    "observer": ("info scan", _OBSERVER),
    # `penstock run` starts both sides with one URL; `penstock dead requeue` writes into the run.
    "operator": ("script|load info scan", _OPERATOR),
}


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


def user_line(run: str, role: str, password: str) -> str:
    """The line of an ACL file that makes this user; without its first word, the arguments of `ACL SETUSER`.

    Raises:
        ValueError: not a run name.
    """
    tag = Keys(run).prompts.removesuffix("prompts")
    bare, rights = _RIGHTS[role]
    # `reset` first: rights that the server knew before are dropped.
    rules = ["reset", "on", _hash(password), "-@all", *_allowed(f"{_CONNECTION} {bare}")]
    for right in rights:
        keys = [f"{'%R' if right.read_only else ''}~{tag}{key}" for key in right.keys.split()]
        rules.append(f"({' '.join([*keys, *_allowed(right.commands)])})")
    return f"user {user_name(run, role)} {' '.join(rules)}"


def acl_file(runs: Iterable[str], passwords: Mapping[str, str]) -> str:
    """The ACL file of a server for these runs: an administrator, four users a run, no user without a password.

    It holds only hashes of the passwords.

    Args:
        passwords: by user name; `ADMIN` and every `user_name(run, role)`.
    """
    lines = [
        "user default reset off",
        f"user {ADMIN} reset on {_hash(passwords[ADMIN])} ~* &* +@all",
        *(user_line(run, role, passwords[user_name(run, role)]) for run in runs for role in ROLES),
    ]
    return "".join(f"{line}\n" for line in lines)


def user_names(runs: Iterable[str]) -> list[str]:
    return [ADMIN, *(user_name(run, role) for run in runs for role in ROLES)]


def _hash(password: str) -> str:
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def _allowed(commands: str) -> list[str]:
    return [f"+{command}" for command in commands.split()]
