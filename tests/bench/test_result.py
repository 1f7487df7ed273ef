"""Figures with their references and goals: ratios, medians over rounds, the result file."""

import math

import msgspec
import pytest
from rich.console import Console

from bench.result import BenchError, Figure, Goal, Result, absent, compare_rounds, in_turns, print_result, write_result


def result(*figures):
    machine = {"processor": "a processor", "num_cores_usable": 2, "load_average_before": [0.5, 0.4, 0.3]}
    return Result(
        section="pipeline", date="2026-01-02T03:04:05+00:00", machine=machine, settings={}, wall_s=1.0, figures=figures
    )


def test_a_goal_is_reached_at_its_bound_and_not_past_it():
    rows = [
        (Goal(at_least=0.97), 0.97, True),
        (Goal(at_least=0.97), 0.969, False),
        (Goal(at_most=1.1), 1.1, True),
        (Goal(at_most=1.1), 1.101, False),
        (Goal(at_most=1.1), math.nan, False),
    ]
    assert [goal.reached(ratio) for goal, ratio, _ in rows] == [reached for *_, reached in rows]
    for bounds in ({}, {"at_least": 1.0, "at_most": 2.0}):
        with pytest.raises(ValueError, match="one of at_least, at_most is expected"):
            Goal(**bounds)


def test_a_figure_compares_and_says_whether_its_goal_is_reached():
    """What did not finish misses its goal; without a reference or a goal there is nothing to miss."""
    goal = Goal(at_least=0.97)
    rows = [
        (Figure("a", unit="s", measured=3.0, reference=2.0, goal=goal), 1.5, True),
        (Figure("a", unit="s", measured=3.0, reference=2.0, goal=goal, ratio=0.5), 0.5, False),
        (Figure("a", unit="s", measured=None, reference=2.0, goal=goal), None, False),
        (Figure("a", unit="s", measured=3.0, goal=goal), None, None),
        (Figure("a", unit="s", measured=3.0, reference=2.0), 1.5, None),
    ]
    for n, (figure, ratio, reached) in enumerate(rows):
        assert (figure.ratio, figure.reached) == (ratio, reached), n


def test_rounds_are_measured_in_turns_and_the_ratio_is_the_median_of_the_rounds_own():
    """A slow moment, here of round 2 for both, changes neither ratio nor order."""
    order, ours, theirs = [], iter([1.0, 10.0, 3.0]), iter([2.0, 20.0, 2.0])

    def take(name, values):
        order.append(name)
        return next(values)

    found = in_turns(3, {"ours": lambda: take("ours", ours), "theirs": lambda: take("theirs", theirs)})
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    figure = compare_rounds("rate", found["ours"], found["theirs"], reference_is="theirs", goal=Goal(at_least=0.5))
    assert (figure.measured, figure.reference, figure.ratio, figure.reached) == (3.0, 2.0, 0.5, True)
    assert figure.details["ratio_by_round"] == [0.5, 0.5, 1.5]


def test_a_result_is_written_under_section_rows_date_and_device_and_printed(tmp_path):
    whole = result(Figure("rate", unit="/s", measured=1.0, reference=2.0, goal=Goal(at_least=1.0)), absent("b", "no"))
    file = write_result(whole, tmp_path)
    assert file.name == "pipeline-2026-01-02.json"
    assert msgspec.json.decode(file.read_bytes(), type=Result) == whole
    assert write_result(whole, tmp_path, rows=("a", "b"), device="h100").name == "pipeline-a-b-2026-01-02-h100.json"
    console = Console(record=True, width=120)
    print_result(whole, console)
    shown = console.export_text()
    assert "rate" in shown and "0.5" in shown and "≥ 1" in shown and "no" in shown and "b: not measured: no" in shown
    with pytest.raises(BenchError, match="rate: nan, expected a finite number"):
        write_result(result(Figure("rate", unit="/s", measured=math.nan)), tmp_path)
