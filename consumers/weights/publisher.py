"""Publishes a policy beside the training: bytes into the shared folder, then the manifest onto the policy stream."""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import FencedError, Scripts
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.process.files import replacing

log = logging.getLogger(__name__)

RETRY_S = 1.0
FULL_LOG_S = 30.0
HEAD_START_S = 0.03
"""How long a publication has the interpreter to itself: a small policy is announced within it, and later, and so with
more lag, beside a thread that packs the next batch."""
END_S = 5.0
"""How long a trainer that ends waits for its last publication; one that is fenced takes its file away."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Publisher:
    """Writes `v<version>.safetensors` and announces it, in a thread; deletes versions older than the last `keep`.

    One publication is under way at a time. What ends it without an announcement is raised by the next call of
    `publish`, `check` or `wait`.

    on_published: called in the thread with the bytes of each policy announced.
    """

    def __init__(
        self,
        connection: TrainerConnection,
        scripts: Scripts,
        folder: Path,
        keep: int,
        epoch: int,
        on_published: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._folder = folder
        self._keep = keep
        self._epoch = epoch
        self._on_published = on_published
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("v*.partial-*"):
            unfinished.unlink(missing_ok=True)  # of a trainer that was killed
        self._newest: tuple[int, bytes, int | None] | None = None
        """Version, manifest and, for an epoch's first policy after a resume, the version it equals."""
        self._announcing = threading.Lock()
        self._published = sorted(folder.glob("v*.safetensors"), key=lambda file: int(file.stem[1:]))
        self._under_way: Future[None] = Future()
        self._under_way.set_result(None)
        self._ended = False

    def publish(
        self, weights: dict[str, torch.Tensor], version: int, parent_version: int, *, fork: bool = False
    ) -> None:
        """Begins to announce `weights`, which nobody may write to any more, as policy `version`.

        A producer sees the manifest only when the whole file is there under its final name. `fork` records
        `parent_version` as the version that this epoch's first policy equals.

        Waits for the publication before; room on the disk and Redis unblock it.

        Raises:
            OSError, RedisGoneError, FencedError: see `wait`.
        """
        self.wait()
        self._under_way = Future()
        arguments = (self._under_way, weights, version, parent_version, fork)
        threading.Thread(target=self._publish, args=arguments, name="publisher", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            self._under_way.exception(HEAD_START_S)

    def wait(self) -> None:
        """Returns once the policy given last is announced.

        Raises:
            OSError: the folder cannot be written, and the trainer is told to stop.
            RedisGoneError: see `TrainerConnection.call`.
            FencedError: a newer trainer owns the run.
        """
        self._under_way.result()

    def check(self) -> None:
        """Raises what `wait` would, without waiting."""
        if self._under_way.done():
            self.wait()

    def end(self) -> None:
        """Lets a publication under way come to its end, for `END_S` at most; for room it waits no longer."""
        self._ended = True
        with contextlib.suppress(Exception):  # the trainer ends already, for a reason of its own
            self._under_way.result(END_S)

    def announce_again(self) -> None:
        """Puts the newest manifest onto the policy stream, unless it is the newest there."""
        with self._announcing:
            if self._newest is not None:
                self._announce(*self._newest)

    def _publish(
        self, done: Future[None], weights: dict[str, torch.Tensor], version: int, parent_version: int, fork: bool
    ) -> None:
        try:
            file = self._folder / f"v{version}.safetensors"
            checksum = self._write(weights, file)
            manifest = WeightManifest(
                version=version,
                parent_version=parent_version,
                file=file.name,
                total_bytes=file.stat().st_size,
                checksum=checksum,
                tensors=tuple(
                    TensorSpec(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))
                    for name, tensor in weights.items()
                ),
            )
            with self._announcing:
                self._newest = version, msgspec.json.encode(manifest), parent_version if fork else None
                try:
                    self._announce(*self._newest)
                except FencedError:
                    file.unlink(missing_ok=True)
                    raise
            # Only now: until Redis has accepted the announcement, the run may be another trainer's.
            self._published.append(file)
            while len(self._published) > self._keep:
                self._published.pop(0).unlink(missing_ok=True)
            self._on_published(manifest.total_bytes)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _announce(self, version: int, manifest: bytes, parent: int | None) -> None:
        self._connection.call(lambda _: self._scripts.announce(self._epoch, version, manifest, self._keep, parent))

    def _write(self, weights: dict[str, torch.Tensor], file: Path) -> str:
        """Writes the file, whole or not at all, and returns its checksum.

        Waits while the disk is full or unreachable; room on it unblocks it, and `TrainerConnection.stop` ends the wait
        with an error.
        """
        next_line_at = 0.0
        while True:
            try:
                with replacing(file) as partial:
                    save_file(weights, partial)
                    with partial.open("rb") as stream:
                        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            except (OSError, SafetensorError) as error:
                if self._connection.stopping or self._ended:
                    raise OSError(f"weights {file} cannot be written: {error}") from error
                if time.monotonic() >= next_line_at:
                    next_line_at = time.monotonic() + FULL_LOG_S
                    log.error("weights %s cannot be written: %s; the next update waits until they can", file, error)
            self._connection.pause(RETRY_S)
