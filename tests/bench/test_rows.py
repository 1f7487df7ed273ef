"""Every row that runs here makes its figures, at its quick sizes; what decides a figure besides arithmetic is tested on
its own."""

import math
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import redis
import torch

from bench import __main__ as command
from bench.gpu.section import passed_figure
from bench.gpu.trim import trim
from bench.pipeline.bare import tokens_between
from bench.pipeline.modes import ModeRun, checkpoint_figure, groups_per_s, time_figure, trainer_parts
from bench.pipeline.saving import StepClock
from bench.pipeline.streaming import Window, streaming_figures
from bench.result import BenchError, Result
from bench.section import measure_apart, wait_for
from bench.trainer.peer import long_answer_figures, updates_of
from bench.trainer.peer_job import PeerUpdates, TrlUpdates
from bench.trainer.real import Point, RealRun, of_trl, real_figures
from bench.weights.section import most_at_once
from penstock.deploy.launch.child import Child

HERE = {
    ("stream", "rates"): 6,
    ("head", "time"): 2,
    ("weights", "changed"): 2,
    ("trainer", "images"): 4,
    ("gpu", "weights"): 2,
}
"""Rows without an engine, and the number of their figures: one for each section, the others with `--exhaustive`."""
OTHERS = {
    ("stream", "records"): 4,
    ("head", "memory"): 2,
    ("weights", "blocked"): 2,
    ("weights", "way"): 3,
    ("weights", "late"): 1,
    ("trainer", "ranks"): 2,
    ("gpu", "head"): 2,
    ("gpu", "trainer"): 2,
}
WITH_AN_ENGINE = {
    ("pipeline", "streaming"): 8,
    ("pipeline", "saving"): 1,
    ("pipeline", "modes"): 3,
    ("weights", "pause"): 1,
    ("endpoint", "gateway"): 4,
    ("gpu", "pause"): 1,
}


def take(section: str, row: str, folder: Path) -> Result:
    assert command.main([section, "--only", row, "--quick", "--output", str(folder)]) == 0
    (file,) = folder.glob("*.json")
    return msgspec.json.decode(file.read_bytes(), type=Result)


def check(result: Result, num_figures: int) -> None:
    assert len(result.figures) == num_figures, [figure.name for figure in result.figures]
    for figure in result.figures:
        assert figure.measured is not None and math.isfinite(figure.measured), figure.name


@pytest.mark.parametrize(
    ("section", "row", "num_figures"),
    [
        *(pytest.param(*row, number) for row, number in HERE.items()),
        *(pytest.param(*row, number, marks=pytest.mark.exhaustive) for row, number in OTHERS.items()),
    ],
)
def test_rows_without_an_engine_make_their_figures(section, row, num_figures, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    check(take(section, row, tmp_path), num_figures)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.parametrize(("section", "row"), WITH_AN_ENGINE)
def test_rows_with_an_engine_make_their_figures(section, row, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    result = take(section, row, tmp_path)
    assert len(result.figures) == WITH_AN_ENGINE[section, row]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_rows_say_so_and_the_check_does_not_miss_a_goal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "WORK", tmp_path)
    assert command.main(["gpu", "--only", "head", "--check", "--output", str(tmp_path)]) == 0
    assert "torch finds no CUDA device" in capsys.readouterr().out
    assert command.short_name("NVIDIA H100 80GB HBM3, 86 GB, driver 580.65") == "h100-80gb-hbm3"


def test_rows_choose_their_sections():
    assert command.choose_rows([], ["time", "records"]) == {"stream": ("records",), "head": ("time",)}
    assert set(command.choose_rows([], [])) == set(command.SECTIONS) - {"gpu"}
    assert command.choose_rows(["gpu"], ["head"]) == {"gpu": ("head",)}
    with pytest.raises(command.ConfigError, match="--only records: no row of head; expected one of memory"):
        command.choose_rows(["head"], ["records"])
    with pytest.raises(command.ConfigError, match="heads: no section; expected pipeline, weights, stream, head"):
        command.choose_rows(["heads"], [])
    assert command.main(["--only", "nonsense"]) == 2


def test_a_server_that_is_lost_is_one_line_and_its_logs_are_kept(tmp_path, monkeypatch, capsys):
    def fail(bench):
        raise redis.ConnectionError("connection refused")

    monkeypatch.setitem(command.SECTIONS["stream"].rows, "rates", fail)
    monkeypatch.setattr(command, "WORK", tmp_path)
    assert command.main(["stream", "--only", "rates"]) == 1
    (folder,) = tmp_path.iterdir()
    assert capsys.readouterr().err == f"bench: logs of what failed are in {folder}\nbench: rates: connection refused\n"


def test_a_process_that_dies_is_named_with_the_end_of_its_log_and_ends_the_others(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(BenchError, match=r"head ended with status 3; its log ends:\nno torch here"):
        measure_apart("head", "bench.head.part", {}, dict, tmp_path, python=str(python))
    commands = {"sleeps": "import time; time.sleep(600)", "dies": "raise SystemExit(4)"}
    children = [Child(name, [sys.executable, "-c", code], log=tmp_path / name) for name, code in commands.items()]
    with pytest.raises(BenchError, match="dies ended with status 4"):
        wait_for(children)
    assert all(child.poll() is not None for child in children)


def test_tokens_count_in_the_window_by_the_share_of_their_requests_life_in_it():
    requests = [(0.0, 10.0, 100), (4.0, 6.0, 50), (9.0, 11.0, 40), (20.0, 30.0, 7)]
    assert tokens_between(requests, 5.0, 10.0) == pytest.approx(50 + 25 + 20)


def test_a_streaming_window_is_compared_with_the_bare_ones_around_it():
    bare = [Window(tokens_per_s=value) for value in (100.0, 200.0, 100.0)]
    windows = [Window(tokens_per_s=value, paused_share=0.1, pauses_s=[0.2]) for value in (150.0, 75.0)]
    rate, paused = streaming_figures("load", windows, bare, True)
    assert rate.details["ratio_by_round"] == [1.0, 0.5] and rate.details["num_updates"] == 2
    assert rate.goal is not None and paused.measured == pytest.approx(10.0)


def mode_run(*, times, evaluations=(), wall_s=100.0, checkpoints_s=()):
    updates = [SimpleNamespace(time_s=time_s, wait_s=0.5, publish_s=0.25, num_tokens_trained=10) for time_s in times]
    points = [SimpleNamespace(update=n, reward=reward) for n, reward in evaluations]
    telemetry = SimpleNamespace(updates=updates, evaluations=points)
    reached = next((float(n) for n, reward in evaluations if reward >= 0.9), None)
    phases = [{"forward": 1.0, "backward": 2.0}] * len(updates)
    return ModeRun(
        telemetry=telemetry,
        phases_s=phases,
        checkpoints_s=list(checkpoints_s),
        time_to_accuracy_s=reached,
        wall_s=wall_s,
    )


def test_the_rate_of_a_run_leaves_out_its_first_updates_and_a_cut_off_run_counts_with_its_time():
    config = SimpleNamespace(groups_per_batch=32, checkpoint=SimpleNamespace(every=100))
    run = mode_run(times=[0, 50, 60, 70, 100, 102, 104, 106], evaluations=[(10, 0.5), (20, 0.95)], checkpoints_s=[0.1])
    assert groups_per_s(run, config) == pytest.approx(3 * 32 / 6)
    assert trainer_parts(run)["backward"] == 2.0
    assert checkpoint_figure(run, config).ratio == pytest.approx(0.1 / (100 * 2))
    with pytest.raises(BenchError, match="5 updates in the time given, expected more than 5"):
        groups_per_s(mode_run(times=range(5)), config)
    figure = time_figure(run, mode_run(times=[1.0], evaluations=[(10, 0.2)], wall_s=40.0))
    assert (figure.measured, figure.reference, figure.reached) == (20.0, 40.0, True)
    assert not figure.details["synchronous_reached_it"]


def test_trl_is_compared_by_tokens_and_its_absence_is_no_missed_goal():
    run = mode_run(times=[0, 1, 3, 5])
    ours = updates_of(run, 2)
    assert (ours.seconds, ours.tokens) == ([2, 2], [10, 10])
    theirs = TrlUpdates(name="TRL", seconds=[4.0], tokens=[5], phases_s={}, packages={}, curve=[(1.0, 0.5), (2.0, 0.9)],
                        processor_s=[7.0])  # fmt: skip
    rate, seconds = long_answer_figures(ours, theirs)
    assert rate.ratio == pytest.approx(5 / 1.25) and rate.reached is False and seconds.ratio == pytest.approx(0.5)
    assert theirs.seconds_to(0.9) == 2.0 and theirs.seconds_to(0.99) is None
    rate, _ = long_answer_figures(PeerUpdates(name="", seconds=[1.0], tokens=[1], phases_s={}), "not installed")
    assert rate.reached is None and rate.details["trl"] == "not installed"


def test_a_real_model_is_compared_by_the_medians_of_its_seeds_and_a_goal_missed_by_one_is_missed():
    def run(seed: int, seconds: float, reached_at: int) -> RealRun:
        points = [Point(n, seconds * n, 2 * seconds * n, 0.6 if n >= reached_at else 0.4) for n in (0, 5, 10, 15)]
        return RealRun(
            seed=seed, updates=15, seconds=seconds, processor_s=2 * seconds, tokens=seconds * 30, curve=points
        )

    ours, theirs = [run(1, 2.0, 5), run(2, 4.0, 10), run(3, 3.0, 5)], [run(1, 10.0, 10)]
    found = {figure.name: figure for figure in real_figures(ours, theirs)}
    assert found["SmolLM2-135M on chain_sum: processor seconds per update"].ratio == pytest.approx(6 / 20)
    updates = found["the same: updates to +0.15"]
    assert (updates.measured, updates.reference, updates.reached) == (5, 10, True)
    seconds = found["the same: seconds to +0.15"]
    assert (seconds.measured, seconds.reference, seconds.reached) == (15, 100, True)
    assert found["the same: seconds to +0.25"].measured is None
    late = [*ours[:2], run(3, 3.0, 20)]
    found = {figure.name: figure for figure in real_figures(late, theirs)}
    assert found["the same: updates to +0.15"].measured == 10, "one of three never reached it"
    (alone,) = real_figures(ours, [])
    assert "not measured" in alone.name
    trl = TrlUpdates(name="", seconds=[4.0] * 3, tokens=[5] * 3, phases_s={}, packages={}, processor_s=[7.0, 14, 22],
                     curve=[(0.0, 0.5), (8.0, 0.6), (12.0, 0.7)])  # fmt: skip
    assert of_trl(trl, 1, 2).curve == [Point(0, 0.0, 0.0, 0.5), Point(2, 8.0, 14.0, 0.6), Point(3, 12.0, 22.0, 0.7)]


async def test_the_clock_of_a_coroutine_counts_its_own_steps(monkeypatch):
    import asyncio

    now = [0.0]
    monkeypatch.setattr("bench.pipeline.saving.time", SimpleNamespace(thread_time=lambda: now[0]))

    async def work():
        now[0] += 1.0
        await asyncio.sleep(0)
        now[0] += 2.0
        return "done"

    async def other():
        now[0] += 100.0

    clock = StepClock(work())
    beside = asyncio.ensure_future(other())
    assert await clock == "done" and clock.cpu_s == 3.0
    await beside


def test_the_memory_of_several_processes_is_what_they_have_at_once():
    assert most_at_once([[(0.0, 10), (2.0, 1)], [(1.0, 5), (3.0, 12)]]) == 15


def test_passed_tests_are_counted_among_those_that_ran(tmp_path):
    file = tmp_path / "tests.xml"
    case = '<testcase classname="a" name="b"><failure/></testcase>'
    file.write_text(f'<r><testsuite tests="5" skipped="1" failures="1" errors="0">{case}</testsuite></r>')
    figure = passed_figure("tests", file)
    assert (figure.measured, figure.reference, figure.reached) == (3.0, 4.0, False)
    assert figure.details["failed"] == ["a::b"]
    file.write_text('<r><testsuite tests="2" skipped="2" failures="0" errors="0"/></r>')
    assert passed_figure("tests", file).details["reason"] == "2 tests skipped, none ran"


def test_a_trimmed_wheel_lacks_the_kernels_in_files_and_list(tmp_path):
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    kernel = "vllm/_moe_C_stable_libtorch.abi3.so"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr(kernel, "kernels")
        archive.writestr("vllm-1.dist-info/RECORD", f"vllm/__init__.py,,\n{kernel},,\n")
    trim(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == ["vllm/__init__.py", "vllm-1.dist-info/RECORD"]
        assert archive.read("vllm-1.dist-info/RECORD") == b"vllm/__init__.py,,\n"
