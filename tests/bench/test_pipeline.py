import asyncio
import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis.asyncio
import torch
from safetensors.torch import save_file

from bench.machine import children_cpu_s
from bench.pipeline.bare import tokens_between
from bench.pipeline.fill import SlowlyJudged, fill_figures, samples_to_accuracy
from bench.pipeline.kills import Kill, Killed, Spell, kill_figures
from bench.pipeline.modes import (
    FIRST_UPDATE,
    ModeRun,
    groups_per_s,
    producer_parts,
    rate_figure,
    time_figure,
    trainer_parts,
)
from bench.pipeline.pinned import KINDS, CpuSnapshot, classify
from bench.pipeline.records import make_group, record_figures
from bench.pipeline.saving import SocketClock
from bench.pipeline.section import streaming_figures
from bench.pipeline.streaming import Streamed, Window, summarize
from bench.result import (
    BenchError,
)
from mode_runs import mode_run as timed_run
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.deploy.report.telemetry import EvaluationPoint
from penstock.producers.stream.timed_steps import TimedSteps
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.rollout import decode_group, encode_group
from waiting import wait_for

ROOT = Path(__file__).parents[2]


def run_config(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(
        'name = "b"\n[model]\npath = "m"\n'
        '[environment]\npath = "penstock.producers.environments.arithmetic:Arithmetic"\n'
    )
    return load_config(file, overrides)


def mode_run(
    *, step_s: float, num_updates: int, time_to_accuracy_s: float | None = 5.0, wall_s: float = 9.0
) -> ModeRun:
    point = EvaluationPoint(policy_version=0, update=0, reward=0.4, num_prompts=8, time_s=100.0)
    return timed_run(
        step_s,
        num_updates,
        telemetry={"evaluations": (point,)},
        phases_s=[{"forward": 0.1, "backward": 0.12}] * num_updates,
        time_to_accuracy_s=time_to_accuracy_s,
        wall_s=wall_s,
    )


def test_a_rollout_of_4096_tokens_takes_at_most_8_1_bytes_per_completion_token():
    by_name = {figure.name: figure for figure in record_figures()}
    size = by_name["rollout bytes per completion token"]
    assert size.details["num_siblings"] == 8 and size.details["completion_tokens"] == 4096
    assert size.reached and size.measured < 8.1
    assert by_name["encoding a group"].ratio > 0


def test_the_benchmarks_group_is_a_group_that_readers_accept():
    group = make_group(prompt_tokens=3, completion_tokens=9)
    assert decode_group(encode_group(group)) == group


def test_a_requests_tokens_are_spread_over_its_life():
    requests = [(0.0, 10.0, 100), (8.0, 12.0, 40), (20.0, 21.0, 7)]
    assert tokens_between(requests, 5.0, 10.0) == pytest.approx(50 + 20)
    assert tokens_between(requests, 12.0, 20.0) == 0


def test_each_streaming_window_is_compared_with_the_bare_ones_around_it():
    bare = [Window(tokens_per_s=rate) for rate in (100.0, 200.0, 100.0)]
    windows = [
        Window(tokens_per_s=150.0, paused_share=0.1, num_updates=2, pause_s=0.02, groups_appended_per_s=5.0),
        Window(tokens_per_s=75.0, paused_share=0.3, num_updates=4, pause_s=0.04, groups_appended_per_s=7.0),
    ]
    found = summarize("long", 0.5, windows, bare)
    assert found.ratio_by_round == (1.0, 0.5) and found.ratio == 0.75
    assert found.paused_share == pytest.approx(0.2) and found.num_updates == 6 and found.groups_appended_per_s == 6.0


def test_streaming_has_its_goal_at_one_rate_of_updates_only():
    streamed = Streamed(
        load="long",
        updates_per_s=0.5,
        tokens_per_s=96.0,
        bare_tokens_per_s=100.0,
        ratio=0.98,
        ratio_by_round=(0.98,),
        paused_share=0.01,
        pause_s=0.02,
        groups_appended_per_s=1.0,
        num_updates=2,
    )
    tokens, paused = streaming_figures(streamed, goal_rate=0.5)
    assert tokens.reached and tokens.ratio == 0.98 and paused.measured == pytest.approx(1.0)
    assert next(streaming_figures(streamed, goal_rate=3.5)).reached is None


def test_groups_per_second_leave_out_the_first_updates(tmp_path):
    config = run_config(tmp_path, "groups_per_batch=4")
    slow, fast = mode_run(step_s=0.5, num_updates=25), mode_run(step_s=0.25, num_updates=25)
    assert groups_per_s(slow, config) == pytest.approx(8.0)
    found = rate_figure(fast, slow, config)
    assert found.ratio == pytest.approx(2.0) and found.reached and found.details["skipped_share"] == 0.25


def test_a_run_too_short_for_a_rate_is_an_error(tmp_path):
    with pytest.raises(
        BenchError, match=f"{FIRST_UPDATE} updates in the time given, expected more than {FIRST_UPDATE}"
    ):
        groups_per_s(mode_run(step_s=0.5, num_updates=FIRST_UPDATE), run_config(tmp_path))


def test_a_synchronous_run_that_never_got_there_counts_with_the_time_it_had():
    cut_off = mode_run(step_s=0.5, num_updates=8, time_to_accuracy_s=None, wall_s=20.0)
    found = time_figure(mode_run(step_s=0.5, num_updates=8), cut_off)
    assert found.reference == 20.0 and found.reached and not found.details["synchronous_reached_it"]
    assert not time_figure(cut_off, mode_run(step_s=0.5, num_updates=8)).reached


def learned(*rewards: float, passed: int = 0) -> ModeRun:
    """A run with an evaluation after each update. passed: groups skipped while each batch was filled."""
    time_s = 2.0 * len(rewards) if max(rewards) >= 0.9 else None
    run = mode_run(step_s=0.5, num_updates=len(rewards), time_to_accuracy_s=time_s)
    points = [
        EvaluationPoint(policy_version=n, update=n, reward=reward, num_prompts=8, time_s=100.0 + n)
        for n, reward in enumerate(rewards, 1)
    ]
    updates = [
        msgspec.structs.replace(update, metrics={"fill_skipped_groups": float(passed)})
        for update in run.telemetry.updates
    ]
    telemetry = msgspec.structs.replace(run.telemetry, evaluations=tuple(points), updates=tuple(updates))
    return msgspec.structs.replace(run, telemetry=telemetry)


def test_samples_to_the_accuracy_are_those_of_all_groups_taken_skipped_ones_too(tmp_path: Path):
    config = run_config(tmp_path, "group_size=8")
    assert samples_to_accuracy(learned(0.5, 0.89, 0.9, 0.95), config) == 3 * 4 * 8
    assert samples_to_accuracy(learned(0.5, 0.9, 0.9, passed=6), config) == 2 * 10 * 8
    assert samples_to_accuracy(learned(0.5, 0.6), config) is None


def test_ways_to_fill_a_batch_are_compared_by_their_median_seed(tmp_path: Path):
    config = run_config(tmp_path, "group_size=8")
    samples, seconds = fill_figures(
        "sums",
        config,
        [learned(0.9, passed=2), learned(0.1, 0.9, passed=2), learned(0.5, 0.5)],
        [learned(0.5, 0.5, 0.9), learned(0.9), learned(0.5, 0.9)],
    )
    assert samples.measured == 96 and samples.reference == 64 and samples.ratio == pytest.approx(1.5)
    assert samples.details["by_seed"]["with_variance"] == [48, 96, None]
    assert seconds.measured == 4.0 and seconds.details["num_updates"]["any"] == [3, 1, 2]


async def test_a_long_tail_s_reward_is_the_same_after_its_delay(monkeypatch: pytest.MonkeyPatch):
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr("asyncio.sleep", sleep)
    task = SlowlyJudged(seed=1)
    for index in [*range(1, 2001), 1]:
        assert (await task.reward(task.prompt(index), task.prompt(index).answer)).value == 1.0
    assert delays[0] == delays[-1]
    assert np.median(delays) == pytest.approx(0.2, rel=0.1) and np.quantile(delays, 0.99) > 2


def test_kills_are_compared_by_the_shares_lost_and_saving_by_its_share_of_the_processor():
    kills = {
        "with": [Kill(num_sampled=200, num_lost=2, arrival_s=3.0), Kill(num_sampled=100, num_lost=9, arrival_s=5.0)],
        "without": [Kill(num_sampled=200, num_lost=200, arrival_s=8.0)] * 2,
    }
    spells = [Spell(5.0, 8.0, 0.05, 0.01, 20.0, 1e6), Spell(5.0, 4.0, 0.02, 0.0, 20.0, 3e6)]
    lengths = {512: spells[1], 32_768: Spell(8.0, 1.0, 0.07, 0.02, 2.0, 16e6)}
    found = Killed(progress_s=0.25, num_rollouts=32, kills=kills, spells=spells, lengths=lengths)
    lost, arrival, sampling, short, long = kill_figures(found)
    assert lost.measured == pytest.approx(5.0) and lost.reference == 100.0 and lost.reached
    assert arrival.ratio == 0.5
    assert sampling.ratio == pytest.approx(0.08 / 12) and sampling.reached
    assert sampling.details["bytes_per_save"] == 1e5 and sampling.details["seconds_between_saves"] == 0.25
    assert short.ratio == pytest.approx(0.004) and short.reached
    assert long.ratio == pytest.approx(0.09 / 8) and not long.reached and long.details["bytes_per_s"] == 2e6


@pytest.mark.redis
async def test_sockets_are_timed_apart_from_the_steps_of_those_who_wait_for_them(redis_url, monkeypatch):
    """On a clock that only an answer's reading moves."""
    clock, reads = [0.0], []
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    sockets = SocketClock(asyncio.get_running_loop())
    feed = asyncio.StreamReader.feed_data

    def slowly(reader: asyncio.StreamReader, data: bytes) -> None:
        clock[0] += 1.0
        reads.append(data)
        feed(reader, data)

    monkeypatch.setattr(asyncio.StreamReader, "feed_data", slowly)
    client = redis.asyncio.Redis.from_url(redis_url)
    timed = TimedSteps(client.set("key", b"value"))
    assert await timed
    assert sockets.cpu_s == len(reads) > 0 and timed.cpu_s == 0.0
    await client.aclose()


def test_the_trainers_packing_is_what_its_step_takes_beyond_its_phases():
    parts = trainer_parts(mode_run(step_s=0.5, num_updates=8))
    assert parts["pack"] == pytest.approx(0.03)
    assert parts["forward"] == pytest.approx(0.1) and parts["wait for groups"] == pytest.approx(0.1)


def test_the_producers_own_time_is_shared_out_by_what_it_was_seen_doing():
    def snapshot(time_s: float, **samples: int) -> CpuSnapshot:
        return CpuSnapshot(time_s=time_s, num_looks=0, samples=samples, cpu_s=time_s / 2, children_cpu_s=time_s / 4)

    snapshots = [snapshot(0.0), snapshot(2.0, idle=5, encode=1), snapshot(10.0, idle=50, encode=4, Redis=4)]
    parts = producer_parts(snapshots, 2.0, 10.0)
    assert parts["engine process: scheduling and sampling"] == pytest.approx(2.0)
    assert parts["encode"] == pytest.approx(4.0 * 3 / 7) and parts["Redis"] == pytest.approx(4.0 * 4 / 7)
    assert "idle" not in parts


def test_a_thread_is_classified_by_its_innermost_frame_that_tells():
    seen = []

    class Awkward(list):
        def __iter__(self):
            seen.append(classify(inspect.currentframe()))
            return super().__iter__()

    group = make_group(prompt_tokens=3, completion_tokens=4)
    encode_group(msgspec.structs.replace(group, rollouts=Awkward(group.rollouts)))
    assert "encode" in seen
    assert classify(None) == "event loop"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_files_that_tell_what_a_thread_is_doing_are_there():
    own = [path for path, _ in KINDS if path.startswith(("/producers/", "/schemas/"))]
    assert len(own) == 5
    assert [path for path in own if not (ROOT / path[1:]).exists()] == []


def test_processor_time_of_children_is_counted_while_they_run():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert wait_for(children_cpu_s, lambda cpu_s: cpu_s >= 0.05) >= 0.05
    finally:
        child.kill()
        child.wait()


@pytest.mark.redis
def test_the_feeder_keeps_the_credit_open_and_announces_at_its_rate(tmp_path, redis_url, redis_client: redis.Redis):
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(4, 4)}, weights)
    config, keys = run_config(tmp_path, "groups_per_batch=4", "max_lag=1"), Keys("b")
    run_file = tmp_path / "resolved.toml"
    run_file.write_text(resolved_toml(config))
    command = [sys.executable, "-m", "bench.feeder", str(run_file), "--weights", str(weights)]
    feeder = Child("feeder", [*command, "--updates-per-s", "20"], log=tmp_path / "feeder.log",
                   environment={"REDIS_URL": redis_url})  # fmt: skip
    try:
        wait_for(
            lambda: int(redis_client.hget(keys.commit, Commit.VERSION) or 0) >= 3, process=feeder, log=feeder.last_lines
        )
        assert redis_client.xlen(keys.prompts) == config.credit == 8
        (entry_id, _), *_ = redis_client.xrange(keys.prompts)
        redis_client.xdel(keys.prompts, entry_id)
        wait_for(lambda: redis_client.xlen(keys.prompts) == 8, process=feeder, log=feeder.last_lines)
        (_, fields), *_ = redis_client.xrevrange(keys.policy, count=1)
        manifest = msgspec.json.decode(fields[b"manifest"], type=WeightManifest)
        assert manifest.version >= 3
        (tensor,), (chunk,) = manifest.tensors, manifest.chunks
        assert (tensor.name, tensor.dtype, tensor.shape) == ("w", "float32", (4, 4))
        assert len(redis_client.hget(keys.chunks, chunk.key)) == chunk.num_bytes
    finally:
        feeder.kill()
        while feeder.poll() is None:
            threading.Event().wait(0.01)
