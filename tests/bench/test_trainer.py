"""The trainer section: what its figures are made of, and that the plain loop trains what the learner trains."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from bench.groups import random_group
from bench.pipeline.modes import ModeRun
from bench.result import BenchError, Breakdown
from bench.section import wait_for
from bench.sizing import LARGE, MemoryCase, MemoryMeasured
from bench.trainer.part import AgainstPlain, OnRanks, Timed, Work, against_plain, on_ranks
from bench.trainer.peer import accuracy_figures, rate_figures
from bench.trainer.peer_job import CurvePoint, LongAnswers, PeerUpdates, TrlJob, TrlUpdates
from bench.trainer.section import (
    TrainerSettings,
    compiled_figure,
    memory_figures,
    plain_figure,
    ranks_figures,
    weights_figures,
)
from penstock.deploy.launch.child import Child
from penstock.deploy.report.telemetry import EvaluationPoint, RunTelemetry
from training_groups import tiny_model

WORK = Work(num_groups=2, group_size=4, prompt_tokens=3, sampled_tokens=5, tokens_per_pass=16)


def test_the_plain_loop_trains_what_the_learner_trains(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    found = against_plain(AgainstPlain(model=str(tmp_path), work=WORK, rounds=2, steps=1))
    assert found.weights_apart <= 1e-6
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {"learner": 2, "plain": 2}
    assert 0 < found.diagnostics_share < 1


def test_a_rank_times_its_steps_and_keeps_the_weights(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    job = OnRanks(model=str(tmp_path / "model"), work=WORK, num_ranks=1, steps=3, weights=str(tmp_path / "w.pt"))
    assert len(on_ranks(job)) == 3
    weights = torch.load(tmp_path / "w.pt")
    start = model.state_dict()
    assert all(tensor.shape == start[name].shape for name, tensor in weights.items())
    assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])


def test_a_round_of_the_learner_is_held_against_the_plain_loops_of_the_same_round() -> None:
    seconds = {"learner": [1.0, 10.0, 2.0], "plain": [0.98, 9.9, 1.0]}
    timed = Timed(seconds=seconds, wall_seconds=seconds, diagnostics_share=0.02, weights_apart=0.0)
    figure = plain_figure("a model", timed, 100)
    assert figure.ratio == pytest.approx(0.98) and figure.reached is True
    assert figure.measured == 50.0 and figure.details["diagnostics_share"] == 0.02


def test_compiled_blocks_are_held_against_the_learner_without() -> None:
    seconds = {"learner": [1.0, 2.0], "plain": [1.2, 2.4]}
    figure = compiled_figure(
        "a model", Timed(seconds=seconds, wall_seconds=seconds, diagnostics_share=0, weights_apart=0), 90
    )
    assert figure.ratio == pytest.approx(1.2) and figure.goal is None and figure.reached is None
    assert "compiled" in figure.name and "without trainer.compile" in figure.reference_is


def test_two_ranks_are_held_against_one_and_the_machine_against_two_of_one() -> None:
    settings = TrainerSettings()
    two, apart = ranks_figures({"one": [3.0, 4.0], "two": [2.0, 2.0], "apart": [4.0, 4.0]}, settings)
    assert two.ratio == pytest.approx(1.75) and two.reached is True
    assert two.measured == settings.work.num_tokens / 2.0
    assert apart.ratio == pytest.approx(1.75) and apart.goal is None


def test_memory_is_held_against_the_formula_and_loading_against_training() -> None:
    case = MemoryCase(LARGE, "float32", 1024, False, 4)
    peak, loading = memory_figures(MemoryMeasured(case, 1_900_000_000, 950_000_000))
    assert peak.reference == pytest.approx(1620, abs=1) and peak.reached is False
    assert loading.ratio == pytest.approx(0.5) and loading.goal is None


def test_weights_are_judged_by_the_parameter_that_differs_most_and_by_their_bits() -> None:
    expected = {"a": torch.ones(4), "b": torch.ones(2)}
    first = {"a": torch.ones(4), "b": torch.ones(2) * (1 + 2e-5)}
    start = {name: tensor * 2 for name, tensor in expected.items()}
    apart, bits = weights_figures("2 ranks", expected, first, first, start)
    assert apart.ratio == pytest.approx(2.0, rel=0.01) and apart.reached is False
    assert apart.details == {"parameter": "b", "moved_by_training": 0.5}
    assert bits.measured == 0.0 and bits.reached is True
    _, bits = weights_figures("2 ranks", expected, first, expected, start)
    assert bits.measured == 1.0 and bits.reached is False


OURS = PeerUpdates(name="Penstock", seconds=[2.0, 2.0], tokens=[900, 700], phases_s={"backward": 1.5})
THEIRS = TrlUpdates(
    name="TRL 9",
    seconds=[10.0],
    tokens=[500],
    phases_s={"generate": 7.0},
    packages={"trl": "9"},
    curve=[CurvePoint(update=n, train_s=5.0 * n, accuracy=0.4 + 0.3 * n, reward=None) for n in range(3)],
    cpu_s=9.0,
    evaluation_s=1.0,
)


def test_updates_with_a_peer_are_compared_by_tokens_and_broken_down() -> None:
    rate, seconds, *breakdowns = rate_figures(OURS, THEIRS)
    assert rate.measured == 400.0 and rate.reference == 50.0 and rate.reached is True
    assert seconds.measured == 2.0 and seconds.reference == 10.0
    assert [each.name for each in breakdowns if isinstance(each, Breakdown)] == ["Penstock's trainer", "TRL 9"]
    assert breakdowns[1].parts == (("generate", 7.0, 0.7), ("rest", 3.0, 0.3))


def test_the_messages_to_and_from_a_peers_process_survive_their_files() -> None:
    for message in (TrlJob(run_file="run.toml", updates=2, num_threads=1), THEIRS):
        assert msgspec.json.decode(msgspec.json.encode(message), type=type(message)) == message


def test_a_peer_that_is_missing_is_named_and_misses_no_goal() -> None:
    rate, _, *breakdowns = rate_figures(OURS, "no python")
    assert rate.measured == 400.0 and rate.reached is None and rate.details["trl"] == {"reason": "no python"}
    assert len(breakdowns) == 1


def learned(time_to_accuracy_s: float | None) -> ModeRun:
    points = [
        EvaluationPoint(policy_version=n, update=n, reward=0.4 + 0.5 * n, num_prompts=256, time_s=4.0 * n)
        for n in range(2)
    ]
    telemetry = RunTelemetry(
        name="demo",
        config=None,
        updates=(),
        evaluations=tuple(points),
        ledger=None,
        producers={},
        missing=(),
        num_torn_lines=0,
    )
    return ModeRun(telemetry=telemetry, phases_s=[], snapshots=[], time_to_accuracy_s=time_to_accuracy_s, wall_s=9.0)


def test_the_time_to_an_accuracy_is_held_against_a_peers_first_evaluation_that_reaches_it() -> None:
    figure, phases = accuracy_figures(Path("models/demo"), learned(8.0), THEIRS)
    assert figure.name == "seconds to 0.9 held-out accuracy from demo"
    assert (figure.measured, figure.reference, figure.ratio) == (8.0, 10.0, 0.8)
    assert figure.details["accuracy_by_update"] == [(0, 0.4), (1, 0.9)]
    assert [point["train_s"] for point in figure.details["trl"]["curve"]] == [0.0, 5.0, 10.0]
    assert phases.parts[0] == ("generate", 7.0, 0.7)


def test_an_accuracy_that_either_does_not_reach_has_no_ratio() -> None:
    below = replace(THEIRS, curve=THEIRS.curve[:2])
    for ours, theirs in ((learned(None), THEIRS), (learned(8.0), below), (learned(8.0), "no python")):
        figure, *_ = accuracy_figures(Path("models/demo"), ours, theirs)
        assert figure.ratio is None and figure.reached is None


def test_the_reward_of_a_long_answer_tells_siblings_apart() -> None:
    task = LongAnswers(seed=1)
    assert [task.reward(task.prompt(3), answer) for answer in ("", "ab", "a1", "12")] == [0.0, 0.0, 0.5, 1.0]
    assert task.prompt(3) != task.prompt(4)


def test_a_random_group_is_the_same_in_every_process_and_has_the_lengths_asked_for() -> None:
    group = random_group(7, [2, 5], 50, prompt_tokens=3)
    assert group == random_group(7, [2, 5], 50, prompt_tokens=3)
    assert [rollout.num_sampled_tokens for rollout in group.rollouts] == [2, 5]
    first, second = (rollout.segments[0].token_ids[:12] for rollout in group.rollouts)
    assert first == second and [rollout.reward.value for rollout in group.rollouts] == [0.0, 1.0]


def test_one_process_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    def child(name: str, program: str) -> Child:
        return Child(name, [sys.executable, "-S", "-c", program], log=tmp_path / f"{name}.log")

    waiting = child("rank 0", "import time; time.sleep(60)")
    with pytest.raises(BenchError, match=r"(?s)rank 1 .*no such thing"):
        wait_for([waiting, child("rank 1", "raise SystemExit('no such thing')")])
    assert waiting.returncode is not None and waiting.returncode < 0
