import json
import os

import msgspec
import pytest
from rich.console import Console

from bench.result import (
    Figure,
    Goal,
    Result,
    break_down,
    compare,
    describe_machine,
    print_result,
    write_result,
)


def figure(**changes) -> Figure:
    fields = {"unit": "/s", "measured": 97.0, "reference": 100.0, "reference_is": "bare", "goal": Goal(at_least=0.97)}
    return compare("tokens", **{**fields, **changes})


def result(*figures: Figure) -> Result:
    machine = {"processor": "a processor", "num_cores_usable": 2, "load_average_before": [0.1, 0.2, 0.3]}
    return Result(
        section="pipeline",
        date="2031-05-06T07:08:09+00:00",
        machine=machine,
        settings={},
        wall_s=1.0,
        figures=figures,
        breakdowns=(break_down("trainer", {"forward": 0.2, "wait": 0.3}, 1.0, "time per update"),),
    )


@pytest.mark.parametrize(
    ("goal", "ratio", "reached"),
    [
        (Goal(at_least=0.97), 0.97, True),
        (Goal(at_least=0.97), 0.969, False),
        (Goal(at_most=1.25), 1.25, True),
        (Goal(at_most=1.25), 1.26, False),
        (Goal(at_most=1.25), float("nan"), False),
    ],
)
def test_a_goal_is_reached_at_its_bound_and_not_past_it(goal, ratio, reached):
    assert goal.reached(ratio) is reached


@pytest.mark.parametrize("bounds", [{}, {"at_least": 1.0, "at_most": 2.0}])
def test_a_goal_has_exactly_one_bound(bounds):
    with pytest.raises(ValueError, match="one of at_least, at_most"):
        Goal(**bounds)


def test_a_ratio_is_measured_over_reference_unless_it_was_taken_otherwise():
    assert figure().ratio == pytest.approx(0.97) and figure().reached
    assert not figure(ratio=0.9).reached


def test_a_measurement_that_came_to_nothing_misses_its_goal():
    assert figure(measured=None).ratio is None
    assert figure(measured=None).reached is False


def test_without_goal_or_reference_nothing_is_reached_or_missed():
    assert figure(goal=None).reached is None
    assert figure(reference=None).reached is None


def test_a_result_is_written_under_its_section_and_date_and_read_back_whole(tmp_path):
    written = result(figure(), figure(measured=None, goal=Goal(at_most=1.0)))
    file = write_result(written, tmp_path / "results")
    assert file == tmp_path / "results" / "pipeline-2031-05-06.json"
    assert msgspec.json.decode(file.read_bytes(), type=Result) == written
    first = json.loads(file.read_text())["figures"][0]
    assert first["ratio"] == pytest.approx(0.97) and first["reached"] is True and first["goal"]["at_least"] == 0.97
    assert list(file.parent.iterdir()) == [file]


def test_a_result_of_some_rows_leaves_the_whole_one_alone(tmp_path):
    whole = write_result(result(figure()), tmp_path)
    part = write_result(result(figure()), tmp_path, rows=("pause",))
    assert part.name == "pipeline-pause-2031-05-06.json" and whole.exists()


def test_a_figure_that_is_not_finite_is_refused_with_its_place(tmp_path):
    with pytest.raises(ValueError, match=r"result\.figures\.0\.measured: nan"):
        write_result(result(figure(measured=float("nan"))), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_table_shows_ratio_goal_and_whether_it_was_reached():
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_result(result(figure(), figure(measured=50.0)), console)
    shown = console.export_text()
    assert "0.97" in shown and "≥ 0.97" in shown and "yes" in shown and "no" in shown
    assert "forward" in shown and "20.0%" in shown


def test_a_breakdown_accounts_for_the_whole_time():
    parts = break_down("trainer", {"forward": 0.2, "wait": 0.3}, 1.0, "time per update").parts
    assert [name for name, _, _ in parts] == ["rest", "wait", "forward"]
    assert sum(seconds for _, seconds, _ in parts) == pytest.approx(1.0)
    assert sum(share for _, _, share in parts) == pytest.approx(1.0)


def test_the_machine_is_described():
    machine = describe_machine()
    assert machine["num_cores"] >= machine["num_cores_usable"] >= 1
    assert {"torch", "redis", "msgspec"} <= set(machine["packages"])
