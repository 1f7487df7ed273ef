"""Writes a run's folder with a record that is known token by token, and with untrusted text in every field."""

from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import wire_examples
from penstock.consumers.observe.record_files import RecordFiles
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.prompt import Message, Prompt, Reward
from penstock.schemas.record import (
    FOLDER,
    BatchHead,
    GroupEntry,
    Outcome,
    RecordedGroup,
    SegmentFindings,
    encode_batch,
    group_entry,
)
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment, VersionSpan, encode_group, pack_floats, pack_ids
from recorded_batches import header

NAME = "inspected"
EOS = 256
NUM_PLAIN = 70
"""Groups 1 to 70, in batches of 7: more than one page of 50."""
PER_BATCH = 7
KNOWN, TURNS, SKIPPED, DEAD, HOSTILE = 101, 102, 103, 104, 105
"""The indexes of the last batch's groups."""
KNOWN_KEY, TURNS_KEY, HOSTILE_KEY = "0-10-0", "0-10-1", "0-10-4"
MARK = "pénstock"
SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover=alert(3) '"
BIDI = "a\u202eevil\u2066b\x1b[31mred\x00nul\u200bzero"
HOSTILE_TEXT = SCRIPT + BIDI + SCRIPT
"""Scripts, attributes, bidi controls, ANSI, NUL and a character without width."""


def byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose token ids are the bytes of UTF-8, followed by `<eos>`, and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    others = iter(range(0x100, 0x200))
    shown = [chr(b if chr(b).isprintable() and b != 0x20 else next(others)) for b in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(shown)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def segment(
    context: str, answer: str, versions: list[int], logprobs: list[float], finish_reason: str = "stop"
) -> Segment:
    """Returns a segment. versions, logprobs: one per byte of the answer."""
    first, last = len(context.encode()), len(context.encode()) + len(answer.encode())
    return Segment(
        token_ids=pack_ids([*context.encode(), *answer.encode()]),
        behavior_logprobs=pack_floats(logprobs),
        loss_mask=((first, last),),
        version_spans=tuple(VersionSpan(version, first + n, first + n + 1) for n, version in enumerate(versions)),
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


def plain(index: int) -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    """Returns two siblings of two tokens. Reward, lag, ESS, producer and version depend on the index."""
    version, lag = 20 + index % 5, index % 4
    rollouts = tuple(
        Rollout(
            segments=(segment(f"{index}+{index}=", answer, [version] * 2, [-0.5, -0.25]),),
            reward=Reward(value=reward, parts={"exact": reward}),
        )
        for answer, reward in (("ok", index / 100), ("no", 0.0))
    )
    findings = ((scored([lag, lag], [-0.5, -0.25], [1.0, 1.0], b"\1\1"),),) * 2
    group = group_of(index, rollouts, Prompt(text=f"{index}+{index}=", answer=str(2 * index)), f"producer-{index % 2}")
    return group, findings, entry_of(group, "trained", lags=(lag, lag), ess_fraction=1 - index / 200, max_weight=1.0)


def known() -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    """Returns two siblings. The first has six tokens of lags 5, 4, 3, 2, 1, 0 and versions 15 to 20, with gaps, weights
    and masks of every colour; the second answers in characters of two bytes."""
    lags, versions = [5, 4, 3, 2, 1, 0], [15, 16, 17, 18, 19, 20]
    gaps, weights = [-2.0, -0.5, -0.05, 0.0, 0.05, 1.5], [0.0, 0.6, 0.95, 1.0, 1.05, 3.0]
    first = segment("2+2=", "abcdef", versions, [-2.0] * 6)
    second = segment("2+2=", "éé", [20] * 4, [-1.0] * 4, "length")
    findings = (
        (scored(lags, [-2.0 + gap for gap in gaps], weights, b"\0\1\1\1\1\1"),),
        (scored([0] * 4, [-1.0] * 4, [1.0] * 4, b"\1" * 4),),
    )
    rollouts = (
        Rollout(segments=(first,), reward=Reward(value=1.0, parts={"exact": 1.0, "digits": 0.5})),
        Rollout(segments=(second,), reward=Reward(value=0.25)),
    )
    prompt = Prompt(text="2+2=", answer="4", metadata={"width": "1"})
    group = group_of(KNOWN, rollouts, prompt, "producer-0")
    return group, findings, entry_of(group, "trained", lags=(0, 5), ess_fraction=0.25, max_weight=3.0, num_masked=1)


def turns() -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    """Returns one rollout of two segments, of which only the first was scored."""
    segments = (
        segment("ask", "tool", [20] * 4, [-1.0] * 4),
        segment("ask tool result ", "end", [-1, 20, 20], [-1.0] * 3),
    )
    findings = ((scored([0] * 4, [-1.0] * 4, [1.0] * 4, b"\1" * 4), SegmentFindings((9, 0, 0))),)
    prompt = Prompt(messages=(Message(role="user", content="ask"),))
    group = group_of(TURNS, (Rollout(segments=segments, reward=Reward(value=0.5)),), prompt, "producer-1")
    group = msgspec.structs.replace(group, environment="tools", task=3)
    return group, findings, entry_of(group, "trained", lags=(0, 9), ess_fraction=1.0, max_weight=1.0, num_masked=3)


def skipped() -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    rollouts = (Rollout(segments=(segment("1+1=", "2", [20], [-0.125]),), reward=Reward(value=1.0)),) * 2
    group = group_of(SKIPPED, rollouts, Prompt(text="1+1="), "producer-0")
    return group, ((SegmentFindings((0,)),),) * 2, entry_of(group, "skipped", lags=(0, 0))


def dead() -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    group, findings, entry = skipped()
    group = msgspec.structs.replace(group, index=DEAD)
    return group, findings, msgspec.structs.replace(entry, index=DEAD, outcome="dead", reason="poison: <b>x</b>")


def hostile() -> tuple[RolloutGroup, tuple[tuple[SegmentFindings, ...], ...], GroupEntry]:
    """Returns a group with untrusted text in prompt, answer, metadata, tokens, reward parts, producer and
    fingerprint."""
    size = len(HOSTILE_TEXT.encode())
    rollout = Rollout(
        segments=(segment(HOSTILE_TEXT, HOSTILE_TEXT, [20] * size, [-0.5] * size),),
        reward=Reward(value=0.5, parts={HOSTILE_TEXT: 1.0}),
    )
    prompt = Prompt(text=HOSTILE_TEXT, answer=HOSTILE_TEXT, metadata={HOSTILE_TEXT: HOSTILE_TEXT + MARK})
    group = group_of(HOSTILE, (rollout,), prompt, HOSTILE_TEXT)
    group = msgspec.structs.replace(
        group, fingerprint=msgspec.structs.replace(group.fingerprint, other={HOSTILE_TEXT: HOSTILE_TEXT})
    )
    return group, ((SegmentFindings((0,) * size),),), entry_of(group, "skipped", lags=(0, 0))


def scored(lags: list[int], proximal: list[float], weights: list[float], kept: bytes) -> SegmentFindings:
    return SegmentFindings(tuple(lags), pack_floats(proximal), pack_floats(weights), kept)


def group_of(index: int, rollouts: tuple[Rollout, ...], prompt: Prompt, producer_id: str) -> RolloutGroup:
    group = wire_examples.group(index)
    return msgspec.structs.replace(group, prompt=prompt, rollouts=rollouts, producer_id=producer_id)


def entry_of(group: RolloutGroup, outcome: Outcome, *, lags: tuple[int, int], **scores: float) -> GroupEntry:
    rewards = [rollout.reward.value for rollout in group.rollouts]
    advantages = tuple(reward - sum(rewards) / len(rewards) for reward in rewards)
    fields = {"num_masked": 0} | scores if scores else {}
    entry = group_entry(group, (), outcome, advantages=advantages, **fields)
    return msgspec.structs.replace(entry, min_lag=lags[0], max_lag=lags[1])


def write_batch(files: RecordFiles, position: int, groups: list) -> None:
    head = BatchHead(
        position=position,
        update=position + 1,
        policy_version=20,
        counts=True,
        time_s=10.0,
        metrics={"loss": 0.5},
        groups=tuple(entry for _, _, entry in groups),
    )
    files.append(encode_batch(head, [RecordedGroup(encode_group(group), found) for group, found, _ in groups]))


def settings(runs: Path) -> RunConfig:
    byte_tokenizer(runs / "model")
    return RunConfig(
        name=NAME,
        num_updates=11,
        model=ModelConfig(path=str(runs / "model")),
        environment=EnvironmentConfig(path="none:None"),
    )


def trainer_files(runs: Path, epoch: int = 0, line: dict[int, int] | None = None) -> RecordFiles:
    """Opens the record files of a trainer that begins now."""
    begun = msgspec.structs.replace(header(epoch, line), run=NAME)
    return RecordFiles(runs / NAME / FOLDER, begun, max_mb=20, file_mb=10)


def inspected_run(runs: Path, *, close: bool = True) -> RecordFiles:
    """Writes the run's folder `runs / NAME`."""
    save_run_file(settings(runs), runs / NAME)
    files = trainer_files(runs)
    for position in range(NUM_PLAIN // PER_BATCH):
        write_batch(files, position, [plain(PER_BATCH * position + n + 1) for n in range(PER_BATCH)])
    write_batch(files, NUM_PLAIN // PER_BATCH, [known(), turns(), skipped(), dead(), hostile()])
    if close:
        files.close()
    return files
