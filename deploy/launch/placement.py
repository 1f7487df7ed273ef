"""Assigns the GPUs of this machine to the processes of a run, and checks that their memory suffices.

The trainer's ranks come first, a GPU each. Producers take the rest in turn, `engine.tensor_parallel_size` each; if too
few are left, producers share all GPUs with the trainer. Engines that share a GPU divide what the trainer leaves of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from penstock.deploy.launch.machine import Gpu, Machine
from penstock.deploy.launch.memory import (
    USABLE,
    ModelShape,
    RankSetting,
    adapter_parameters,
    engine_bytes,
    rank_bytes,
    read_shape,
)
from penstock.schemas.config import ConfigError, RunConfig

OLDEST_DRIVERS = {12: 525, 13: 580}
"""The oldest driver for each major version of CUDA: NVIDIA, "CUDA Toolkit Release Notes", table 2."""
_PIPELINE = "pipeline_parallel_size"


class DeviceShare(NamedTuple):
    """What one rank or engine takes of a GPU. needs: bytes by use; empty if the model's shape is unknown."""

    part: str
    who: str
    gpu: Gpu
    needs: Mapping[str, float]

    @property
    def num_bytes(self) -> float:
        return sum(self.needs.values())


class Placement(NamedTuple):
    """shares: empty if nothing runs on GPUs. engine_fraction: `engine.gpu_memory_utilization` of every engine."""

    shares: tuple[DeviceShare, ...] = ()
    engine_fraction: float | None = None

    @property
    def is_shared(self) -> bool:
        """True if two processes share a GPU."""
        used = [share.gpu.number for share in self.shares]
        return len(set(used)) < len(used)

    def environment(self, part: str) -> dict[str, str]:
        """Returns the environment variables that restrict `trainer` or `producer-<n>` to its own GPUs."""
        own = [str(share.gpu.number) for share in self.shares if share.part == part]
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}

    def options(self, part: str) -> list[str]:
        """Returns the options to add to the command line of a part."""
        has_engine = self.engine_fraction is not None and part != "trainer"
        return ["--set", f"engine.gpu_memory_utilization={self.engine_fraction}"] if has_engine else []

    def table(self) -> str:
        """Returns a table of GPUs, their processes and the memory each takes; empty if nothing runs on GPUs."""
        if not self.shares:
            return ""
        rows = [("GPU", "of GB", "who", "GB", "what for")]
        for share in sorted(self.shares, key=lambda share: share.gpu.number):
            cells = "?", "not known of this architecture"
            if share.needs:
                cells = f"{share.num_bytes / 1e9:.1f}", summed(share.needs)
            rows.append((str(share.gpu.number), f"{share.gpu.total_bytes / 1e9:.1f}", share.who, *cells))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def place(config: RunConfig, machine: Machine, shape: ModelShape | None) -> Placement:
    """Assigns GPUs to the parts of a run.

    shape: of the model; None leaves memory unchecked.

    Raises:
        ConfigError: no such GPU, too few of them, a driver that is too old, or memory that does not suffice.
    """
    if not machine.gpus:
        _check_without_gpus(config, machine)
        return Placement()
    _check_drivers(machine)
    ranks = _ranks(config, machine)
    return _with_memory(config, shape, ranks, _engines(config, machine, ranks))


def _check_without_gpus(config: RunConfig, machine: Machine) -> None:
    here = "nvidia-smi finds none" if machine.cuda else "torch is a build for CPUs"
    if config.trainer.device == "cuda":
        raise ConfigError("trainer.device = 'cuda': torch finds no CUDA device; expected 'auto' or 'cpu' here")
    for name in ("trainer", "producers"):
        if (devices := getattr(config, name).devices) is not None:
            raise ConfigError(f"{name}.devices = {list(devices)}: no GPU to use here ({here}); expected none")
    if machine.needs_gpu:
        raise ConfigError(
            f"the installed vLLM is built for GPUs: none to use here ({here}); expected an NVIDIA GPU that "
            "CUDA_VISIBLE_DEVICES does not hide, or the extra [cpu]"
        )


def _check_drivers(machine: Machine) -> None:
    oldest = OLDEST_DRIVERS.get(int((machine.cuda or "0").partition(".")[0]), 0)
    for gpu in machine.gpus:
        if int(gpu.driver.partition(".")[0]) < oldest:
            raise ConfigError(
                f"GPU {gpu.number} ({gpu.name}): driver {gpu.driver}, expected {oldest} or newer for torch's "
                f"CUDA {machine.cuda}"
            )


def _ranks(config: RunConfig, machine: Machine) -> list[Gpu]:
    """Returns a GPU for each rank of the trainer; none for a trainer on the CPU."""
    count, asked = config.trainer.num_processes, config.trainer.devices
    if config.trainer.device == "cpu":
        if asked is not None:
            raise ConfigError(f"trainer.devices = {list(asked)} with trainer.device = 'cpu': expected one of them")
        return []
    if asked is None:
        if count > len(machine.gpus):
            raise ConfigError(
                f"trainer.num_processes = {count}: {_listed(machine.gpus)} here; expected a GPU for each rank"
            )
        return list(machine.gpus[:count])
    if len(set(asked)) != count or len(asked) != count:
        raise ConfigError(
            f"trainer.devices = {list(asked)}: expected {count} different numbers, one for each of "
            f"trainer.num_processes = {count}"
        )
    return _found("trainer", asked, machine)


def _engines(config: RunConfig, machine: Machine, ranks: Sequence[Gpu]) -> list[Sequence[Gpu]]:
    """Returns the GPUs of each producer's engine."""
    asked = config.producers.devices
    stages, setting = config.engine.args.get(_PIPELINE, 1), f"engine.args.{_PIPELINE}"
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"{setting} = {stages!r}: expected 1 or more")
    size = config.engine.tensor_parallel_size * stages
    sizes = f"engine.tensor_parallel_size = {config.engine.tensor_parallel_size}"
    sizes += f" times {setting} = {stages}" * (stages > 1)
    if asked is not None:
        pool = _found("producers", asked, machine)
        if len(pool) % size or not pool:
            raise ConfigError(
                f"producers.devices = {list(asked)}: expected a multiple of the {size} that one engine takes ({sizes})"
            )
    else:
        left = [gpu for gpu in machine.gpus if gpu not in ranks]
        pool = left if len(left) >= size else list(machine.gpus)
        if len(pool) < size:
            raise ConfigError(
                f"{sizes}: an engine takes {size} GPUs, and {_listed(machine.gpus)} here; expected at most that"
            )
    groups = cycle(pool[first : first + size] for first in range(0, len(pool) - size + 1, size))
    return list(islice(groups, config.producers.count))


def _found(name: str, asked: Iterable[int], machine: Machine) -> list[Gpu]:
    by_number = {gpu.number: gpu for gpu in machine.gpus}
    for number in asked:
        if number not in by_number:
            raise ConfigError(f"{name}.devices = {list(asked)}: no GPU {number}; {_listed(machine.gpus)} here")
    return [by_number[number] for number in asked]


def _described(gpu: Gpu) -> str:
    return f"GPU {gpu.number} ({gpu.name}, {gpu.total_bytes / 1e9:.1f} GB)"


def _listed(gpus: Sequence[Gpu]) -> str:
    return f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} ({', '.join(str(gpu.number) for gpu in gpus)})"


def _with_memory(
    config: RunConfig, shape: ModelShape | None, ranks: Sequence[Gpu], engines: Sequence[Sequence[Gpu]]
) -> Placement:
    trainer = _rank_needs(config, shape) if shape is not None else {}
    shares = [
        DeviceShare("trainer", f"trainer{f', rank {number}' * (len(ranks) > 1)}", gpu, trainer)
        for number, gpu in enumerate(ranks)
    ]
    for share in shares:
        _check_fits([share], share.gpu.total_bytes, "all of it", "more ranks (trainer.num_processes), ")
    taken_bytes = {share.gpu.number: share.num_bytes for share in shares}
    used = {gpu.number: gpu for own in engines for gpu in own}
    rest = {n: max(0.0, USABLE * gpu.total_bytes - taken_bytes.get(n, 0)) for n, gpu in used.items()}
    fraction = config.engine.gpu_memory_utilization
    if fraction is None:
        shared = sorted(rest.keys() & taken_bytes.keys())
        if shared and shape is None:
            raise ConfigError(
                f"engine.gpu_memory_utilization is not set, and engines share GPU {shared[0]} with the trainer, whose "
                f"memory is not known for the model of model.path = {config.model.path!r}; expected it to be set"
            )
        fraction = _fraction(engines, rest)
    least = _engine_needs(config, shape, len(engines[0])) if shape is not None else {}
    for number, own in enumerate(engines):
        for gpu in own:
            taken = fraction * gpu.total_bytes
            if sum(least.values()) > taken:
                how = " (worked out)" if config.engine.gpu_memory_utilization is None else ""
                raise ConfigError(
                    f"engine.gpu_memory_utilization = {fraction}{how}: {taken / 1e9:.1f} GB of {_described(gpu)} for "
                    f"producer-{number}, expected at least {sum(least.values()) / 1e9:.1f}: {summed(least)}"
                )
            needs = {"weights": least["weights"]} if least else {}
            needs["KV cache and what a pass needs" if least else "engine"] = taken - sum(needs.values())
            shares.append(DeviceShare(f"producer-{number}", f"producer-{number}", gpu, needs))
    for gpu in dict.fromkeys(share.gpu for share in shares):
        own_shares = [share for share in shares if share.gpu == gpu]
        _check_fits(own_shares, gpu.total_bytes, "all of it", "a smaller engine.gpu_memory_utilization, ")
        _check_fits(own_shares, gpu.free_bytes, "other processes hold the rest", "them to end, ")
    return Placement(tuple(shares), fraction)


def _fraction(engines: Sequence[Sequence[Gpu]], rest: Mapping[int, float]) -> float:
    """Returns the largest share of a GPU that every engine can have, in whole percents. rest: bytes left, by GPU."""
    every = [gpu for own in engines for gpu in own]
    return min(math.floor(100 * rest[gpu.number] / gpu.total_bytes / every.count(gpu) + 1e-6) / 100 for gpu in every)


def _check_fits(shares: Sequence[DeviceShare], available: float, why: str, expected: str) -> None:
    needed, gpu = sum(share.num_bytes for share in shares), shares[0].gpu
    if needed <= available:
        return
    terms = "; ".join(f"{share.who} {share.num_bytes / 1e9:.1f} ({summed(share.needs)})" for share in shares)
    raise ConfigError(
        f"{_described(gpu)}: {needed / 1e9:.1f} GB needed, {available / 1e9:.1f} available ({why}): {terms}; "
        f"expected {expected}or another device (docs/sizing.md says what needs how much)"
    )


def _rank_needs(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    trainer = config.trainer
    has_kl = bool(config.objective.kwargs.get("kl_coefficient") or config.advantage.kl_coefficient)
    teacher = None
    if config.teacher is not None and config.teacher.model is not None:
        teacher = read_shape(Path(config.teacher.model))
    setting = RankSetting(
        trainer.num_processes,
        # A longer single segment makes a pass of its own, which `context_parallel` ranks share.
        max(trainer.tokens_per_microbatch, -(-(config.engine.max_model_len or 0) // trainer.context_parallel)),
        config.model.dtype,
        trainer.gradient_checkpointing,
        unsharded=trainer.gradient_accumulation == "unsharded" and trainer.num_processes > 1,
        has_reference=config.model.reference is not None or (has_kl and config.lora is None),
        teacher=0 if teacher is None else teacher.parameters,
        adapter=None if config.lora is None else adapter_parameters(shape, config.lora),
        by_expert=trainer.expert_parallel,
    )
    return rank_bytes(shape, setting)


def _engine_needs(config: RunConfig, shape: ModelShape, size: int) -> dict[str, float]:
    engine = config.engine
    max_model_len = engine.max_model_len or shape.max_model_len
    return engine_bytes(shape, config.model.dtype, size, max_model_len, engine.max_num_seqs)


def summed(needs: Mapping[str, float]) -> str:
    return " + ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items() if size)
