"""Rollout files: some groups, stored next to the weights they name, for the parity check.

    magic     8 bytes  b"PENSTOCK"
    digest    16 bytes BLAKE2b of the content
    content   msgpack: a `RolloutFileHeader`, then each group as `penstock.schemas.rollout.encode_group` writes it

A file that was cut off is refused, never read in part. The record of all rollouts that a run trained on has another
format: `penstock.schemas.record`.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.schemas.config import LoraConfig
from penstock.schemas.process.files import write_whole
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_group, encode_group, one_line

MAGIC = b"PENSTOCK"
FORMAT = 1
_DIGEST_BYTES = 16


class RolloutFileError(ValueError):
    """Not a complete rollout file; the message says where and what was expected."""


class RolloutFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts a reader needs in addition to the groups. The reader supplies those that are empty.

    run: name of the run.
    model: folder of the base model, which is version 0, and of its tokenizer.
    model_digest: of that folder's files; empty if unknown.
    dtype: of the published weights, one of `model.dtype`.
    weights: folder with a `v<version>.safetensors` for each further version.
    policy_version: the trainer's newest when the file was written, -1 if there is none.
    forks, announced: by epoch, as `penstock.schemas.policy.lag` takes them.
    recording_version: of this format.
    lora: the published weights are adapters of these settings.
    """

    run: str = ""
    model: str = ""
    model_digest: str = ""
    dtype: str = "float32"
    weights: str = ""
    policy_version: int = -1
    forks: dict[int, int] = {}
    announced: dict[int, int] = {}
    recording_version: int = FORMAT
    lora: LoraConfig | None = None


class RolloutFile(NamedTuple):
    header: RolloutFileHeader
    groups: tuple[RolloutGroup, ...]


def is_rollout_file(file: Path) -> bool:
    """Returns whether the file begins like a rollout file; False if it does not exist."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (FileNotFoundError, IsADirectoryError):
        return False


def write_rollout_file(file: Path, header: RolloutFileHeader, groups: Iterable[RolloutGroup]) -> int:
    """Writes the file, whole or not at all, replacing any other; returns the number of groups.

    Raises:
        OSError: the file cannot be written.
        RecordError: a group breaks the contract.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    payloads = [encode_group(group) for group in groups]
    content = msgspec.msgpack.encode((header, payloads))
    write_whole(file, MAGIC + _digest(content) + content)
    return len(payloads)


def read_rollout_file(file: Path) -> RolloutFile:
    """Reads and checks a whole rollout file.

    Raises:
        RolloutFileError: the file does not exist, is no rollout file, is of a later version, was cut off or altered, or
            holds a group that breaks the contract.
    """
    try:
        return _decode(file.read_bytes())
    except FileNotFoundError:
        raise RolloutFileError(f"{file}: no such file") from None
    except OSError as error:
        raise RolloutFileError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:
        raise RolloutFileError(f"{file}: {error}") from error


def _decode(data: bytes) -> RolloutFile:
    if not data.startswith(MAGIC):
        raise ValueError(f"not a rollout file (it does not begin with {MAGIC.decode()})")
    start = len(MAGIC) + _DIGEST_BYTES
    content = data[start:]
    if data[len(MAGIC) : start] != _digest(content):
        raise ValueError("checksum differs: the file was cut off or altered; write it again")
    try:
        header, payloads = msgspec.msgpack.decode(content, type=tuple[RolloutFileHeader, list[bytes]])
    except msgspec.DecodeError as error:
        raise ValueError(f"its content cannot be read: {one_line(str(error))}") from error
    if not 1 <= header.recording_version <= FORMAT:
        raise ValueError(f"recording_version: {header.recording_version}, this reader knows 1 to {FORMAT}")
    groups: list[RolloutGroup] = []
    for number, payload in enumerate(payloads, start=1):
        try:
            groups.append(decode_group(payload))
        except RecordError as error:
            raise ValueError(f"group {number} of the file: {error}") from error
    return RolloutFile(header, tuple(groups))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
