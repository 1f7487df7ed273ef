"""`penstock producer --join`: joins a run from a host that shares only Redis with it."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.deploy.launch.redis_server import ServerError, connect
from penstock.deploy.launch.start_checks import HUB_NAME
from penstock.schemas.config import OWN_REWARD, ConfigError, Plug, RunConfig, config_of, environment_fields
from penstock.schemas.description import DescriptionError, RunDescription, decode_description
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.model_digest import model_digest
from penstock.schemas.process.files import make_private, write_whole
from penstock.schemas.process.plugins import resolve
from penstock.schemas.process.redis_url import URL, certificate_problem, place_of, with_password

_NO_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*/*"]
"""Files of a model on the Hub that Penstock does not read."""
WAIT_S = 600.0
"""Longest wait for a run to begin: hosts and containers start in any order."""
_LOOK_S = 1.0


class RunEndedError(Exception):
    """The run has ended: there is nothing to join."""


def join(url: str, run: str, *, model: str | None, overrides: Sequence[str], runs: Path) -> RunConfig:
    """Reads the configuration of run `run` from the Redis at `url`, with its model in a folder of this host. Sets this
    process's REDIS_URL to `url`.

    Waits, `WAIT_S` at most, for the run's trainer to begin.

    model: folder or Hub name of the base model; None takes the run's own path if the same model is there, else the
        files of the model in Redis, without weights: the engine gets weights with the first policy that it loads.

    Raises:
        ConfigError: not a Redis URL, no such run, another model than the run's, or a missing module of the run.
        RunEndedError: the run has ended.
        ServerError: Redis does not answer, or refuses.
    """
    secret_url, place = with_password(url, "--join"), f"Redis at {place_of(url)}"
    description = _read(secret_url, run, place)
    document = msgspec.json.decode(description.run_file)
    config = config_of(document, Path(f"run file of {run} in {place}"), overrides)
    if config.name != run:
        raise ConfigError(f"name = {config.name!r}: expected that of --run, {run!r}")
    os.environ[URL] = url
    _check_modules(config)
    folder = _base_model(config, description, model, runs)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))


def own_folder() -> Path:
    """Makes the folder for runs of other hosts: in the system's temporary folder, for this user only. Raises
    ConfigError if it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    make_private(folder)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: another user's; expected --runs DIR with a folder of your own")
    return folder


def _read(url: str, run: str, place: str) -> RunDescription:
    try:
        keys = Keys(run)
    except ValueError as error:
        raise ConfigError(f"--run: {error}") from None
    client = connect(url, "--join")
    try:
        fields = _wait_for(client, keys, place)
        finished = client.hget(keys.commit, Commit.FINISHED)
    except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
        problem = certificate_problem(error, url)
        raise ServerError(problem or f"--join: {place} gives nothing of run {run!r}: {error}") from None
    finally:
        client.close()
    if not fields:
        raise ConfigError(f"--run {run!r}: {place} holds no such run; expected one whose trainer has begun")
    if finished == b"1":
        raise RunEndedError(f"--run {run!r}: this run has ended")
    try:
        return decode_description(fields)
    except DescriptionError as error:
        raise ConfigError(f"--run {run!r}: {keys.description} in {place} describes no run: {error}") from None


def _wait_for(client: redis.Redis, keys: Keys, place: str) -> dict[bytes, bytes]:
    """Waits for the run's description and returns its fields; none if its trainer has not begun in `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    fields: Any = client.hgetall(keys.description)
    if not fields:
        waits = f"waiting for its trainer to begin, {WAIT_S:g} s at most"
        print(f"penstock: --run {keys.run!r}: {place} holds no such run yet; {waits}", file=sys.stderr, flush=True)
    while not fields and time.monotonic() < deadline:
        time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        fields = client.hgetall(keys.description)
    return dict(fields)


def _check_modules(config: RunConfig) -> None:
    """Checks that the user's own code, which Redis does not hold, can be imported here."""
    plugs: list[tuple[str, Plug]] = [*environment_fields(config), ("reward", config.reward)]
    plugs += [(f"reward.components[{n}]", each) for n, each in enumerate(config.reward.components)]
    for field, plug in plugs:
        if plug.path == OWN_REWARD:
            continue
        try:
            resolve(plug, field)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; a producer that joins needs the run's modules, and the files they read, on its own host: "
                f"in the working directory {os.getcwd()} or on PYTHONPATH"
            ) from error


def _base_model(config: RunConfig, description: RunDescription, given: str | None, runs: Path) -> Path:
    path, wanted = config.model.path, description.model_digest
    if given is not None:
        folder = _find_model(given)
        if (found := model_digest(folder)) != wanted:
            raise ConfigError(
                f"--model {given}: digest {found}, but the run's model {path!r} has {wanted}: expected the run's own "
                "base model, or no --model to take it from Redis"
            )
        return folder
    if (Path(path) / "config.json").is_file():
        if (found := model_digest(Path(path))) == wanted:
            return Path(path)
        if config.lora is None:
            print(
                f"penstock: model.path = {path!r} is another model on this host (digest {found}, the run's {wanted}): "
                "taken from Redis instead",
                file=sys.stderr,
            )
    if config.lora is not None:
        raise ConfigError(
            f"--join: run {config.name!r} publishes adapters ([lora]) to the model {path!r}, whose weights are neither "
            "on this host nor in Redis; expected --model FOLDER or OWNER/NAME with that base"
        )
    folder = config.folder(runs) / f"model-{wanted}"
    for made in (config.folder(runs), folder):
        make_private(made)
    for name, content in description.model_files.items():
        write_whole(folder / name, content)
    return folder


def _find_model(given: str) -> Path:
    folder = Path(given)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or not HUB_NAME.fullmatch(given):
        raise ConfigError(f"--model {given}: no config.json there; expected a model's folder, or OWNER/NAME on the Hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, ignore_patterns=_NO_WEIGHTS))
    except Exception as error:  # of the Hub, its client, or the system
        raise ConfigError(
            f"--model {given}: no such folder, and not from the Hugging Face Hub: {type(error).__name__}: {error}"
        ) from None
