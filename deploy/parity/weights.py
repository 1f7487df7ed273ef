"""The published weights that a check needs, kept readable while a trainer deletes old versions."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.producers.engines.weight_files import HeldFile

_BEFORE, _AFTER = 2, 1
"""Versions beside those that tokens name: what an update that did not land, or landed early, would have served."""


class WeightVersions:
    """`weights(version)` is the file of a published version, or the base model's folder; None where it is gone.

    Files are held open: a name that the trainer deletes meanwhile takes no file away, and the disk gets its room back
    when they are let go.

    Args:
        base: folder of the base model, which is version 0.
        folder: with `v<version>.safetensors` files; None where there are none.
    """

    def __init__(self, base: Path, folder: Path | None) -> None:
        self._base = base
        self.folder = folder
        self._held: dict[int, HeldFile] = {}

    def __enter__(self) -> "WeightVersions":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep_only(())

    def __call__(self, version: int) -> Path | None:
        held = self._held.get(version)
        if held is not None:
            return Path(held.path)
        return self._base if version == 0 else None

    @property
    def versions(self) -> list[int]:
        """Whose files are held, ascending."""
        return sorted(self._held)

    def hold(self) -> None:
        """Opens every version that lies in the folder now."""
        for file in self.folder.glob("v*.safetensors") if self.folder is not None else ():
            number = file.stem[1:]
            if not number.isdigit() or int(number) in self._held:
                continue
            try:
                self._held[int(number)] = HeldFile(str(file))
            except FileNotFoundError:
                continue  # deleted since it was listed

    def keep_only(self, versions: Iterable[int]) -> None:
        """Lets go every other one."""
        kept = set(versions)
        for version in [version for version in self._held if version not in kept]:
            self._held.pop(version).close()

    def copy(self, versions: Iterable[int], folder: Path) -> list[Path]:
        """Copies of those among `versions` that are held, whole or not at all, under the names they have in a run."""
        folder.mkdir(parents=True, exist_ok=True)
        copies = []
        for version in sorted(set(versions) & set(self._held)):
            copy = folder / f"v{version}.safetensors"
            partial = copy.with_suffix(".partial")
            shutil.copyfile(self._held[version].path, partial)
            partial.replace(copy)
            copies.append(copy)
        return copies


def with_neighbours(versions: Iterable[int]) -> set[int]:
    """`versions` and those just before and after each, whose weights a check tries in their place."""
    return {neighbour for version in versions for neighbour in range(max(0, version - _BEFORE), version + _AFTER + 1)}
