"""The wire format of rollouts: one record per prompt group, dense numbers as packed bytes."""

import math
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from typing import Literal

import msgspec

from penstock.schemas.images import MAX_IMAGES_BYTES, ImagePlace, problem_of_images, problem_of_places
from penstock.schemas.metrics import MAX_PART_CHARACTERS, MAX_PARTS
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.routes import Routes

SCHEMA_VERSION = 1
MAX_ENTRY_BYTES = 4 * 1024 * 1024
"""The largest encoded group a stream entry may hold, and the largest group but for its images."""
MAX_ITEMS = 4096
"""Most entries of each table or list in a record, apart from the packed numbers."""
MAX_REWARD = 1e9
"""Larger rewards could overflow sums and squares over a batch, and one record would spoil the whole batch."""
MAX_REASON_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 8000
ABANDONED = "abandoned"
"""The kind of a dead group (its reason up to the colon) whose agents left: the run is not at fault."""

OVERDUE = "deadline"
"""The kind of a dead group that missed its deadline."""
PAST_LAG = "lag"
"""The kind of a dead group that was given up because it could not be within the lag bound (`abort_past_lag`)."""
NOT_FINISHED, TOO_LARGE, NO_ROOM = "not finished after", "rollout_too_large", "fit one stream entry"
"""Parts of the reasons of groups and agents' rollouts that were too long: for a deadline, for a rollout's share of a
stream entry, for the entry."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

if sys.byteorder != "little" or array("i").itemsize != 4:
    raise ImportError(
        "penstock.schemas.rollout packs numbers as little-endian 4-byte values; this platform is not little-endian"
    )


class RecordError(ValueError):
    """A record that breaks the contract; the message names the field, what it holds and what was expected.

    The message goes into logs and dead letters and may quote the record: one line, cut at `MAX_REASON_CHARACTERS`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Escapes line breaks and other control characters, and cuts text longer than `MAX_REASON_CHARACTERS`, appending
    its length. Idempotent."""
    # Cut before escaping: the text may have megabytes.
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: MAX_REASON_CHARACTERS + 1]
    )
    if len(shown) <= MAX_REASON_CHARACTERS:
        return shown
    end = f"... ({len(text):,} characters)"
    return shown[: MAX_REASON_CHARACTERS - len(end)] + end


def shown_error(error: BaseException) -> str:
    """Returns an error's type and text in one line, as `one_line` cuts it, whatever its own `__str__` does."""
    try:
        text = str(error)
    except BaseException as second:  # the class may be the user's
        text = f"its text cannot be shown: {type(second).__name__}"
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def shown_traceback(error: BaseException) -> str:
    """Returns the last `MAX_TRACEBACK_CHARACTERS` of an error's traceback. A long text in it is cut, so that it does
    not take the place of the frames."""
    parts = traceback.format_exception(error)
    return "".join(map(_shortened, parts))[-MAX_TRACEBACK_CHARACTERS:]


def _shortened(part: str) -> str:
    if len(part) <= MAX_TRACEBACK_CHARACTERS // 4:
        return part
    return f"{part[: MAX_TRACEBACK_CHARACTERS // 8]}... ({len(part):,} characters)\n"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids[start:end]` of a segment were sampled by policy `version` (-1: unknown)."""

    version: int
    start: int
    end: int


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The `count` likeliest ids at each of consecutive sampled tokens, the likeliest first: 8 bytes each.

    The sampled id has no place of its own: it is among them only if it is one of the likeliest.

    ids: int32 little-endian bytes, `[num_sampled, count]`.
    logprobs: float32 little-endian bytes, `[num_sampled, count]`, natural log, of the distribution that the token was
        sampled from; a token's add up to less than 1 by what all other ids have.
    """

    count: int
    ids: bytes
    logprobs: bytes

    def part(self, start: int, end: int) -> "TopLogprobs":
        """Returns those of the sampled tokens from `start` to before `end`."""
        own = slice(4 * self.count * start, 4 * self.count * end)
        return TopLogprobs(self.count, self.ids[own], self.logprobs[own])

    def problem(self, num_sampled: int) -> str | None:
        """Returns why these are not of `num_sampled` tokens; None if they are."""
        found, wanted = (len(self.ids), len(self.logprobs)), 4 * self.count * num_sampled
        if self.count < 1 or found != (wanted, wanted):
            return f"{found} bytes, expected {wanted} each: {self.count} ids and logprobs of {num_sampled} tokens"
        return None


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence exactly as the engine saw it: context and sampled tokens.

    A rollout of two turns, as one segment of 9 tokens (prompt 3, answer 2, tool result 2, answer 2)::

        token_ids            [9] int32    11 12 13 | 21 22 | 31 32 | 41 42
        loss_mask            runs         (3, 5) (7, 9)                      half-open, ascending, disjoint
        behavior_logprobs    [4] float32  one for each token in the runs, in order
        version_spans        runs         (7, 3, 5) (7, 7, 8) (8, 8, 9)      tile the loss mask, token by token

    token_ids: int32 little-endian bytes, `[num_tokens]`.
    behavior_logprobs: float32 little-endian bytes, `[num_sampled_tokens]`, natural log, of the processed distribution
        that the token was sampled from.
    sampling_mask: per sampled token the ids that the sampler kept (top-k/top-p), int32 bytes each; None without one.
    teacher_logprobs: float32 little-endian bytes, `[num_sampled_tokens]`, of a teacher's server; unset without one.
    routes: the experts that the engine chose for every token but the last, when it was first computed; unset unless
        `model.replay_routes`.
    top_logprobs: the likeliest ids where each sampled token was drawn; unset unless `sampling.top_logprobs`.
    images: the places of images in the context, ascending; their bytes are in `RolloutGroup.images`.
    """

    token_ids: bytes
    behavior_logprobs: bytes
    loss_mask: tuple[tuple[int, int], ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason = "stop"
    sampling_mask: tuple[bytes, ...] | None = None
    teacher_logprobs: bytes | msgspec.UnsetType = msgspec.UNSET
    routes: Routes | msgspec.UnsetType = msgspec.UNSET
    top_logprobs: TopLogprobs | msgspec.UnsetType = msgspec.UNSET
    images: tuple[ImagePlace, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.behavior_logprobs) // 4


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling: its segments (normally one) and the reward of the whole."""

    segments: tuple[Segment, ...]
    reward: Reward

    @property
    def is_truncated(self) -> bool:
        """True if it ended at the token limit."""
        return self.segments[-1].finish_reason == "length"

    @property
    def num_sampled_tokens(self) -> int:
        return sum(segment.num_sampled_tokens for segment in self.segments)


class ReproducibleSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings whose distribution the trainer computes again."""

    temperature: float = 1.0
    """Softmax temperature; below 1e-5 sampling is greedy and logprobs are those of temperature 1, as in vLLM."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    """1.0 keeps every token."""
    max_tokens: int = 256
    """The most tokens one completion may have."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, in addition to the model's own end of sequence."""
    top_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    """The likeliest ids that are recorded with each sampled token, with their log-probabilities."""

    @property
    def is_truncated(self) -> bool:
        """True if top-k or top-p excludes tokens from sampling."""
        return self.top_p != 1.0 or self.top_k not in (0, -1)

    @property
    def token_bytes(self) -> int:
        """The encoded size of a sampled token: id, logprob, with top-k or top-p the `top_k` ids that could be sampled,
        and the likeliest ids with their logprobs."""
        return 8 + self.is_truncated * (5 + 4 * self.top_k) + 8 * (self.top_logprobs or 0)


class SamplingSettings(ReproducibleSampling, frozen=True, kw_only=True):
    """The sampling settings: the part of the behavior policy that is not its weights."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was sampled before. The three penalties are vLLM's; the trainer
    reproduces none of them, and the parity check recognizes them in records of other engines."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time it was sampled before."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the context or sampled before."""

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class EngineFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """All engine settings that can affect logprobs, as reported by the running engine."""

    engine: str
    version: str
    model: str
    dtype: str
    head_dtype: str
    logprobs_mode: str
    prefix_caching: bool
    async_scheduling: bool
    other: dict[str, str] = {}
    """Every other engine argument that the run file sets."""
    route_bytes: int | msgspec.UnsetType = msgspec.UNSET
    """Bytes of each token's `Routes`; unset if it returns none."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Wall-clock seconds since the epoch."""

    claimed_s: float = 0.0
    generated_s: float = 0.0
    appended_s: float = 0.0
    released_s: float | msgspec.UnsetType = msgspec.UNSET
    """By Redis' clock, of the prompt that was claimed; unset in records of earlier releases."""


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The siblings sampled from one prompt: one entry of the rollout stream.

    `index` is the released task index and the group's id. An evaluation group has `evaluation_id`
    (`"<version>-<n>"`), index 0, and never crosses the rollout stream.
    """

    index: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    producer_id: str
    fingerprint: EngineFingerprint
    sampling: SamplingSettings
    timings: Timings = Timings()
    evaluation_id: str | None = None
    schema_version: int = SCHEMA_VERSION
    missing: str = ""
    """Why there are fewer siblings than `group_size`; empty for a complete group."""
    environment: str = ""
    """Name of the environment that posed the prompt; empty in records of earlier releases."""
    task: int = 0
    """Number of the prompt among the tasks of its environment; 0 in records of earlier releases."""
    num_tries_lost: int = 0
    """Earlier attempts at the prompt that were lost when their producer was killed or stopped, with their sampled
    tokens; an attempt that another producer continued is not lost."""
    sampled_by: tuple[str, ...] = ()
    """The producer instances (`Heartbeat.instance`) that sampled parts of it, in order: the last one finished it. Empty
    in records of earlier releases."""
    images: dict[str, bytes] | msgspec.UnsetType = msgspec.UNSET
    """The image files of the prompt and of all segments, by digest; unset without images. A file that the entry had no
    room for is empty here: its bytes are in the run's `Keys.images`, those of a group that was given up nowhere."""

    @property
    def samplers(self) -> tuple[str, ...]:
        """`sampled_by`, or the producer's id in a record without it."""
        return self.sampled_by or (self.producer_id,)

    def finished_by(self, instance: str) -> "RolloutGroup":
        """Returns the group with `instance` as the last of its samplers."""
        if instance in self.sampled_by[-1:]:
            return self
        return msgspec.structs.replace(self, sampled_by=(*self.sampled_by, instance))


class GroupOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The samplers of a group, as in `RolloutGroup`: all that is read of a refused record."""

    producer_id: str
    sampled_by: tuple[str, ...] = ()

    @property
    def samplers(self) -> tuple[str, ...]:
        """See `RolloutGroup.samplers`."""
        return self.sampled_by or (self.producer_id,)


_ORDINARY_HIGH_BYTES = bytes([*range(0x00, 0x3A), *range(0x80, 0xFF)])
"""Highest bytes of ordinary logprobs as float32: finite, at most 2^-11 (below 1e-3), not extremely negative."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RolloutGroup)
_origin_decoder = msgspec.msgpack.Decoder(GroupOrigin)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Packs token ids as int32 little-endian bytes."""
    # Three times as fast as `array`; the check at the top of this module guarantees that native `i` is int32.
    return struct.Struct(f"{len(token_ids)}i").pack(*token_ids)


def pack_floats(values: Sequence[float]) -> bytes:
    """Packs numbers as float32 little-endian bytes."""
    return struct.Struct(f"{len(values)}f").pack(*values)


def unpack_ids(data: bytes) -> "array[int]":
    return array("i", data)


def unpack_floats(data: bytes) -> "array[float]":
    return array("f", data)


def died_of_length(reason: str) -> bool:
    """Returns whether a dead group, or an agent's rollout of it, was too long."""
    kind, _, why = reason.partition(":")
    return kind in (OVERDUE, PAST_LAG, "agents", "record") and says_too_long(why)


def says_too_long(why: str) -> bool:
    """Returns whether the reason of dead rollouts says that one was too long."""
    return any(each in why for each in (NOT_FINISHED, TOO_LARGE, NO_ROOM))


def encode_group(group: RolloutGroup, *, dead: bool = False) -> bytes:
    """Encodes a group as msgpack. Checks lengths; the numbers themselves are checked on decoding.

    dead: accepts a group that was given up: without rollouts, or with rewards of any value.

    Raises:
        RecordError: lengths that disagree, images that are no group's, or more than `MAX_ENTRY_BYTES` without them.
    """
    _check_structure(group, dead)
    payload = _encoder.encode(group)
    if len(payload) > MAX_ENTRY_BYTES:
        _check_images(group)
        _check_size(payload, group)
    return payload


def encode_entry(group: RolloutGroup, *, dead: bool = False) -> tuple[bytes, dict[str, bytes]]:
    """Returns what a stream entry holds of a group, at most `MAX_ENTRY_BYTES`, and the image files that it does not, by
    digest: none, or all if they do not fit. Raises RecordError as `encode_group`."""
    payload = encode_group(group, dead=dead)
    if len(payload) <= MAX_ENTRY_BYTES:
        return payload, {}
    files = {digest: data for digest, data in (group.images or {}).items() if data}
    return _encoder.encode(msgspec.structs.replace(group, images=dict.fromkeys(group.images or {}, b""))), files


def decode_group(payload: bytes, *, dead: bool = False) -> RolloutGroup:
    """Decodes and checks one group; `dead` as in `encode_group`.

    Time and memory are bounded by the payload's actual size, memory to about 35 times of it, whatever lengths it
    claims.

    Raises:
        RecordError: not msgpack of this schema, a newer schema version, lengths that disagree, or numbers that are not
            valid ids and logprobs.
    """
    if len(payload) > MAX_ENTRY_BYTES + MAX_IMAGES_BYTES:
        raise RecordError(f"payload: {len(payload):,} bytes, expected at most {MAX_ENTRY_BYTES + MAX_IMAGES_BYTES:,}")
    try:
        group = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"payload: not a rollout group: {error}") from error
    _check_images(group)
    _check_size(payload, group)
    _check_structure(group, dead)
    _check_context(group, dead)
    for r, rollout in enumerate(group.rollouts):
        for s, segment in enumerate(rollout.segments):
            _check_values(segment, f"group {group.index}: rollouts[{r}].segments[{s}]")
    return group


def decode_entry(
    payload: bytes, *, dead: bool = False, image: Callable[[str], bytes | None] | None = None
) -> RolloutGroup:
    """Decodes what a stream entry holds of a group, as `decode_group` does.

    image: returns the file of a digest that the entry does not hold; None if its bytes are gone. Without it such files
        stay empty.

    Raises:
        RecordError: see `decode_group`, more than `MAX_ENTRY_BYTES`, or an image whose bytes are gone.
    """
    if len(payload) > MAX_ENTRY_BYTES:
        raise RecordError(f"payload: {len(payload):,} bytes, expected at most {MAX_ENTRY_BYTES:,}")
    group = decode_group(payload, dead=dead)
    if image is None or not group.images or all(group.images.values()):
        return group
    files = dict(group.images)
    for digest in (each for each, data in group.images.items() if not data):
        if not (data := image(digest)):
            raise RecordError(f"{_place_of(digest, group)}: the bytes of the image {digest[:64]!a} are gone")
        files[digest] = data
    group = msgspec.structs.replace(group, images=files)
    _check_images(group)
    return group


def _place_of(digest: str, group: RolloutGroup) -> str:
    """Returns where a group has an image."""
    where = f"group {group.index}: "
    if any(part.digest == digest for part in group.prompt.images):
        return where + "prompt"
    for r, rollout in enumerate(group.rollouts):
        for s, segment in enumerate(rollout.segments):
            for place in segment.images or ():
                if place.digest == digest:
                    return where + f"rollouts[{r}].segments[{s}].images ({place.start}, {place.end})"
    return where + "images"


def _check_images(group: RolloutGroup) -> None:
    if problem := problem_of_images(group.images or {}):
        raise RecordError(f"group {group.index}: images: {problem}")


def _check_size(payload: bytes, group: RolloutGroup) -> None:
    """Checks the size of a group but for its images."""
    num_bytes = len(payload) - sum(map(len, (group.images or {}).values()))
    if num_bytes > MAX_ENTRY_BYTES:
        raise RecordError(
            f"group {group.index}: {num_bytes:,} bytes encoded, at most {MAX_ENTRY_BYTES:,} {NO_ROOM}; lower "
            "group_size or sampling.max_tokens"
        )


def origin_in(payload: bytes) -> GroupOrigin | None:
    """Returns the samplers that a payload names, whatever else it holds; None if it names none, more than `MAX_ITEMS`,
    or one that is empty or longer than `MAX_REASON_CHARACTERS`. Bounded like `decode_group`."""
    if len(payload) > MAX_ENTRY_BYTES:
        return None
    try:
        origin = _origin_decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    names = (origin.producer_id, *origin.sampled_by)
    are_names = len(names) <= MAX_ITEMS and all(0 < len(name) <= MAX_REASON_CHARACTERS for name in names)
    return origin if are_names else None


def _check_structure(group: RolloutGroup, dead: bool) -> None:
    if not 1 <= group.schema_version <= SCHEMA_VERSION:
        raise RecordError(f"schema_version: {group.schema_version}, this reader knows 1 to {SCHEMA_VERSION}")
    if group.index < (0 if group.evaluation_id is not None else 1):
        raise RecordError(f"index: {group.index}, expected 1 or more")
    files = group.images or {}
    if missing := next((part.digest for part in group.prompt.images if part.digest not in files), ""):
        raise RecordError(
            f"group {group.index}: prompt: no image of the digest {missing[:64]!a}, expected its bytes in images"
        )
    if not group.rollouts and not dead:
        raise RecordError(f"group {group.index}: rollouts is empty, expected at least one")
    for r, rollout in enumerate(group.rollouts):
        where = f"group {group.index}: rollouts[{r}]"
        reward = rollout.reward.value
        if not (dead or -MAX_REWARD <= reward <= MAX_REWARD):
            raise RecordError(f"{where}.reward.value: {reward}, expected a finite number of at most {MAX_REWARD:g}")
        if not rollout.segments:
            raise RecordError(f"{where}.segments is empty, expected at least one")
        for s, segment in enumerate(rollout.segments):
            _check_segment(segment, f"{where}.segments[{s}]", files)


def check_part_names(names: Collection[str], field: str) -> None:
    """Checks the names of a reward's parts, held by `field`.

    Raises:
        ValueError: too many names, or one that is empty, too long or not printable.
    """
    if len(names) > MAX_PARTS:
        raise ValueError(f"{field} has {len(names):,} names, expected at most {MAX_PARTS}")
    for name in names:
        if not (0 < len(name) <= MAX_PART_CHARACTERS and name.isprintable()):
            raise ValueError(
                f"{field} has the name {name[:MAX_PART_CHARACTERS]!a} of {len(name):,} characters, expected 1 to "
                f"{MAX_PART_CHARACTERS} printable ones"
            )


def _check_context(group: RolloutGroup, dead: bool) -> None:
    """Checks the fields of the group other than its rollouts."""
    where, prompt = f"group {group.index}", group.prompt
    sampling = group.sampling
    for name, is_valid, expected in (
        ("temperature", 0 <= sampling.temperature < math.inf, "a finite number, 0 or more"),
        ("top_p", 0 <= sampling.top_p <= 1, "0 to 1"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "a finite number"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, "a finite number above 0"),
    ):
        if not is_valid:
            raise RecordError(f"{where}: sampling.{name}: {getattr(sampling, name)}, expected {expected}")
    for name in group.timings.__struct_fields__:
        seconds = getattr(group.timings, name)
        if seconds is not msgspec.UNSET and not math.isfinite(seconds):
            raise RecordError(f"{where}: timings.{name}: {seconds}, expected a finite number")
    tables: dict[str, Sized] = {
        "prompt.messages": prompt.messages or (),
        "prompt.metadata": prompt.metadata,
        "fingerprint.other": group.fingerprint.other,
        "sampling.stop_token_ids": group.sampling.stop_token_ids,
    }
    for r, rollout in enumerate(group.rollouts):
        tables[f"rollouts[{r}].reward.parts"] = rollout.reward.parts
        for name, value in rollout.reward.parts.items():
            if not (dead or math.isfinite(value)):
                raise RecordError(f"{where}: rollouts[{r}].reward.parts[{name!r}]: {value}, expected a finite number")
    for name, table in tables.items():
        if len(table) > MAX_ITEMS:
            raise RecordError(f"{where}: {name}: {len(table):,} entries, expected at most {MAX_ITEMS:,}")


def _check_segment(segment: Segment, where: str, images: Mapping[str, bytes]) -> None:
    ids_bytes, logprobs_bytes = len(segment.token_ids), len(segment.behavior_logprobs)
    if ids_bytes % 4:
        raise RecordError(f"{where}.token_ids: {ids_bytes} bytes, expected a multiple of 4")
    if logprobs_bytes % 4:
        raise RecordError(f"{where}.behavior_logprobs: {logprobs_bytes} bytes, expected a multiple of 4")
    num_tokens, num_sampled = ids_bytes // 4, logprobs_bytes // 4
    sampled = _merge(segment.loss_mask, num_tokens, where, "loss_mask")
    covered = 0
    for start, end in sampled:
        covered += end - start
    if covered != num_sampled:
        raise RecordError(
            f"{where}: loss_mask covers {covered} tokens but behavior_logprobs holds {num_sampled}; "
            "expected equal lengths"
        )
    spans = [(span.start, span.end) for span in segment.version_spans]
    if _merge(spans, num_tokens, where, "version_spans") != sampled:
        raise RecordError(f"{where}: version_spans {tuple(spans)} do not tile loss_mask {segment.loss_mask}")
    for span in segment.version_spans:
        if span.version < -1:
            raise RecordError(f"{where}.version_spans: version {span.version}, expected -1 (unknown) or more")
    if segment.sampling_mask is not None and len(segment.sampling_mask) != num_sampled:
        raise RecordError(
            f"{where}.sampling_mask: {len(segment.sampling_mask)} entries for {num_sampled} sampled tokens"
        )
    teacher = segment.teacher_logprobs
    if teacher is not msgspec.UNSET and len(teacher) != logprobs_bytes:
        raise RecordError(
            f"{where}.teacher_logprobs: {len(teacher)} bytes for {num_sampled} sampled tokens, expected "
            f"{logprobs_bytes}"
        )
    if segment.routes is not msgspec.UNSET and (problem := segment.routes.problem(num_tokens - 1)):
        raise RecordError(f"{where}.routes: {problem}")
    if segment.top_logprobs is not msgspec.UNSET and (problem := segment.top_logprobs.problem(num_sampled)):
        raise RecordError(f"{where}.top_logprobs: {problem}")
    if segment.images and (problem := problem_of_places(segment.images, num_tokens, segment.loss_mask, images)):
        raise RecordError(f"{where}.images: {problem}")


def _check_values(segment: Segment, where: str) -> None:
    # The highest bytes show at the speed of a copy that all values are valid; otherwise numbers are checked one by one.
    if not segment.token_ids[3::4].isascii():
        raise RecordError(f"{where}.token_ids: {min(unpack_ids(segment.token_ids))}, expected 0 or more")
    if segment.sampling_mask is not None:
        ids = unpack_ids(segment.token_ids)
        _check_sampling_mask(segment.sampling_mask, ids, segment.loss_mask, where)
    top = segment.top_logprobs or None
    if top is not None and not top.ids[3::4].isascii():
        raise RecordError(f"{where}.top_logprobs: id {min(unpack_ids(top.ids))}, expected 0 or more")
    for name, packed in {
        "behavior_logprobs": segment.behavior_logprobs,
        "teacher_logprobs": segment.teacher_logprobs or b"",
        "top_logprobs": b"" if top is None else top.logprobs,
    }.items():
        if not packed[3::4].translate(None, _ORDINARY_HIGH_BYTES):
            continue
        logprobs = unpack_floats(packed)
        # The sum of float32 values in a Python float is finite exactly if every term is: one loop in C.
        if not math.isfinite(sum(logprobs)):
            raise RecordError(f"{where}.{name} holds a value that is not finite")
        if max(logprobs) > 1e-3:
            raise RecordError(f"{where}.{name}: {max(logprobs)}, expected at most 0")


def _check_sampling_mask(
    kept: tuple[bytes, ...], ids: "array[int]", runs: Sequence[tuple[int, int]], where: str
) -> None:
    """Checks that the sampler kept each sampled token's id."""
    positions = (position for start, end in runs for position in range(start, end))
    for n, (position, entry) in enumerate(zip(positions, kept, strict=True)):
        if len(entry) % 4:
            raise RecordError(f"{where}.sampling_mask[{n}]: {len(entry)} bytes, expected a multiple of 4")
        choices = unpack_ids(entry)
        if ids[position] not in choices:
            raise RecordError(
                f"{where}.sampling_mask[{n}]: {len(choices)} ids without the sampled token {ids[position]}, "
                "expected it among them"
            )
        if min(choices) < 0:
            raise RecordError(f"{where}.sampling_mask[{n}]: id {min(choices)}, expected 0 or more")


def _merge(runs: Sequence[tuple[int, int]], num_tokens: int, where: str, name: str) -> list[tuple[int, int]]:
    """Merges adjacent runs; raises RecordError unless they ascend, are disjoint and lie in [0, num_tokens)."""
    merged: list[tuple[int, int]] = []
    first = previous_end = 0
    for start, end in runs:
        if not previous_end <= start < end <= num_tokens:
            raise RecordError(
                f"{where}.{name}: run ({start}, {end}), expected {previous_end} <= start < end <= {num_tokens}"
            )
        if start != previous_end:
            if previous_end:
                merged.append((first, previous_end))
            first = start
        previous_end = end
    if previous_end:
        merged.append((first, previous_end))
    return merged
