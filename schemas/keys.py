"""Every Redis name of a run. One hash tag per run keeps its keys in one slot of a cluster."""

import re
from collections.abc import Mapping

PRODUCERS_GROUP = "producers"
"""The consumer group of the prompts and evaluations streams."""

DEAD_ROLLOUTS_KEPT = 1000
"""Bounds the stream of dead rollouts: agents may fail by the million."""

_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]*")
_MAX_NAME = 128
"""A run's and a producer's name are part of file names with up to 255 bytes."""
_MAX_DIGITS = 18
"""Most digits of a number in a field: it fits in a record's 64 bits."""


def check_name(kind: str, name: str) -> None:
    """Checks a name that becomes a folder or a file, of the run or the producer that `kind` says. Raises ValueError for
    other characters than letters, digits, `.`, `_` and `-`, for a `-` at the start, which commands take for an option,
    for `.` and `..`, and for more than 128 characters."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(
            f"{kind} {name!r}: expected letters, digits, '.', '_' and '-' only, no '-' at the start, and neither '.' "
            "nor '..'"
        )
    if len(name) > _MAX_NAME:
        raise ValueError(f"{kind} {name[:32]!r}... of {len(name)} characters: expected at most {_MAX_NAME}")


class Keys:
    """The keys of run `run`. Raises ValueError unless that may be a run's name, see `check_name`."""

    def __init__(self, run: str) -> None:
        check_name("run name", run)
        self.run = run
        tag = "{" + run + "}"
        self.prompts = f"{tag}:prompts"
        """Stream: the releases not yet appended (`index`, `version`, `run_id`, and the task: `environment`, `task`)."""
        self.tasks = f"{tag}:tasks"
        """Hash: index to `<number> <environment>` of its task, of indexes released since the last checkpoints."""
        self.rollouts = f"{tag}:rollouts"
        """Stream: one entry per group (`index`, `kind`, `payload`, `run_id`), and `images` if these are apart; a dead
        group's also has `producer`, `reason` and `traceback`, and its payload may be incomplete."""
        self.images = f"{tag}:images"
        """Hash: `<name>/<digest>` to an image file that an entry of `rollouts` had no room for. It is added and removed
        with its entry, which has `<name> <digest> <digest>...` in its field `images`."""
        self.evaluations = f"{tag}:evaluations"
        """Stream: evaluation prompts (`environment`, `task`, `run_id`), entry id `<version>-<n>`."""
        self.evaluation_results = f"{tag}:evaluation_results"
        """Stream: evaluation groups (`evaluation`, `kind`, `payload`, `run_id`)."""
        self.policy = f"{tag}:policy"
        """Stream: weight manifests, entry id `<version>-1`, as far back as the log reaches; the newest is the current
        policy."""
        self.anchors = f"{tag}:anchors"
        """Hash: version to the manifest of its whole weights."""
        self.chunks = f"{tag}:chunks"
        """Hash: chunk key to chunk, for weights that are stored in Redis."""
        self.commit = f"{tag}:commit"
        """Hash: the run's id, trainer epoch, release cursor, policy version, fork table, checkpoint pointer."""
        self.description = f"{tag}:run"
        """Hash: the run file, the base model's digest and its files other than weights (schemas/description.py)."""
        self.lease = f"{tag}:lease"
        """String with a time to live: the trainer that leads the run, for standby trainers."""
        self.dead = f"{tag}:dead"
        """Stream: dead letters (`index`, `reason`, `payload`, `entry`, `producer`, `traceback`)."""
        self.dead_index = f"{tag}:dead_index"
        """Hash: index to dead-letter entry id."""
        self.dead_rollouts = f"{tag}:dead_rollouts"
        """Stream: the last `DEAD_ROLLOUTS_KEPT` agents' rollouts that ended without a reward (`index`, `rollout`,
        `producer`, `reason`, `traceback`). Their groups do without them; no index is settled by them."""
        self.requeued = f"{tag}:requeued"
        """Hash: index to the dead-letter entry id that an operator wants released again. Fields are never removed."""
        self.parity = f"{tag}:parity"
        """Hash: producer instance to the trainer's findings about its rows (schemas/producer_parity.py)."""
        self._producer_prefix = f"{tag}:producers:"
        self._progress_prefix = f"{tag}:progress:"

    def producer(self, producer_id: str) -> str:
        """String with a time to live: the producer's heartbeat."""
        return self._producer_prefix + producer_id

    def progress(self, index: int, run_id: str = "") -> str:
        """With a time to live: the siblings of an index sampled so far. A string, encoded as a group that was given up,
        in which an unfinished sibling has the finish reason `abort`; for conversations a hash of their parts
        (`<instance>/<part>`) and the producer that holds them (`producer`, `instance`)."""
        return f"{self._progress_prefix}{run_id}:{index}"

    @property
    def producer_pattern(self) -> str:
        """SCAN pattern of every heartbeat of this run."""
        return re.sub(r"([\[\]*?\\])", r"\\\1", self._producer_prefix) + "*"


class Field:
    """Field names of stream entries and of the commit hash."""

    INDEX = b"index"
    KIND = b"kind"
    PAYLOAD = b"payload"
    IMAGES = b"images"
    """Of a group whose image files are in `Keys.images`."""
    REASON = b"reason"
    TRACEBACK = b"traceback"
    """Of the exception in a user's code for which a group or a rollout died; empty without one."""
    SPANS = b"spans"
    """Of the producer, see `penstock.schemas.spans.ProducerSpans`; absent in a run without traces."""
    VERSION = b"version"
    RUN_ID = b"run_id"
    """Of the run that released the prompt, see `Commit.RUN_ID`; absent from entries that were written by hand."""
    ENVIRONMENT = b"environment"
    """Name of a task's environment; absent for the first environment."""
    TASK = b"task"
    """Number of a task within its environment; absent where it is the index."""
    ROLLOUT = b"rollout"
    PRODUCER = b"producer"
    INSTANCE = b"instance"
    """Identifies one start of the producer, see `penstock.schemas.heartbeat.Heartbeat`."""
    ATTEMPT = b"attempt"
    """Earlier attempts at a prompt that was returned; absent from a fresh release."""
    TRIES_LOST = b"tries_lost"
    """How often a prompt was returned by a producer that was stopped while it sampled; absent from a fresh release.
    These do not count as attempts."""
    EVALUATION = b"evaluation"
    MANIFEST = b"manifest"
    ENTRY = b"entry"
    """Id of the rollout entry of a dead letter; empty without one."""


class Kind:
    """The kinds of rollout-stream entries."""

    GROUP = b"group"
    DEAD = b"dead"


class Commit:
    """Fields of the commit hash. `fork:<epoch>` and `announced:<epoch>` are one field per epoch."""

    RUN_ID = b"run_id"
    """Tells this run from one that is begun anew under its name; its trainers' epoch files hold it too."""
    EPOCH = b"epoch"
    RELEASED = b"released"
    VERSION = b"policy_version"
    CHECKPOINT = b"checkpoint"
    FINISHED = b"finished"
    FORK = b"fork:"
    ANNOUNCED = b"announced:"


def number_in(field: bytes | None) -> int | None:
    """Returns the number in a field of an entry or of a hash; None for anything but 1 to 18 digits.

    Anybody who may append can write any bytes there. `int` would also accept signs, spaces and underscores, fail for
    thousands of digits, and return numbers that no record can hold.
    """
    return int(field) if field is not None and len(field) <= _MAX_DIGITS and field.isdigit() else None


def stored_images(field: bytes | None) -> dict[str, bytes]:
    """Returns the fields of `Keys.images` that belong to an entry with this field `images`, by digest."""
    name, *digests = (field or b"").split() or [b""]
    return {digest.decode(errors="replace"): name + b"/" + digest for digest in digests}


def is_of_run(fields: Mapping[bytes, bytes], run_id: str) -> bool:
    """Returns whether an entry is of run `run_id`, see `Commit.RUN_ID`; one that was written by hand names none."""
    return fields.get(Field.RUN_ID, run_id.encode()) == run_id.encode()


def entry_key(entry_id: bytes) -> tuple[int, int]:
    """Returns a stream entry id as a sortable pair."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)
