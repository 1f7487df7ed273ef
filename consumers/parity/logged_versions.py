"""Files of published weights by version, in a folder or written from a run's weight log."""

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.consumers.parity.report import ParityError
from penstock.schemas.config import ConfigError
from penstock.schemas.policy import WeightManifest
from penstock.schemas.process.files import replacing
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.log import VersionGoneError
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import ChunkMissingError


class WeightVersions:
    """Returns, when called with a version, the file of its weights, or the base model's folder; None if they are gone.

    base: folder of the base model, which is version 0 unless that has a file. folder: of the files
        `v<version>.safetensors`; None if there are none.
    """

    def __init__(self, base: Path, folder: Path | None) -> None:
        self._base = base
        self._folder = folder

    def __call__(self, version: int) -> Path | None:
        return self._file(version) or (self._base if version == 0 else None)

    def copy(self, versions: Iterable[int], folder: Path) -> list[Path]:
        """Copies the files of those `versions` that have one, each whole or not at all; returns the copies."""
        folder.mkdir(parents=True, exist_ok=True)
        copies = []
        for version in sorted(set(versions)):
            if (file := self._file(version)) is not None:
                copies.append(folder / file.name)
                with replacing(copies[-1]) as partial:
                    shutil.copyfile(file, partial)
        return copies

    def _file(self, version: int) -> Path | None:
        file = self._folder / f"v{version}.safetensors" if self._folder is not None else None
        return file if file is not None and file.exists() else None


class LoggedVersions(WeightVersions):
    """The versions of a run. Each file is written from the weight log when it is first needed, and stays after the
    trainer drops that version.

    folder: for the files, empty. Methods raise ParityError if weights cannot be read or do not fit on the disk.
    """

    def __init__(self, base: Path, folder: Path, reader: WeightReader) -> None:
        super().__init__(base, folder)
        self._files, self._reader = folder, reader

    def hold(self, versions: Iterable[int]) -> None:
        """Writes the files of those `versions` that the log leads to, and deletes all others."""
        wanted = {f"v{version}.safetensors": version for version in versions}
        kept = set()
        for file in self._files.iterdir():
            if file.name in wanted:
                kept.add(file.name)
            else:
                file.unlink()
        with self._errors():
            log = self._reader.log()
            found = [log.manifest(version) for name, version in wanted.items() if name not in kept]
            needed = sum(manifest.total_bytes for manifest in found if manifest is not None)
            if needed > (free := shutil.disk_usage(self._files).free):
                raise ParityError(
                    f"{self._files}: no room for the weights of {len(found)} versions: {needed:,} bytes are needed, "
                    f"{free:,} are free; TMPDIR names a folder with room"
                )
        for version in sorted(wanted.values()):
            self._file(version)

    def _file(self, version: int) -> Path | None:
        return super()._file(version) or self._written(version)

    def _written(self, version: int) -> Path | None:
        file = self._files / f"v{version}.safetensors"
        tried: list[WeightManifest] = []
        with self._errors():
            while True:
                try:
                    chain = self._reader.log().chain(version)
                    with replacing(file) as partial:
                        self._reader.write(chain, partial)
                    return file
                except VersionGoneError:
                    return None
                except ChunkMissingError:
                    if chain == tried:
                        raise
                    tried = chain  # the trainer may have dropped the version since the log was read

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "; TMPDIR names a folder with room" if error.errno == errno.ENOSPC else ""
            raise ParityError(f"{error}{hint}") from error
        except (ChunkError, ConfigError) as error:
            raise ParityError(f"the run's weight log cannot be read: {error}") from error
