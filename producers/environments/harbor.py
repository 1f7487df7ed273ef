"""Task folders in the format of Harbor and Terminal-Bench, solved by an agent with a shell."""

import asyncio
import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import shlex
import tarfile
import tomllib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.producers.environments import container
from penstock.producers.environments.dataset import task_of
from penstock.producers.environments.sandbox import MB, Limits, Sandbox, SandboxError, Sandboxes, packed
from penstock.producers.environments.stepping import TOO_LONG, OneAnswer, as_dicts
from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Message, Prompt, Reward

log = logging.getLogger(__name__)

Json = dict[str, Any]

SYSTEM_PROMPT = (
    "You work in a Linux shell, by calls of the tool `shell`. Each call is a new shell in the working directory; files "
    "stay as they are left. When the task is done, answer without a call."
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Runs a command with bash and returns what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "for instance ls -l"}},
                "required": ["command"],
            },
        },
    }
]
REWARDS = "/logs/verifier"
DEFAULT_S = 600.0
"""Of agent, tests and image, where a task names no timeout; Harbor's own for the last two."""
OUTPUT_BYTES = 16384
"""Of a command, for the model to read."""
NOT_CARRIED_OVER = {
    "steps": "tasks of several steps",
    "environment.gpus": "GPUs",
    "environment.tpu": "TPUs",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "health checks",
    "environment.allowed_hosts": "lists of allowed hosts",
    "agent.user": "another user for the agent",
    "verifier.user": "another user for the tests",
    "verifier.environment": "a container of its own for the tests",
    "verifier.collect": "commands that collect artifacts",
}
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--[^\n]*canary[^\n]*-->|#[^\n]*canary[^\n]*)[ \t]*\n)+\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_KEPT = [
    "FROM",
    "WORKDIR",
    "COPY",
    "ADD",
    "ENV",
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "LABEL",
    "MAINTAINER",
    "SHELL",
    "STOPSIGNAL",
]
"""Instructions of a Dockerfile that the local sandbox follows or may leave out."""
_EXPANDED = ("WORKDIR", "COPY", "ADD", "ENV")
"""Those of them in which docker puts values for `$NAME`."""


@dataclass(frozen=True)
class Image:
    """What a Dockerfile makes, as far as the local sandbox can: a working directory, variables and files by path."""

    workdir: str
    env: Mapping[str, str]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class HarborTask:
    """One task folder. workdir: of its task.toml. network: whether its container has the machine's."""

    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    build_timeout_s: float
    limits: Limits
    cpus: float | None
    network: bool
    workdir: str
    image: str | None
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "HarborTask":
        """Raises ValueError: it is no task, or needs what is not carried over; the message names the folder."""
        for name in ("task.toml", "instruction.md", "tests/test.sh"):
            if not (folder / name).is_file():
                raise ValueError(
                    f"{folder}: {name} is missing, expected a task of Harbor: task.toml, instruction.md, environment/ "
                    "and tests/test.sh"
                )
        try:
            settings = tomllib.loads((folder / "task.toml").read_text("utf-8"))
            instruction = _CANARY.sub("", (folder / "instruction.md").read_text("utf-8")).strip()
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        if not instruction:
            raise ValueError(f"{folder}: instruction.md is empty, expected what the agent should do")
        sections = {name: settings.get(name) or {} for name in ("environment", "agent", "verifier")}
        machine, verifier = sections["environment"], sections["verifier"]
        for field, what in NOT_CARRIED_OVER.items():
            section, _, name = field.rpartition(".")
            if (sections[section] if section else settings).get(name):
                raise ValueError(f"{folder}: task.toml: {field}: {what} are not carried over")
        for section, name, known in (
            ("environment", "os", ("linux",)),
            ("environment", "network_mode", ("public", "no-network")),
            ("verifier", "environment_mode", ("shared",)),
        ):
            if str(sections[section].get(name, known[0])).lower() not in known:
                raise ValueError(
                    f"{folder}: task.toml: {section}.{name} is {sections[section][name]!r}, "
                    f"expected {' or '.join(known)}"
                )
        if (folder / "environment" / "docker-compose.yaml").exists():
            raise ValueError(f"{folder}: environment/docker-compose.yaml: several containers are not carried over")
        if not machine.get("docker_image") and not (folder / "environment").is_dir():
            raise ValueError(
                f"{folder}: environment/ is missing, expected it, or environment.docker_image in task.toml"
            )
        agent_s, verifier_s = (_seconds(folder, name, sections[name], "timeout_sec") for name in ("agent", "verifier"))
        cpus = machine.get("cpus")
        memory, storage = machine.get("memory_mb", 2048), machine.get("storage_mb", 512)
        limits = Limits(
            wall_s=max(agent_s, verifier_s),
            cpu_s=max(agent_s, verifier_s) * max(1.0, cpus or 1.0),
            memory_bytes=int(memory) * MB,
            disk_bytes=int(storage) * MB,
            processes=512,
            output_bytes=OUTPUT_BYTES,
        )
        return cls(
            folder=folder,
            instruction=instruction,
            agent_timeout_s=agent_s,
            verifier_timeout_s=verifier_s,
            build_timeout_s=_seconds(folder, "environment", machine, "build_timeout_sec"),
            limits=limits,
            cpus=cpus,
            network=machine.get("network_mode", "public") == "public" and machine.get("allow_internet") is not False,
            workdir=machine.get("workdir") or "",
            image=machine.get("docker_image"),
            env=_variables(folder, machine.get("env") or {}),
            verifier_env=_variables(folder, verifier.get("env") or {}),
        )

    def local(self) -> Image | str:
        """Returns what the local sandbox makes of its Dockerfile, or why it needs a container."""
        if self.image:
            return f"it is in the image {self.image}"
        file = self.folder / "environment" / "Dockerfile"
        if not file.is_file():
            return Image(self.workdir or "/app", {}, {})
        workdir, env, files = "/", dict[str, str](), dict[str, bytes]()
        lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", file.read_text("utf-8"), flags=re.MULTILINE)).splitlines()
        for line in filter(None, map(str.strip, lines)):
            word, _, rest = line.partition(" ")
            is_copy, has_variable = word.upper() in ("COPY", "ADD"), word.upper() in _EXPANDED and "$" in rest
            if word.upper() not in _KEPT or has_variable or (is_copy and rest.strip()[:2] in ("--", '["')):
                return f"its Dockerfile has {line[:60]!r}"
            words = shlex.split(rest)
            if word.upper() == "WORKDIR":
                workdir = os.path.join(workdir, words[0])
            elif word.upper() == "ENV":
                pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
                env |= dict(pair.partition("=")[::2] for pair in pairs)
            elif is_copy:
                target = os.path.join(workdir, words[-1])
                if len(words) > 2 or target.endswith(("/", ".")) or os.path.normpath(target) == workdir:
                    target = os.path.join(target, "")
                for source in words[:-1]:
                    copied = self._copied(source, target, unpacks=word.upper() == "ADD")
                    if copied is None:
                        return f"its Dockerfile has {line[:60]!r}"
                    files |= copied
        return Image(self.workdir or workdir, env, files)

    def _copied(self, source: str, target: str, *, unpacks: bool) -> dict[str, bytes] | None:
        """Returns the files that `COPY source target` makes; None for what is not a path of the folder, or would be
        unpacked."""
        root = (self.folder / "environment").resolve()
        path = (root / source.lstrip("/")).resolve()
        if not path.is_relative_to(root) or not path.exists():
            return None
        if path.is_file() and unpacks and tarfile.is_tarfile(path):
            return None
        if path.is_file():
            return {target + path.name if target.endswith("/") else target: path.read_bytes()}
        return {os.path.join(target, name): data for name, data in _files(path).items()}


class HarborTasks:
    """Tasks of folders, each in a sandbox of its own: the instruction is the prompt, the agent's tool a shell.

    Where docker or podman answers, tasks run in their containers. Elsewhere those whose Dockerfile only copies files
    run in the local sandbox, with this machine's programs and without network; it needs namespaces.

    The reward is what the tests write to `/logs/verifier/reward.json` or `reward.txt`; of several numbers the one named
    `reward`, and all are parts. Tests that a limit ends are worth 0. Other parts: `finished`, 1 for an agent that ended
    by itself.

    training, evaluation: a task folder, or a folder of task folders; held-out tasks are not taken out of `training`.
    max_turns: answers of the model. command_timeout_s: of one command, within the task's own timeout.
    system_prompt: before the instruction; empty for none.

    Raises:
        ValueError: a folder that is no task, or cannot be run here; the message names it.
    """

    def __init__(
        self,
        *,
        seed: int,
        training: str,
        evaluation: str | None = None,
        max_turns: int = 20,
        command_timeout_s: float = 60.0,
        system_prompt: str = SYSTEM_PROMPT,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("command_timeout_s", command_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        self._seed, self._max_turns, self._command_timeout_s = seed, max_turns, command_timeout_s
        self._system = (Message(role="system", content=system_prompt),) if system_prompt else ()
        self._training = read_tasks(training)
        self._evaluation = read_tasks(evaluation) if evaluation is not None else []
        self._by_folder = {str(task.folder): task for task in (*self._training, *self._evaluation)}
        self.num_tasks, self.num_evaluation_prompts = len(self._training), len(self._evaluation)
        self._runtime = container.runtime()
        self._building: dict[Path, asyncio.Lock] = {}
        self._built: set[str] = set()
        if self._runtime is None:
            self._local = {name: _local(task) for name, task in self._by_folder.items()}
            self._sandboxes = Sandboxes(needs_namespaces=True)
            log.warning(
                "neither docker nor podman answers: %d tasks run in the local sandbox, with this machine's programs "
                "and without network",
                len(self._local),
            )

    def prompt(self, index: int) -> Prompt:
        return self._pose(self._training[task_of(index, len(self._training), self._seed)])

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose(self._evaluation[n - 1])

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of an agent that says this and does nothing."""
        return await self.converse(prompt, OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        """Raises SandboxError: the sandbox has failed. RuntimeError: the tests have left no reward."""
        task = self._by_folder[prompt.metadata["folder"]]
        async with self._open(task) as (sandbox, env):
            await conversation.act(lambda: self._begin(task, sandbox), sandbox)
            finished = await self._work(task, prompt, conversation, sandbox, env)
            value, parts = await conversation.act(lambda: _verified(task, sandbox, env), sandbox)
        return Reward(value=value, parts={**parts, "finished": float(finished)})

    async def _work(
        self, task: HarborTask, prompt: Prompt, conversation: Conversation, sandbox: Sandbox, env: Mapping[str, str]
    ) -> bool:
        """Lets the agent work, for as long as it may; returns whether it ended by itself."""
        messages, loop = as_dicts(prompt), asyncio.get_running_loop()
        deadline = loop.time() + task.agent_timeout_s
        for turn in range(self._max_turns):
            try:
                async with asyncio.timeout_at(deadline):
                    reply = await conversation.chat(messages, tools=TOOLS)
            except TimeoutError:
                return False
            except Exception as error:
                if turn == 0 or getattr(error, "code", None) not in TOO_LONG:
                    raise
                return False
            messages.append(reply)
            if not reply.get("tool_calls"):
                return True
            for call in reply["tool_calls"]:
                left_s = min(self._command_timeout_s, max(0.1, deadline - loop.time()))
                action = functools.partial(_called, call, sandbox, env, left_s)
                said = await conversation.act(action, sandbox)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return False

    async def _begin(self, task: HarborTask, sandbox: Sandbox) -> None:
        """Makes the files that the agent finds."""
        if self._runtime is None:
            await sandbox.restore(packed(self._local[str(task.folder)].files))

    @contextlib.asynccontextmanager
    async def _open(self, task: HarborTask) -> AsyncIterator[tuple[Sandbox, Mapping[str, str]]]:
        """Opens the task's sandbox as it is before the agent's first command, with the variables of its commands."""
        if self._runtime is None:
            image = self._local[str(task.folder)]
            async with self._sandboxes.open(task.limits) as sandbox:
                sandbox.work = image.workdir
                yield sandbox, {**image.env, **task.env}
            return
        async with self._building.setdefault(task.folder, asyncio.Lock()):
            folder = task.folder / "environment"
            image_name = task.image or container.image_name(folder)
            if task.image is None and image_name not in self._built:
                await container.build(self._runtime, folder, image_name, task.build_timeout_s)
                self._built.add(image_name)
        options: Json = {"work": task.workdir, "cpus": task.cpus, "network": task.network}
        async with container.Container.open(self._runtime, image_name, task.limits, **options) as contained:
            yield contained, task.env

    def _pose(self, task: HarborTask) -> Prompt:
        return Prompt(
            messages=(*self._system, Message(role="user", content=task.instruction)),
            metadata={"folder": str(task.folder)},
        )


def read_tasks(source: str) -> list[HarborTask]:
    """Returns the task that a folder is, or those in it.

    Raises:
        ValueError: there is none, or one of them cannot be read.
    """
    folder = Path(source)
    if (folder / "task.toml").exists() or (folder / "instruction.md").exists():
        return [HarborTask.read(folder)]
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, expected a task of Harbor or a folder of such")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        raise ValueError(f"{folder}: no folder in it, expected tasks of Harbor")
    return [HarborTask.read(path) for path in found]


def _local(task: HarborTask) -> Image:
    if isinstance(image := task.local(), str):
        raise ValueError(f"{task.folder}: {image}, and neither docker nor podman answers; expected a container runtime")
    return image


async def _called(call: Json, sandbox: Sandbox, env: Mapping[str, str], wall_s: float) -> str:
    """Returns what a tool call prints, or what is wrong with it."""
    function = call["function"]
    if function["name"] != "shell":
        return f"error: no tool {function['name'][:40]!a}, expected shell"
    try:
        command = json.loads(function["arguments"])["command"]
        if not isinstance(command, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'error: expected {"command": "ls -l"}'
    return (await sandbox.run(["bash", "-c", command], env=env, wall_s=wall_s)).text.strip() or "(no output)"


async def _verified(task: HarborTask, sandbox: Sandbox, env: Mapping[str, str]) -> tuple[float, dict[str, float]]:
    """Runs the tests of a task; returns the reward and its parts.

    Raises:
        RuntimeError: they leave none.
    """
    await sandbox.run(["sh", "-c", f"rm -rf /tests {REWARDS}; mkdir -p {REWARDS} {sandbox.work}"], cwd="/")
    tests = {f"tests/{name}": data for name, data in _files(task.folder / "tests").items()}
    try:
        await sandbox.restore(packed(tests))
    except SandboxError as error:
        if os.strerror(errno.ENOSPC) not in str(error):  # of the local sandbox; a container's disk is the machine's
            raise
        return 0.0, {"disk_full": 1.0}
    result = await sandbox.run(
        ["bash", "-c", "exec /tests/test.sh"], env={**env, **task.verifier_env}, wall_s=task.verifier_timeout_s
    )
    for name, read in (("reward.json", _json_rewards), ("reward.txt", _text_reward)):
        found = await sandbox.run(["cat", f"{REWARDS}/{name}"])
        if not found.exit_code:
            try:
                return read(found.stdout.decode())
            except ValueError as error:
                raise RuntimeError(f"{task.folder}: its tests wrote {name} as {found.text[:80]!r}: {error}") from None
    if result.ended_by:
        return 0.0, {"tests_timed_out": 1.0}
    raise RuntimeError(
        f"{task.folder}: its tests wrote neither reward.json nor reward.txt to {REWARDS}; they ended with exit status "
        f"{result.exit_code}: {result.text.strip()[-200:]}"
    )


def _json_rewards(text: str) -> tuple[float, dict[str, float]]:
    found = json.loads(text)
    rewards = found if isinstance(found, dict) else {"reward": found}
    parts = {name: _finite(value) for name, value in rewards.items()}
    if "reward" not in parts and len(parts) != 1:
        raise ValueError(f"several rewards ({', '.join(parts)}), expected one of them to be named reward")
    return parts.get("reward", next(iter(parts.values()))), parts


def _text_reward(text: str) -> tuple[float, dict[str, float]]:
    return _finite(float(text)), {}


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r}, expected a finite number")
    return float(value)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _seconds(folder: Path, section: str, settings: Json, name: str) -> float:
    value = settings.get(name, DEFAULT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{folder}: task.toml: {section}.{name} is {value!r}, expected seconds above 0")
    return float(value)


def _variables(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with those of this process in place of `${NAME}` and `${NAME:-default}`."""

    def value_of(match: re.Match[str]) -> str:
        if (value := os.environ.get(match[1], match[2])) is None:
            raise ValueError(f"{folder}: task.toml: the variable {match[1]} is not set, expected it in the environment")
        return value

    return {name: _VARIABLE.sub(value_of, value) for name, value in variables.items()}
