"""The head section: what its figures are made of, and that a small one runs from end to end."""

import json
from pathlib import Path

import pytest
import torch

from bench.head import part
from bench.head.implementations import IMPLEMENTATIONS, PEERS, Implementation, make_problem
from bench.head.part import Accuracy, Entry, Job, Measured
from bench.head.section import HEAD, OURS, HeadSettings, accuracy_figures, memory_figures, peer_figures, time_figures
from bench.result import Figure, Result, write_result
from bench.section import measure
from penstock.consumers.learning.head import selected_logprobs

TINY = HeadSettings(
    hidden_size=16, vocabulary=300, accuracy_tokens=8, memory_tokens=(4096,), time_tokens=8, peer_tokens=8, rounds=2
)


def accuracy(error: float, gradient_error: float) -> Accuracy:
    return Accuracy(logprobs=error, entropy=error / 2, grad_hidden=gradient_error, grad_weight=gradient_error)


def job(kind: str, *entries: Entry, **changes) -> Job:
    sizes = {"num_tokens": 8, "hidden_size": 16, "vocabulary": 30, "rounds": 2}
    return Job(kind=kind, entries=entries, **{**sizes, **changes})


def by_name(figures) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_worse_of_our_two_ways_is_held_against_what_is_allowed():
    measured = {
        Entry(name, dtype): Measured(entry=Entry(name, dtype), accuracy=accuracy(error, gradient))
        for dtype in ("float32", "bfloat16")
        for name, error, gradient in (("naive", 9.0, 9.0), ("recompute", 1e-6, 1e-6), ("in forward", 3e-5, 2e-6))
    }
    figures = by_name(accuracy_figures(measured))
    logprobs = figures["logprobs, float32 inputs: error against float64"]
    assert logprobs.measured == 3e-5 and logprobs.ratio == pytest.approx(1.5) and logprobs.reached is False
    assert logprobs.details == {"naive": 9.0, "recompute": 1e-6, "in forward": 3e-5}
    assert figures["grad_weight, float32 inputs: error against float64"].reached is True
    assert figures["entropy, bfloat16 inputs: error against float64"].reached is True
    assert figures["grad_hidden, bfloat16 inputs: error against float64"].reference == 3e-3


@pytest.mark.parametrize(("num_tokens", "reached"), [(4096, True), (16384, False), (100, None)])
def test_memory_has_the_goal_of_its_number_of_tokens(num_tokens, reached):
    peaks = {
        Entry(name): Measured(entry=Entry(name), peak_bytes=peak)
        for name, peak in (("naive", 10**9), ("recompute", 10**8), ("in forward", 2 * 10**8))
    }
    found = by_name(memory_figures(num_tokens, peaks))
    figure = found[f"peak memory, {num_tokens} tokens, recompute"]
    assert figure.ratio == pytest.approx(0.1) and figure.measured == 100.0 and figure.reached is reached


def test_times_are_compared_round_by_round_with_naive_on_the_default_library():
    seconds = {
        Entry("naive"): (1.0, 10.0, 1.0),
        Entry("recompute"): (0.9, 9.0, 0.8),
        Entry("in forward"): (0.5, 5.0, 0.5),
        Entry("naive", matmul="onednn"): (0.6, 5.0, 0.6),
        Entry("recompute", matmul="onednn"): (0.5, 6.0, 0.7),
    }
    measured = {entry: Measured(entry=entry, seconds=found) for entry, found in seconds.items()}
    absent = Entry("in forward", matmul="onednn")
    measured[absent] = Measured(entry=absent, reason="inaccurate here")
    figures = by_name(time_figures(measured, 64))
    ours = figures["time, 64 tokens, recompute, torch's default library"]
    assert ours.ratio == pytest.approx(0.9) and ours.reached is True
    onednn = figures["time, 64 tokens, recompute, oneDNN"]
    assert onednn.ratio == pytest.approx(0.6) and onednn.reached is True
    assert onednn.details["ratio_of_naive_on_the_same_library"] == pytest.approx(7 / 6)
    missing = figures["time, 64 tokens, in forward, oneDNN"]
    assert missing.measured is None and missing.reached is False and missing.details["reason"] == "inaccurate here"


def peers_measured() -> tuple[dict, dict, dict]:
    entries = [Entry(name, dtype) for dtype in ("float32", "bfloat16") for name in IMPLEMENTATIONS]
    accuracies = {entry: Measured(entry=entry, accuracy=accuracy(1e-6, 1e-6)) for entry in entries}
    seconds = {
        entry: Measured(entry=entry, package="p 1", seconds=(float(n),) * 2) for n, entry in enumerate(entries, 1)
    }
    others = [name for name in IMPLEMENTATIONS if name not in OURS]
    peaks = {Entry(name): Measured(entry=Entry(name), peak_bytes=10**n) for n, name in enumerate(others, 6)}
    for measured in (accuracies, seconds, peaks):
        for entry in measured:
            if entry.name == PEERS[1]:
                measured[entry] = Measured(entry=entry, reason="no compiler")
    return accuracies, seconds, peaks


def test_a_peer_is_compared_with_the_naive_way_to_the_same_results_or_its_absence_explained():
    accuracies, seconds, peaks = peers_measured()
    figures = by_name(peer_figures(accuracies, seconds, peaks, 64, 128))
    torchs = figures["torch, linear_cross_entropy: time, 64 tokens"]
    without_entropy = seconds[Entry("naive, no entropy")].median_s
    assert torchs.reference == without_entropy and torchs.ratio == pytest.approx(7 / without_entropy)
    assert figures["TRL, chunked: time, 64 tokens"].reference == seconds[Entry("naive")].median_s
    assert figures["TRL, chunked: logprob error against float64"].ratio == pytest.approx(0.05)
    assert "TRL, chunked: peak memory, 128 tokens" in figures
    absent = figures["cut-cross-entropy, torch: not measured"]
    assert absent.measured is None and absent.reached is None and absent.details == {"reason": "no compiler"}
    assert not [name for name in figures if name.startswith("naive")]


def test_without_the_peers_environment_each_peer_is_reported_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("VENV", str(tmp_path / "none"))
    result = measure(HEAD, ["peers"], TINY, Path("unused"), tmp_path / "work")
    assert [figure.name for figure in result.figures] == [f"{name}: not measured" for name in PEERS]
    assert "none-peers/bin/python is not there; make bench makes it" in result.figures[0].details["reason"]


def fake(monkeypatch: pytest.MonkeyPatch, name: str, make) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, name, Implementation(make))


def test_a_peer_that_fails_is_a_finding_and_our_own_failure_an_error(monkeypatch):
    def make():
        raise ImportError("no such peer\nand more")

    fake(monkeypatch, "TRL, chunked", make)
    for kind in ("accuracy", "time", "memory"):
        (found,) = part.measure(job(kind, Entry("TRL, chunked")))
        assert found.reason == "ImportError: no such peer" and not found.seconds
    fake(monkeypatch, "recompute", make)
    with pytest.raises(ImportError):
        part.measure(job("time", Entry("recompute")))


def test_accuracy_finds_an_error_where_there_is_one(monkeypatch):
    def make():
        return lambda p: tuple(x + 1e-3 for x in selected_logprobs(p.hidden, p.weight * 1.01, p.targets))

    (right,) = part.measure(job("accuracy", Entry("recompute")))
    assert right.accuracy.logprobs <= 2e-6 and right.accuracy.grad_weight <= 2e-6
    fake(monkeypatch, "recompute", make)
    (wrong,) = part.measure(job("accuracy", Entry("recompute")))
    assert wrong.accuracy.logprobs >= 1e-3 and wrong.accuracy.entropy >= 5e-4
    assert 0.005 <= wrong.accuracy.grad_weight <= 0.1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_peak_is_what_was_alive_at_once():
    def make():
        def head(problem):
            if len(problem.targets) > 16:
                for _ in range(3):
                    torch.ones(30_000_000)  # 120 MB, freed before the next
            return selected_logprobs(problem.hidden, problem.weight, problem.targets)

        return head

    with pytest.MonkeyPatch.context() as monkeypatch:
        fake(monkeypatch, "recompute", make)
        (found,) = part.measure(job("memory", Entry("recompute"), num_tokens=32))
    assert 115e6 <= found.peak_bytes <= 160e6


def test_a_problem_is_the_same_in_every_process():
    first, second = (make_problem(4, 3, 5, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first.hidden.is_leaf and first.weight.requires_grad


def full_result() -> Result:
    accuracies, seconds, peaks = peers_measured()
    ours = {Entry(name): Measured(entry=Entry(name), peak_bytes=10**7) for name in OURS}
    figures = [
        *memory_figures(128, peaks | ours),
        *peer_figures(accuracies, seconds, peaks, 64, 128),
    ]
    machine = {"processor": "a processor", "num_cores_usable": 2, "load_average_before": [0.1, 0.2, 0.3]}
    return Result(
        section="head",
        date="2031-05-06T07:08:09+00:00",
        machine=machine,
        settings={},
        wall_s=1.0,
        figures=tuple(figures),
    )


def test_a_result_of_the_section_can_be_written(tmp_path):
    assert json.loads(write_result(full_result(), tmp_path).read_text())["section"] == "head"
