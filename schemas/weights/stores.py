"""Stores for the chunks of the weight log. Objects are written once, whole, and never changed."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import redis

from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Keys
from penstock.schemas.process.files import write_whole

T = TypeVar("T")
Call = Callable[[Callable[[Any], T]], T]
"""Runs a command with a synchronous Redis client, with retries if its owner has them."""

REDIS = "redis"
_AT_ONCE = 512


class ChunkStoreError(OSError):
    """A store that cannot be read or written; the message says which, and why."""


class ChunkMissingError(ChunkStoreError):
    """The store has no chunk of this key."""


class RedisFullError(ChunkStoreError):
    """Redis is at its memory limit."""


class ChunkStore(Protocol):
    """Objects by key. Every method raises ChunkStoreError if the store is full, unreachable or refuses.

    place: "redis", a folder or a URL, as the run file and the manifests have it; no secrets are in it.
    """

    place: str

    def put(self, key: str, data: bytes) -> None:
        """Stores an object atomically."""
        ...

    def get(self, key: str) -> bytes:
        """Returns an object. Raises ChunkMissingError if there is none."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; missing keys are no error."""
        ...

    def keys(self) -> list[str]: ...


class RedisChunks:
    """Fields of one hash of the run."""

    place = REDIS

    def __init__(self, call: Call[Any], keys: Keys) -> None:
        self._call = call
        self._name = keys.chunks

    def put(self, key: str, data: bytes) -> None:
        self._run(f"take {key} ({len(data):,} bytes)", lambda client: client.hset(self._name, key, data))

    def get(self, key: str) -> bytes:
        data = self._run(f"give {key}", lambda client: client.hget(self._name, key))
        if data is None:
            raise ChunkMissingError(f"Redis {self._name} has no chunk {key}")
        return bytes(data)

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            self._run("delete chunks", partial(_delete, self._name, some))

    def keys(self) -> list[str]:
        return [key.decode() for key in self._run("list chunks", lambda client: client.hkeys(self._name))]

    def _run(self, what: str, command: Callable[[Any], Any]) -> Any:
        try:
            return self._call(command)
        except redis.exceptions.OutOfMemoryError as error:
            raise RedisFullError(f"Redis {self._name} does not {what}: {error}") from error
        except redis.RedisError as error:
            raise ChunkStoreError(f"Redis {self._name} does not {what}: {error}") from error


def _delete(name: str, keys: Sequence[str], client: Any) -> None:
    client.hdel(name, *keys)


class FolderChunks:
    """Files in one folder, shared by all hosts that read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.place = str(folder)

    def put(self, key: str, data: bytes) -> None:
        with self._errors(f"take {key} ({len(data):,} bytes)"):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / key, data)

    def get(self, key: str) -> bytes:
        with self._errors(f"give {key}"):
            return (self._folder / key).read_bytes()

    def delete(self, keys: Iterable[str]) -> None:
        with self._errors("delete chunks"):
            for key in keys:
                (self._folder / key).unlink(missing_ok=True)

    def keys(self) -> list[str]:
        with self._errors("list chunks"):
            return [entry.name for entry in os.scandir(self._folder)] if self._folder.is_dir() else []

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:
        try:
            yield
        except FileNotFoundError as error:
            raise ChunkMissingError(f"folder {self._folder} does not {what}: {error.strerror}") from error
        except OSError as error:
            raise ChunkStoreError(f"folder {self._folder} does not {what}: {error.strerror or error}") from error


class FsspecChunks:
    """Objects under an fsspec URL (`s3://bucket/prefix`); credentials come from the usual environment.

    Raises:
        ConfigError: no installed file system supports the URL's scheme.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.place = url.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.place, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url!r}: no file system for this URL is installed: {error}") from None
        except Exception as error:
            raise ConfigError(f"{url!r}: {type(error).__name__}: {error}") from None

    def put(self, key: str, data: bytes) -> None:
        with self._errors(f"take {key} ({len(data):,} bytes)"):
            self._system.pipe_file(f"{self._root}/{key}", data)

    def get(self, key: str) -> bytes:
        with self._errors(f"give {key}"):
            return bytes(self._system.cat_file(f"{self._root}/{key}"))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(ChunkMissingError), self._errors(f"delete {key}"):
                self._system.rm_file(f"{self._root}/{key}")

    def keys(self) -> list[str]:
        with contextlib.suppress(ChunkMissingError), self._errors("list chunks"):
            return [name.rsplit("/", 1)[-1] for name in self._system.ls(self._root, detail=False)]
        return []

    @contextlib.contextmanager
    def _errors(self, what: str) -> Any:
        try:
            yield
        except FileNotFoundError as error:
            raise ChunkMissingError(f"{self.place} does not {what}: no such object") from error
        except Exception as error:  # each file system has errors of its own
            raise ChunkStoreError(f"{self.place} does not {what}: {type(error).__name__}: {error}") from error


def open_store(place: str, keys: Keys, call: Call[Any]) -> ChunkStore:
    """Opens the store at `place`: "redis", an fsspec URL, or a folder.

    Raises:
        ConfigError: no installed file system supports the URL's scheme.
    """
    if place == REDIS:
        return RedisChunks(call, keys)
    if "://" in place:
        return FsspecChunks(place)
    return FolderChunks(Path(place))
