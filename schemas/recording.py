"""A file of rollout groups, for the parity check and for whoever wants to look at them again.

    magic     8 bytes  b"PENSTOCK"
    header    u32 little-endian length, then a `RecordingHeader` as msgpack
    groups    each: u32 length, then what `penstock.schemas.rollout.encode_group` returns
    end       u32 0, u32 number of groups, 16 bytes BLAKE2b of everything before the end

A file without its end was cut off: it is refused, never read in part.
"""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from penstock.schemas.rollout import MAX_ENTRY_BYTES, RecordError, RolloutGroup, decode_group, encode_group, one_line

MAGIC = b"PENSTOCK"
RECORDING_VERSION = 1
SEGMENT_VERSION = 2
"""Of a segment of a run's complete record (`penstock.schemas.record`), which begins alike and goes on otherwise."""
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16
_SAMPLED_BYTES = 1 << 20


class RecordingError(ValueError):
    """A file that is no recording, or not a whole one; the message says where and what was expected."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs beside the groups. Whatever is empty has to be said by who reads.

    run: name of the run.
    model: folder of the base model, which is version 0, and of its tokenizer.
    model_digest: of that folder's files; empty where it is not known.
    dtype: of the published weights, "float32" or "bfloat16".
    weights: folder with a `v<version>.safetensors` for each further version.
    policy_version: the trainer's newest when this was recorded, -1 where there is none.
    forks, announced: by epoch, as `penstock.schemas.policy.lag` takes them.
    """

    run: str = ""
    model: str = ""
    model_digest: str = ""
    dtype: str = "float32"
    weights: str = ""
    policy_version: int = -1
    forks: dict[int, int] = {}
    announced: dict[int, int] = {}
    recording_version: int = RECORDING_VERSION


class Recording(NamedTuple):
    header: RecordingHeader
    groups: tuple[RolloutGroup, ...]


def model_digest(folder: Path) -> str:
    """BLAKE2b-128 of what tells one model folder from another: configuration, tokenizer, and of each weights file its
    name, its size, its first and its last MiB. Without reading gigabytes it knows a model of other weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def is_recording(file: Path) -> bool:
    """Whether the file begins like a recording; False for a file that is not there."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (FileNotFoundError, IsADirectoryError):
        return False


def write_recording(file: Path, header: RecordingHeader, groups: Iterable[RolloutGroup]) -> int:
    """Writes a recording, whole or not at all, over whatever is there; returns the number of groups.

    Raises:
        OSError: it cannot be written.
        RecordError: a group that breaks the contract.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    try:
        with partial.open("wb") as stream:
            num_groups = _write(stream, header, groups)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return num_groups


def _write(stream: BinaryIO, header: RecordingHeader, groups: Iterable[RolloutGroup]) -> int:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def put(data: bytes) -> None:
        digest.update(data)
        stream.write(data)

    put(MAGIC)
    encoded = msgspec.msgpack.encode(header)
    put(_LENGTH.pack(len(encoded)) + encoded)
    num_groups = 0
    for group in groups:
        payload = encode_group(group)
        put(_LENGTH.pack(len(payload)) + payload)
        num_groups += 1
    stream.write(_LENGTH.pack(0) + _LENGTH.pack(num_groups) + digest.digest())
    return num_groups


def read_recording(file: Path) -> Recording:
    """Reads and checks a whole recording.

    Raises:
        RecordingError: no such file, no recording, one of a later version, one that was cut off or altered, or a group
            in it that breaks the contract.
    """
    try:
        with file.open("rb") as stream:
            return _Reader(file, stream).read()
    except FileNotFoundError:
        raise RecordingError(f"{file}: no such file") from None
    except OSError as error:
        raise RecordingError(f"{file}: cannot be read: {error}") from error


class _Reader:
    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._num_groups = 0

    def read(self) -> Recording:
        if self._stream.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{self._file}: not a recording of rollouts (it does not begin with {MAGIC.decode()})")
        self._digest.update(MAGIC)
        header = self._header(self._block("its header"))
        groups: list[RolloutGroup] = []
        while payload := self._block(f"group {len(groups) + 1}"):
            try:
                groups.append(decode_group(payload))
            except RecordError as error:
                raise RecordingError(f"{self._file}: group {len(groups) + 1} of the file: {error}") from error
        self._num_groups = len(groups)
        self._check_end()
        return Recording(header, tuple(groups))

    def _header(self, data: bytes) -> RecordingHeader:
        try:
            header = msgspec.msgpack.decode(data, type=RecordingHeader)
        except (msgspec.DecodeError, ValueError) as error:
            raise RecordingError(f"{self._file}: its header cannot be read: {one_line(str(error))}") from error
        if header.recording_version == SEGMENT_VERSION:
            raise RecordingError(
                f"{self._file}: a segment of the complete record of run {header.run!r}; expected a recording in one "
                "file, or the run to be named"
            )
        if not 1 <= header.recording_version <= RECORDING_VERSION:
            raise RecordingError(
                f"{self._file}: recording_version: {header.recording_version}, this reader knows 1 to "
                f"{RECORDING_VERSION}"
            )
        return header

    def _block(self, what: str) -> bytes:
        """One length and what it announces; empty at the end of the groups."""
        prefix = self._exactly(_LENGTH.size, what)
        (length,) = _LENGTH.unpack(prefix)
        if length > MAX_ENTRY_BYTES:
            raise RecordingError(f"{self._file}: {what}: {length:,} bytes, expected at most {MAX_ENTRY_BYTES:,}")
        if not length:
            return b""
        data = self._exactly(length, what)
        self._digest.update(prefix)
        self._digest.update(data)
        return data

    def _check_end(self) -> None:
        (num_groups,) = _LENGTH.unpack(self._exactly(_LENGTH.size, "its end"))
        digest = self._exactly(_DIGEST_BYTES, "its end")
        if num_groups != self._num_groups or digest != self._digest.digest():
            raise RecordingError(
                f"{self._file}: checksum differs ({self._num_groups} groups, {num_groups} were written): the file was "
                "altered, record it again"
            )
        if self._stream.read(1):
            raise RecordingError(f"{self._file}: bytes after its end, expected nothing")

    def _exactly(self, length: int, what: str) -> bytes:
        data = self._stream.read(length)
        if len(data) < length:
            raise RecordingError(
                f"{self._file}: truncated in {what}: {len(data)} bytes of {length}; the file was cut off, record it "
                "again"
            )
        return data
