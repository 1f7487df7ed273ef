"""Access to a run from outside: its folder, its configuration, its Redis."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from penstock.deploy.launch.redis_server import RedisServer, ServerError, connect
from penstock.deploy.launch.run_folder import RUN_FILE, places_of, try_lock
from penstock.schemas.config import ConfigError, RunConfig, load_config
from penstock.schemas.keys import Keys
from penstock.schemas.process.outage import on_another_node
from penstock.schemas.process.redis_url import configured_url, connection_file

WAIT_S = 10.0
_LOAD_S = 600.0
_LOOK_S = 0.1


class OpenRun(NamedTuple):
    """A run as seen from this machine.

    client: its Redis, if it answers; otherwise None, and `without_redis` says why.
    folder, config: None for a run that is known by name only, through REDIS_URL.
    """

    name: str
    folder: Path | None
    config: RunConfig | None
    client: redis.Redis | None
    without_redis: str

    @property
    def keys(self) -> Keys:
        return Keys(self.name)

    @property
    def redis(self) -> redis.Redis:
        """The run's Redis. Raises ServerError if it cannot be reached."""
        if self.client is None:
            raise ServerError(self.without_redis)
        return self.client


@contextmanager
def open_run(run: str | Path, runs: str | Path) -> Iterator[OpenRun]:
    """Opens the run of this name in `runs`, or in the folder `run`.

    If the run's own server is down, it is started on its data, and stopped at the end.

    Raises:
        ConfigError: no such run, or a run file that cannot be read.
        ServerError: Redis refuses what is asked of it, or the run's own server does not start.
    """
    name, folder, config = find_run(str(run), Path(runs))
    with ExitStack() as closing:
        client, without_redis = _connect(config, folder, closing)
        try:
            if client is not None and folder is None and not client.exists(Keys(name).commit):
                raise ConfigError(f"{run}: neither a folder, nor a run in {runs} or in the Redis at REDIS_URL")
            yield OpenRun(name, folder, config, client, without_redis)
        except redis.ResponseError as error:
            raise ServerError(on_another_node(error, "Redis") or f"Redis refuses: {error}") from error


def find_run(run: str, runs: Path) -> tuple[str, Path | None, RunConfig | None]:
    """Finds name, folder and configuration of the run of this name in `runs`, or in the folder `run`. With REDIS_URL a
    name is enough.

    Raises:
        ConfigError: no such run, or a run file that cannot be read.
    """
    folder = _folder(run, runs)
    config = load_config(folder / RUN_FILE) if folder is not None else None
    return config.name if config is not None else run, folder, config


def _folder(run: str, runs: Path) -> Path | None:
    for folder in places_of(run, runs):
        if (folder / RUN_FILE).is_file():
            return folder
    if os.environ.get("REDIS_URL") and not (runs / run).is_dir():
        try:
            Keys(run)
        except ValueError as error:
            raise ConfigError(f"{run}: neither a folder nor a run in {runs}: {error}") from None
        return None
    if (runs / run).is_dir() or Path(run).is_dir():
        raise ConfigError(f"{run}: a folder without {RUN_FILE}, so no run")
    raise ConfigError(f"{run}: neither a folder nor a run in {runs}")


def _connect(config: RunConfig | None, folder: Path | None, closing: ExitStack) -> tuple[redis.Redis | None, str]:
    """Returns (client, "") or (None, why not)."""
    url = configured_url(config)
    if url is None and config is not None and folder is not None:
        return _connect_to_own(config, folder, closing)
    name = "REDIS_URL" if os.environ.get("REDIS_URL") else "redis.url"
    client = connect(url or "", name)
    closing.callback(client.close)
    why = _why_silent(client)
    return (client, "") if why is None else (None, f"{name}: no Redis answers: {why}")


def _connect_to_own(config: RunConfig, folder: Path, closing: ExitStack) -> tuple[redis.Redis | None, str]:
    """Connects to the run's own server, or starts one on its data.

    Waits, `WAIT_S` at most, while another process holds the run's lock and no server answers, as when a launcher
    starts or stops. An answer or the released lock ends the wait.
    """
    if not connection_file(folder).exists() and not (folder / "redis" / "appendonlydir").is_dir():
        return None, f"{folder / 'redis'} holds no data: this run has had no server of its own"
    deadline = time.monotonic() + WAIT_S
    while True:
        why: str | None = "it is not running"
        if (url := own_url(folder)) is not None:
            client = connect(url, str(connection_file(folder)))
            closing.callback(client.close)
            why = _why_silent(client)
            if why is None:
                return client, ""
        lock = try_lock(folder)
        if lock is not None:
            closing.callback(os.close, lock)
            server = RedisServer(folder, maxmemory_mb=config.redis.maxmemory_mb, lock=lock)
            closing.callback(server.stop)
            return server.client, ""
        if time.monotonic() > deadline:
            return None, f"{folder} is in use, but its Redis does not answer: {why}"
        time.sleep(_LOOK_S)


def own_url(folder: Path) -> str | None:
    """Reads the URL of the run's own server from its connection file; None without one."""
    try:
        return str(json.loads(connection_file(folder).read_text("utf-8"))["url"])
    except (FileNotFoundError, KeyError, ValueError):
        return None


def _why_silent(client: redis.Redis) -> str | None:
    """Returns why the server does not answer, None if it does. Waits while it reads its data, `_LOAD_S` at most."""
    deadline = time.monotonic() + _LOAD_S
    while True:
        try:
            client.ping()
            return None
        except redis.BusyLoadingError as error:
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(_LOOK_S)
        except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
            return str(error)
