"""Reads the NVIDIA GPUs of this machine without initializing CUDA in this process."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from penstock.schemas.config import ConfigError

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")
_MIB = 2**20
_TIMEOUT_S = 60


class Gpu(NamedTuple):
    """number: by nvidia-smi, in the order of the PCI bus."""

    number: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    driver: str


class Machine(NamedTuple):
    """gpus: those in CUDA_VISIBLE_DEVICES, in its order. cuda: the version that torch was built for; None for a build
    for CPUs, which leaves `gpus` empty. needs_gpu: the installed vLLM runs on GPUs only."""

    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    needs_gpu: bool = False


def read_machine() -> Machine:
    """Asks nvidia-smi. Raises ConfigError if it fails, or CUDA_VISIBLE_DEVICES names a device that it does not list."""
    cuda = _cuda_of_torch()
    if cuda is None:
        return Machine()
    gpus = {str(gpu.number): gpu for gpu in _read_gpus()}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(gpus) if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    # vLLM's build for CPUs is a distribution with another name.
    needs_gpu = any(True for _ in importlib.metadata.Distribution.discover(name="vllm"))
    return Machine(tuple(_find(name, gpus) for name in names), cuda, needs_gpu)


def _cuda_of_torch() -> str | None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.MULTILINE)
    return cuda[1] if cuda else None


def _read_gpus() -> list[Gpu]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=_TIMEOUT_S)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi: {error}; expected a list of this machine's GPUs") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise ConfigError(f"nvidia-smi ended with status {done.returncode}: {said}; expected a list of GPUs")
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]


def _gpu(line: str) -> Gpu:
    try:
        number, uuid, name, total, free, driver = (word.strip() for word in line.split(","))
        return Gpu(int(number), uuid, name, int(total) * _MIB, int(free) * _MIB, driver)
    except ValueError:
        raise ConfigError(f"nvidia-smi: {line!r}: expected {', '.join(_QUERY)} of a GPU") from None


def _find(name: str, gpus: dict[str, Gpu]) -> Gpu:
    is_uuid = name.startswith("GPU-")
    found = [gpu for number, gpu in gpus.items() if number == name or (is_uuid and gpu.uuid.startswith(name))]
    if len(found) != 1:
        listed = ", ".join(gpus) or "none"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES names {name!r}: expected numbers or UUIDs of GPUs here ({listed})")
    return found[0]
