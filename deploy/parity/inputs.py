"""Reads the input of a check: rollouts and the weights they name, from a run's stream or from a rollout file."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.consumers.parity.logged_versions import LoggedVersions, WeightVersions
from penstock.consumers.parity.report import ParityError
from penstock.consumers.parity.tolerance import TOLERANCES
from penstock.consumers.stream.scripts import announced_of, forks_of
from penstock.deploy.operate.run_access import OpenRun
from penstock.deploy.parity.rollout_file import RolloutFileHeader, read_rollout_file, write_rollout_file
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.keys import Commit, Field, Keys, Kind, stored_images
from penstock.schemas.model_digest import model_digest
from penstock.schemas.policy import lag
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_entry

_BEFORE, _AFTER = 2, 1
"""Versions before and after those that tokens name, which an update that was skipped, or came early, would explain."""
_ENTRIES = 16
_BLOCK_MS = 500


def with_neighbours(versions: Iterable[int]) -> set[int]:
    """Returns `versions` and those just before and after each, whose weights a check tries in their place."""
    return {neighbour for version in versions for neighbour in range(max(0, version - _BEFORE), version + _AFTER + 1)}


@dataclass(frozen=True)
class ParityInput:
    """Rollouts, their weights and the run they belong to.

    title: their origin, as in "run demo".
    policy_version: the trainer's newest; -1 if unknown.
    forks, announced: of the run, as `penstock.schemas.policy.lag` takes them.
    notes: how the rollouts were chosen, for the reader of the report.
    """

    title: str
    config: RunConfig
    groups: Sequence[RolloutGroup]
    weights: WeightVersions
    policy_version: int
    forks: dict[int, int]
    announced: dict[int, int]
    notes: tuple[str, ...] = ()

    @property
    def lag_of(self) -> Callable[[int], int] | None:
        """A function that returns a version's lag behind the newest one; None if that is unknown."""
        if self.policy_version < 0:
            return None
        return lambda version: lag(version, self.policy_version, self.forks, self.announced)

    def save(self, file: Path) -> str:
        """Writes the rollouts to `file` and the weights they name, with their neighbours, to `<file>.weights`. Returns
        a line that says so."""
        folder = file.with_name(file.name + ".weights")
        copies = self.weights.copy(with_neighbours(_versions_of(self.groups)), folder)
        model = Path(self.config.model.path)
        header = RolloutFileHeader(
            run=self.config.name,
            model=str(model.absolute()),
            model_digest=model_digest(model),
            dtype=self.config.model.dtype,
            weights=folder.name,
            policy_version=self.policy_version,
            forks=self.forks,
            announced=self.announced,
            lora=self.config.lora,
        )
        num_groups = write_rollout_file(file, header, self.groups)
        return f"{file}: {num_groups} groups; {folder}: {len(copies)} versions"


def _versions_of(groups: Iterable[RolloutGroup]) -> set[int]:
    """Returns every policy version that sampled a token of `groups`."""
    return {
        span.version
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
        for span in segment.version_spans
    }


def tokenizer_for(config: RunConfig) -> Any:
    """Loads the tokenizer in the model's folder. Raises ParityError if there is none."""
    try:
        return load_tokenizer(config)
    except ConfigError as error:
        raise ParityError(f"{error}; --no-tokenizer checks without one") from None


def from_rollout_file(
    file: Path, *, model: str | None = None, folder: Path | None = None, dtype: str | None = None
) -> ParityInput:
    """Reads the rollouts of a rollout file. `model`, `folder` and `dtype` replace those in its header.

    Raises:
        ParityError: the base model or `folder` is missing, or the model is not the one that sampled the rollouts.
        RolloutFileError: no complete rollout file.
    """
    header, groups = read_rollout_file(file)
    path = Path(model or header.model)
    if not (model or header.model):
        raise ParityError(f"{file} does not say of which model its rollouts are; expected --model FOLDER")
    if not (path / "config.json").is_file():
        raise ParityError(
            f"{file}: its rollouts are of the model in {path}, which is not there; expected --model FOLDER to name it"
        )
    if header.model_digest and model_digest(path) != header.model_digest:
        raise ParityError(
            f"{file}: its rollouts are of another model than the one in {path}: digest {model_digest(path)[:12]}, "
            f"recorded {header.model_digest[:12]}; expected the base model of run {header.run!r} (--model FOLDER)"
        )
    dtype = dtype or header.dtype
    if dtype not in TOLERANCES:
        raise ParityError(f"{file}: dtype {dtype!r} of the published weights: expected one of {', '.join(TOLERANCES)}")
    if folder is not None and not folder.is_dir():
        raise ParityError(f"--weights {folder}: no such folder; expected one with v<version>.safetensors files")
    if folder is None and header.weights:
        folder = file.parent / header.weights
    config = RunConfig(
        name=header.run or "rollouts",
        model=msgspec.convert({"path": str(path), "dtype": dtype}, ModelConfig),
        environment=EnvironmentConfig(path="nobody:Needed"),
        lora=header.lora,
    )
    return ParityInput(
        title=f"rollout file {file.name}" + (f" of run {header.run}" if header.run else ""),
        config=config,
        groups=groups,
        weights=WeightVersions(path, folder),
        policy_version=header.policy_version,
        forks=header.forks,
        announced=header.announced,
        notes=(f"{len(groups)} groups in the rollout file",),
    )


class _NewestGroups:
    """The newest groups of a rollout stream, at most `num_groups`. Reads by XREAD: acknowledges and trims nothing.

    num_seen: groups read so far. num_refused: those that break the contract; `refusal` says how the last one does.
    """

    def __init__(self, client: redis.Redis, keys: Keys, num_groups: int) -> None:
        self._client: Any = client
        self._keys = keys
        self._cursor = "0-0"
        self.groups: deque[RolloutGroup] = deque(maxlen=num_groups)
        self.num_seen = self.num_refused = 0
        self.refusal = ""

    @property
    def is_full(self) -> bool:
        return len(self.groups) == self.groups.maxlen

    def read(self, block_ms: int | None) -> None:
        """Reads to the stream's end, after waiting up to `block_ms` for a first entry."""
        while found := self._client.xread({self._keys.rollouts: self._cursor}, count=_ENTRIES, block=block_ms):
            block_ms = None
            for entry_id, fields in found[0][1]:
                self._cursor = entry_id.decode()
                if fields.get(Field.KIND) == Kind.GROUP:
                    self._take(fields)

    def _take(self, fields: Mapping[bytes, bytes]) -> None:
        self.num_seen += 1
        stored = stored_images(fields.get(Field.IMAGES))
        try:
            payload = fields.get(Field.PAYLOAD, b"")
            self.groups.append(
                decode_entry(payload, image=lambda digest: self._client.hget(self._keys.images, stored.get(digest, "")))
            )
        except RecordError as error:
            self.num_refused += 1
            self.refusal = str(error)


def from_run(
    run: OpenRun,
    config: RunConfig,
    weights: LoggedVersions,
    *,
    num_groups: int,
    wait_s: float,
    say: Callable[[str], None],
) -> ParityInput:
    """Reads the newest groups of a run and holds their weights.

    Waits while the run has producers and fewer than `num_groups` groups are on its stream. More groups, the end of the
    run or the end of `wait_s` end the wait.

    Raises:
        ParityError: there are no rollouts.
        ServerError: Redis cannot be reached.
    """
    client, keys = run.redis, run.keys
    newest = _NewestGroups(client, keys, num_groups)
    deadline, block_ms = time.monotonic() + wait_s, None
    while True:
        newest.read(block_ms)
        weights.hold(_versions_of(newest.groups))  # at once: the trainer soon drops them
        if newest.is_full or time.monotonic() >= deadline or not _is_alive(client, keys):
            break
        say(f"waiting for rollouts: {len(newest.groups)} of {num_groups}")
        block_ms = _BLOCK_MS
    if not newest.groups:
        raise ParityError(_why_empty(run, client, newest))
    commit: Any = client.hgetall(keys.commit)  # last, so that it knows every version that a token may name
    notes = [f"the newest {len(newest.groups)} of {newest.num_seen} groups on the stream"]
    if newest.num_refused:
        notes.append(f"{newest.num_refused} groups break the contract, the last one so: {newest.refusal}")
    return ParityInput(
        title=f"run {run.name}",
        config=config,
        groups=list(newest.groups),
        weights=weights,
        policy_version=int(commit.get(Commit.VERSION, -1)),
        forks=forks_of(commit),
        announced=announced_of(commit),
        notes=tuple(notes),
    )


def _is_alive(client: redis.Redis, keys: Keys) -> bool:
    """Returns whether the run is not finished and a producer sends heartbeats."""
    is_finished = client.hget(keys.commit, Commit.FINISHED) == b"1"
    return not is_finished and any(True for _ in client.scan_iter(match=keys.producer_pattern, count=1000))


def _why_empty(run: OpenRun, client: redis.Redis, newest: _NewestGroups) -> str:
    if newest.num_refused:
        return f"run {run.name}: none of the {newest.num_seen} groups on its stream can be read: {newest.refusal}"
    where = f"run {run.name}: no rollouts on its stream"
    if not client.exists(run.keys.commit):
        return f"{where}: Redis knows nothing of this run"
    finished = client.hget(run.keys.commit, Commit.FINISHED) == b"1"
    state = "the run is finished" if finished else "no producer is at work"
    return (
        f"{where}: {state}, and the trainer trims what a checkpoint has settled. Check a run while it goes (`penstock "
        f"parity {run.name}`, with --save FILE to keep the rollouts), or its engine by a probe of its own: `penstock "
        f"parity {run.folder}/run.toml`"
    )
