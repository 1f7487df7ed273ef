"""ACL users of a run, with the least rights that its parts need, and their password files.

A user's rights are selectors: each names keys and the commands that may touch them. A command is allowed if one
selector allows all of it. The commands of a script are checked one by one.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.schemas.keys import Keys

ADMIN = "admin"
ROLES = ("producer", "trainer", "observer", "operator")


class Right(NamedTuple):
    """`commands` on `keys` (what follows the run's tag, with `*` at most at the end)."""

    keys: str
    commands: str
    read_only: bool = False


# Sent by every client around its commands. None of them touches a key.
_CONNECTION = "ping select echo multi exec discard time"

_PRODUCER = (
    Right("prompts evaluations", "xgroup|create xreadgroup xpending xclaim xack xdel"),
    # A prompt is handed back as a new entry.
    Right("prompts rollouts evaluation_results dead_rollouts", "xadd"),
    Right("images", "hset"),
    Right("policy", "xread xrevrange xrange", read_only=True),
    Right("anchors run", "hgetall", read_only=True),
    Right("chunks commit parity run", "hget", read_only=True),
    Right("parity", "hmget", read_only=True),
    Right("producers:* progress:*", "get set del"),
    # Progress of conversations.
    Right("progress:*", "rpush lindex lrange expire"),
)

_READING = "hget hgetall hmget hkeys hlen hexists xlen xrange xrevrange xread xpending get mget exists type ttl pttl"
_TRAINER = (
    Right("*", _READING, read_only=True),
    Right("*", "evalsha"),
    # Whoever may write the run's description chooses the modules that its producers import.
    Right("commit dead_index run anchors chunks tasks parity", "hset hdel"),
    Right("prompts evaluations policy dead", "xadd"),
    Right("rollouts evaluations evaluation_results policy", "xtrim"),
    Right("lease", "set del"),
    Right("images", "hdel del"),
    Right("prompts evaluations", "xdel"),
    Right("prompts", "xinfo|groups", read_only=True),
    # A stream whose entry ids are used up is made anew.
    Right("prompts rollouts evaluations evaluation_results policy dead dead_rollouts", "xinfo|stream del"),
)
_OBSERVER = (
    # EVAL_RO (in `penstock audit`) may call the reading commands of its user.
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
    """Returns the ACL file's line for this user; without its first word, the arguments of `ACL SETUSER`.

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
    """Returns the ACL file of a server for these runs: an administrator, four users per run, and no user without a
    password. It holds only hashes of the passwords.

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


def password_in(file: Path) -> str:
    """Reads the password in `file`, or writes a random one of 256 bits if there is no such file.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it is empty.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        password = file.read_text("utf-8").rstrip("\r\n")
        if not password:
            raise ValueError(f"{file}: the file is empty, expected a password") from None
        return password
    password = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(password)
    return password


def _hash(password: str) -> str:
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def _allowed(commands: str) -> list[str]:
    return [f"+{command}" for command in commands.split()]
