"""The stream section runs, moves what it says it moves, and sets each figure beside a reference and a goal."""

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bench.__main__ import RUN_FILE
from bench.pipeline.modes import FIRST_UPDATE, ModeRun
from bench.result import BenchError, compare_rounds, in_turns
from bench.section import Bench, measure
from bench.stream.ends import ProducerEnd, TrainerEnd, fill, group_of, release_prompts
from bench.stream.load import GROUPS_IN_FLIGHT, Append, LoadProcess, Produce, group_maker
from bench.stream.measuring import QUICK_STREAM
from bench.stream.peer import PeerReader, PeerWriter, texts_of
from bench.stream.rates import KEYS
from bench.stream.reliability import VARIANTS, ReliabilityVariant, reliability_figures
from bench.stream.section import STREAM
from mode_runs import mode_run
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Field
from penstock.schemas.rollout import decode_group, encode_group

TINY = msgspec.structs.replace(QUICK_STREAM, rounds=1, payload_mb=0.5, peer_groups=8)
GOALS = {
    "encode": ["≤ 5"],
    "xadd": ["≥ 0.4", "≥ 0.6"],
    "read": ["≥ 0.5"] * 3,
    "peers": ["≥ 5", "≥ 2.5"],
    "producers": ["≥ 0.9"],
    "memory": ["≤ 1.3"],
}
"""The bounds that the contract sets for each row."""
needs_benchmark = pytest.mark.skipif(
    not (shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")), reason="no redis-benchmark"
)


@pytest.mark.redis
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=needs_benchmark if row in ("xadd", "read") else ())
        for row in STREAM.rows
        if row != "reliability"
    ],
)
def test_each_row_sets_its_figures_beside_a_reference_and_its_goals(row: str, tmp_path: Path):
    result = measure(STREAM, [row], TINY, RUN_FILE, tmp_path)
    assert [str(figure.goal) for figure in result.figures if figure.goal is not None] == GOALS[row]
    for figure in result.figures:
        assert figure.reference_is and figure.measured and figure.reference and figure.ratio, figure
        assert (figure.reached is None) == (figure.goal is None)
    assert not list(tmp_path.iterdir())


def test_measures_take_turns_and_ratios_are_taken_round_by_round():
    order: list[str] = []
    values = iter([10.0, 20.0, 40.0, 10.0, 30.0, 10.0])

    def measure(name: str) -> float:
        order.append(name)
        return next(values)

    found = in_turns(3, {"ours": lambda: measure("ours"), "reference": lambda: measure("reference")})
    assert order == ["ours", "reference", "reference", "ours", "ours", "reference"]
    assert found == {"ours": [10.0, 10.0, 30.0], "reference": [20.0, 40.0, 10.0]}
    figure = compare_rounds("rate", found["ours"], found["reference"], reference_is="the other")
    assert (figure.measured, figure.reference, figure.ratio) == (10.0, 20.0, 0.5)
    assert figure.details["ratio_by_round"] == [0.5, 0.25, 3.0]


@pytest.mark.parametrize("kilobytes", [16, 64, 256])
def test_a_group_of_a_size_has_that_size(kilobytes):
    assert len(encode_group(group_of(kilobytes * 1024))) == pytest.approx(kilobytes * 1024, rel=0.01)


@pytest.mark.redis
async def test_the_writer_leaves_every_group_on_the_stream_and_no_prompt(redis_url, redis_client):
    release_prompts(redis_client, KEYS, 20)
    end = ProducerEnd(redis_url, KEYS, "a", 20)
    await end.claim(20)
    end.put(group_of(4096))
    assert redis_client.xlen(KEYS.rollouts) == 0
    began, ended = await end.append()
    await end.close()
    assert ended > began
    entries = redis_client.xrange(KEYS.rollouts)
    assert [int(fields[Field.INDEX]) for _, fields in entries] == list(range(1, 21))
    assert redis_client.xlen(KEYS.prompts) == 0


@pytest.mark.redis
@pytest.mark.parametrize("decodes", [True, False])
def test_the_reader_reads_everything_and_its_commit_trims_it(decodes, redis_url, redis_client):
    total = fill(redis_client, KEYS, group_of(4096), 70)
    assert total == sum(len(fields[Field.PAYLOAD]) for _, fields in redis_client.xrange(KEYS.rollouts))
    end = TrainerEnd(redis_url, KEYS, 70, decodes=decodes)
    while end.num_read < 70:
        assert end.read(block=False)
    assert end.acknowledge() == 70
    end.close()
    assert redis_client.xlen(KEYS.rollouts) == 0


@pytest.mark.redis
def test_a_refused_group_is_not_counted_as_read(redis_url, redis_client):
    fill(redis_client, KEYS, group_of(4096), 2)
    end = TrainerEnd(redis_url, KEYS, 1)
    with pytest.raises(RuntimeError, match="refuses"):
        end.read(block=False)
    end.close()


@pytest.mark.redis
def test_a_load_process_waits_until_it_is_told_and_does_its_job(tmp_path, redis_url, redis_client):
    process = LoadProcess("load-0", redis_url, tmp_path)
    try:
        release_prompts(redis_client, KEYS, 12)
        process.prepare(Append(run=KEYS.run, num_writers=3, groups_per_writer=4, burst=3, group_bytes=4096))
        assert redis_client.xlen(KEYS.rollouts) == 0
        process.go()
        began, ended = process.result()
        assert ended > began and redis_client.xlen(KEYS.rollouts) == 12
        redis_client.delete(KEYS.rollouts, KEYS.prompts)
        num_groups = GROUPS_IN_FLIGHT + 3
        release_prompts(redis_client, KEYS, num_groups)
        process.prepare(Produce(run=KEYS.run, num_groups=num_groups, completion_tokens=16, form="lists"))
        process.go()
        process.result()
        indexes = [decode_group(fields[Field.PAYLOAD]).index for _, fields in redis_client.xrange(KEYS.rollouts)]
        assert sorted(indexes) == list(range(1, num_groups + 1))
    finally:
        process.end()


@pytest.mark.redis
def test_a_load_process_that_dies_is_named_with_its_log(tmp_path, redis_url, redis_client):
    process = LoadProcess("load-0", redis_url, tmp_path)
    try:
        redis_client.rpush("bench:load-0:job", b"no job")
        with pytest.raises(BenchError, match=r"(?s)load-0 ended with status 1; its log ends:.*DecodeError"):
            process.prepare(Append(run=KEYS.run, num_writers=1, groups_per_writer=1, burst=1, group_bytes=4096))
    finally:
        process.end()


def test_groups_are_packed_alike_from_lists_and_arrays():
    group = group_of(8192)
    for form in ("lists", "arrays"):
        made = group_maker(group, form)(7)
        assert encode_group(made) == encode_group(msgspec.structs.replace(group, index=7))


@pytest.mark.redis
@pytest.mark.parametrize("form", ["lists", "arrays"])
def test_the_peer_reads_what_it_wrote_in_order(form, redis_client):
    group = group_of(8192)
    texts = texts_of(group, form)
    assert [len(text["input_ids"]) for text in texts] == [rollout.segments[0].num_tokens for rollout in group.rollouts]
    assert isinstance(texts[0]["logprobs"], list) == (form == "lists")
    writer, reader = PeerWriter(redis_client, "peer"), PeerReader(redis_client, "peer")
    writer.write(texts)
    writer.write(texts[1])
    assert pickle.dumps(reader.read()) == pickle.dumps(pickle.loads(pickle.dumps(texts)))
    assert reader.read()["metadata"] == texts[1]["metadata"]


def test_the_cost_of_reliability_is_taken_from_runs_in_turns(tmp_path, monkeypatch):
    order: list[str] = []
    has_file: list[str] = []
    seconds = {"reliable": 2.0, "no checkpoints": 1.0, "no checkpoints, no file": 0.5}

    @contextlib.contextmanager
    def server(folder: Path) -> Iterator[SimpleNamespace]:
        folder.mkdir()
        yield SimpleNamespace(url="", client=SimpleNamespace(config_set=lambda name, value: has_file.append(value)))

    def run(config: RunConfig, runs: Path, **_: object) -> ModeRun:
        variant = ReliabilityVariant(
            checkpoints=config.checkpoint.every != 10**9, append_only_file=has_file[-1] == "yes"
        )
        name = next(name for name, each in VARIANTS.items() if each == variant)
        order.append(name)
        logs = config.folder(runs) / "logs"
        logs.mkdir(parents=True)
        (logs / "trainer.log").write_text("x checkpoint c-1 at update 7: 0.25 s, 3 entries trimmed\nother\n")
        return mode_run(seconds[name], FIRST_UPDATE + 4)

    monkeypatch.setattr("bench.stream.reliability.redis_server", server)
    monkeypatch.setattr("bench.stream.reliability.run_file_model", lambda bench: None)
    monkeypatch.setattr("bench.stream.reliability.run_mode", run)
    setup = Bench(msgspec.structs.replace(QUICK_STREAM, reliability_rounds=2), RUN_FILE, tmp_path)
    without_checkpoints, without_either = reliability_figures(setup)
    assert order == [*VARIANTS, *reversed(VARIANTS)]
    assert without_checkpoints.ratio == pytest.approx(0.5) and without_either.ratio == pytest.approx(0.25)
    assert without_checkpoints.reached is False and without_checkpoints.goal.at_least == 0.97
    assert without_checkpoints.details["checkpoint_s"] == 0.25
