"""The policy of the best evaluation, kept as a model.

It is rebuilt from the weight log, which holds its bits as producers loaded them. A version stays there from the request
of its evaluation until it is known to be no better, or is written.
"""

import logging
import shutil
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import redis

from penstock.consumers.checkpoints.model_folder import copy_model_files
from penstock.consumers.learning.model.export import describe_weights
from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.schemas.adapter import identity_of
from penstock.schemas.best import BEST_FILE, BestModel, read_best
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.figures import figure_in
from penstock.schemas.process.files import fsync, write_whole
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.log import VersionGoneError
from penstock.schemas.weights.reading import WeightReader

log = logging.getLogger(__name__)


class BestPolicy:
    """Keeps the policy of the best evaluation in `folder`, by the figure `checkpoint.best`; does nothing without one.

    The folder holds a model as `save_pretrained` writes it, or an adapter as peft does, and `best.json`. A continued
    run keeps the model that is there until a better one comes, even if a rollback undid that policy's training.
    """

    def __init__(self, config: RunConfig, folder: Path, reader: WeightReader, epoch: int) -> None:
        self._config = config
        self._figure = config.checkpoint.best
        self._folder = folder
        self._old = folder.with_name(f"old-{folder.name}")
        self._partial = folder.with_name(f"partial-{folder.name}-{epoch}")
        self._reader = reader
        self._expected: frozenset[int] = frozenset()
        self._writing: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="best")
        if self._old.exists() and not folder.exists():  # killed between two renames
            self._old.rename(folder)
        for left in folder.parent.glob(f"partial-{folder.name}-*"):  # by a trainer that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._abandoned = False
        self._value = self._value_there()
        for file in folder.parent.glob(self._pending("*").name):
            if (found := read_best(folder.parent, file.name)) is not None and not self._begin(found):
                file.unlink()

    def expect(self, version: int) -> None:
        """Keeps the weights of `version`, whose evaluation was requested, until `consider` gets its result."""
        if self._figure is not None:
            self._expected |= {version}

    def expect_only(self, versions: Collection[int]) -> None:
        """Keeps no longer what was expected beside these: evaluations were dropped."""
        self._expected &= frozenset(versions)

    @property
    def pinned(self) -> Collection[int]:
        """The versions whose weights must stay in the log. May be called in any thread."""
        return {*self._expected, *(version for version, done in list(self._writing.items()) if not done.done())}

    def consider(self, result: EvaluationResult) -> None:
        """Begins to write the model of this evaluation's policy if it is the best so far."""
        if self._figure is None:
            return
        version, value = result.policy_version, figure_in(self._figure, result.figures, result.environments)
        if value is not None and (self._value is None or value > self._value):
            found = BestModel(
                figure=self._figure,
                value=value,
                policy_version=version,
                update=result.update,
                dtype=self._config.model.dtype,
                adapter=identity_of(self._config),
            )
            try:
                write_whole(self._pending(version), msgspec.json.encode(found))
            except OSError as error:
                log.warning(
                    "policy %d is the best, which a kill would forget until its model is kept: %s", version, error
                )
            self._begin(found)
        self._expected -= {version}

    def wait(self) -> None:
        """Returns once nothing is being written; the disk and the weight log's stores unblock it."""
        for done in wait(self._writing.values()).done:
            done.result()

    def abandon(self) -> None:
        """Ends without waiting; the folder no longer changes. The next trainer writes what is pending."""
        self._abandoned = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        # `wait` never returns for a future that was cancelled before it ran.
        self._writing = {version: done for version, done in self._writing.items() if not done.cancelled()}

    def _begin(self, found: BestModel) -> bool:
        """Begins to write the model if it is the best so far; returns whether it is."""
        is_best = found.figure == self._figure and (self._value is None or found.value > self._value)
        if is_best:
            self._value = found.value
            self._writing = {found.policy_version: self._thread.submit(self._write, found)} | {
                other: done for other, done in self._writing.items() if not done.done() or done.exception()
            }
        return is_best

    def _pending(self, version: int | str) -> Path:
        """Returns the file that names a policy whose model is to be written; it stays until that is done, also after a
        kill."""
        return self._folder.with_name(f"pending-{self._folder.name}-{version}.json")

    def _value_there(self) -> float | None:
        """Returns the value of the model in the folder if it was chosen by the same figure."""
        there = read_best(self._folder)
        return there.value if there is not None and there.figure == self._figure else None

    def _write(self, found: BestModel) -> None:
        version, name, there = found.policy_version, f"{found.figure} {found.value:.4f}", None
        try:
            there = self._value_there()
            is_better = there is None or there < found.value
            if is_better:
                self._keep(found)
        except (OSError, redis.RedisError, RedisGoneError, ConfigError, ChunkError, VersionGoneError) as error:
            if self._abandoned:
                return
            log.error("policy %d is the best with %s, and cannot be kept: %s", version, name, error)
            self._value = there
            if not isinstance(error, VersionGoneError):
                return  # a trainer after this one tries again
            is_better = False
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
        if not self._abandoned:
            self._pending(version).unlink(missing_ok=True)
            if is_better:
                log.info("policy %d is the best with %s: its model is in %s", version, name, self._folder)

    def _keep(self, found: BestModel) -> None:
        base = Path(self._config.model.path)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir()
        weights = describe_weights(base, self._partial, found.dtype, found.adapter)
        self._reader.write(self._reader.log().chain(found.policy_version), weights)
        copy_model_files(base, self._partial)
        described = self._partial / BEST_FILE
        described.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        weights.chmod(described.stat().st_mode & 0o777)
        for path in (*self._partial.iterdir(), self._partial):
            fsync(path)
        if self._abandoned:
            return
        shutil.rmtree(self._old, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(self._old)
        self._partial.rename(self._folder)
        fsync(self._folder.parent)
        shutil.rmtree(self._old, ignore_errors=True)
