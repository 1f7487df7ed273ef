"""A rollout file: a handful of groups beside the weights they name, for the parity check.

    magic     8 bytes  b"PENSTOCK"
    header    u32 little-endian length, then a `RolloutFileHeader` as msgpack
    groups    each: u32 length, then what `penstock.schemas.rollout.encode_group` returns
    end       u32 0, u32 number of groups, 16 bytes BLAKE2b of everything before the end

A file without its end was cut off: it is refused, never read in part. The record of everything that a run trained on is
another thing: `penstock.schemas.record`.
"""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from penstock.schemas.rollout import MAX_ENTRY_BYTES, RecordError, RolloutGroup, decode_group, encode_group, one_line

MAGIC = b"PENSTOCK"
FORMAT = 1
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16


class RolloutFileError(ValueError):
    """Not a rollout file, or not a whole one; the message says where and what was expected."""


class RolloutFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs beside the groups. What is empty has to come from the reader.

    run: name of the run.
    model: folder of the base model, which is version 0, and of its tokenizer.
    model_digest: of that folder's files; empty if unknown.
    dtype: of the published weights, "float32" or "bfloat16".
    weights: folder with a `v<version>.safetensors` for each further version.
    policy_version: the trainer's newest when the file was written, -1 if there is none.
    forks, announced: by epoch, as `penstock.schemas.policy.lag` takes them.
    recording_version: of this format.
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


class RolloutFile(NamedTuple):
    header: RolloutFileHeader
    groups: tuple[RolloutGroup, ...]


def is_rollout_file(file: Path) -> bool:
    """Whether the file begins like one; False if there is no such file."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (FileNotFoundError, IsADirectoryError):
        return False


def write_rollout_file(file: Path, header: RolloutFileHeader, groups: Iterable[RolloutGroup]) -> int:
    """Writes the file, whole or not at all, over whatever is there; returns the number of groups.

    Raises:
        OSError: it cannot be written.
        RecordError: a group that breaks the contract.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    num_groups = 0
    try:
        with partial.open("wb") as stream:

            def put(data: bytes) -> None:
                digest.update(data)
                stream.write(data)

            put(MAGIC)
            encoded = msgspec.msgpack.encode(header)
            put(_LENGTH.pack(len(encoded)) + encoded)
            for group in groups:
                payload = encode_group(group)
                put(_LENGTH.pack(len(payload)) + payload)
                num_groups += 1
            stream.write(_LENGTH.pack(0) + _LENGTH.pack(num_groups) + digest.digest())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return num_groups


def read_rollout_file(file: Path) -> RolloutFile:
    """Reads and checks a whole rollout file.

    Raises:
        RolloutFileError: no such file, no rollout file, one of a later version, one that was cut off or altered, or a
            group in it that breaks the contract.
    """
    try:
        with file.open("rb") as stream:
            return _read(stream)
    except FileNotFoundError:
        raise RolloutFileError(f"{file}: no such file") from None
    except OSError as error:
        raise RolloutFileError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:
        raise RolloutFileError(f"{file}: {error}") from error


def _read(stream: BinaryIO) -> RolloutFile:
    if stream.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"not a rollout file (it does not begin with {MAGIC.decode()})")
    digest = hashlib.blake2b(MAGIC, digest_size=_DIGEST_BYTES)
    header = _decode_header(_block(stream, digest, "its header"))
    groups: list[RolloutGroup] = []
    while payload := _block(stream, digest, f"group {len(groups) + 1}"):
        try:
            groups.append(decode_group(payload))
        except RecordError as error:
            raise ValueError(f"group {len(groups) + 1} of the file: {error}") from error
    (num_groups,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size, "its end"))
    if _exactly(stream, _DIGEST_BYTES, "its end") != digest.digest() or num_groups != len(groups):
        raise ValueError(
            f"checksum differs ({len(groups)} groups, {num_groups} were written): the file was altered, write it again"
        )
    if stream.read(1):
        raise ValueError("bytes after its end, expected nothing")
    return RolloutFile(header, tuple(groups))


def _decode_header(data: bytes) -> RolloutFileHeader:
    try:
        header = msgspec.msgpack.decode(data, type=RolloutFileHeader)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"its header cannot be read: {one_line(str(error))}") from error
    if not 1 <= header.recording_version <= FORMAT:
        raise ValueError(f"recording_version: {header.recording_version}, this reader knows 1 to {FORMAT}")
    return header


def _block(stream: BinaryIO, digest: "hashlib.blake2b", what: str) -> bytes:
    """One length and what it announces; empty at the end of the groups."""
    prefix = _exactly(stream, _LENGTH.size, what)
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_ENTRY_BYTES:
        raise ValueError(f"{what}: {length:,} bytes, expected at most {MAX_ENTRY_BYTES:,}")
    if not length:
        return b""
    data = _exactly(stream, length, what)
    digest.update(prefix + data)
    return data


def _exactly(stream: BinaryIO, length: int, what: str) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise ValueError(f"truncated in {what}: {len(data)} bytes of {length}; the file was cut off, write it again")
    return data
