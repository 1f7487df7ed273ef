"""What was sampled and what was trained, in the report, the summary and the audit."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.deploy.report.attrition import attrition_tables
from penstock.deploy.report.report import write_report
from penstock.deploy.report.summary_table import table_rows, warnings_of
from penstock.schemas.attrition import UNKNOWN, Attrition, LostByLength, Rollouts, length_bucket
from run_lines import ledger_line, update_line, write_lines
from wire_examples import group_of_lengths

ALARM = LostByLength(cut=900, num_long=64, num_long_lost=20, num_other=192, num_other_lost=1)


@pytest.fixture
def attrition() -> Attrition:
    found = Attrition(last=ALARM, num_tries_lost=3)
    found.add("sums", "trained", group_of_lengths(10, 30, reward=1.0), 2, [0, 20])
    found.add("sums", "stale", group_of_lengths(1000, 1400), 2)
    found.add("essays", "dead", None, 2)
    return found


def counted(outcome: str, *lengths: int, reward: float = 0.0, reason: str = "stop", num_masked: int = 0) -> dict:
    num, length = len(lengths), length_bucket(max(lengths))
    return {outcome: {length: Rollouts(num, sum(lengths), num_masked, num, reward * num, {reason: num})}}


COUNTED = (
    {"sums": counted("trained", 10, reward=1.0)},
    {"sums": counted("stale", 1000)},
    {"sums": counted("trained", 30, reward=1.0, num_masked=20)},
    {"sums": counted("stale", 1400, reason="length"), "essays": counted("trained", 70, reward=-0.5)},
    {"essays": {"dead": {UNKNOWN: Rollouts(2)}}},
)
"""In each update, by environment."""


@pytest.fixture
def run_folder(tmp_path: Path, attrition: Attrition) -> Path:
    lines = (update_line(k, rollouts=msgspec.to_builtins(counts)) for k, counts in enumerate(COUNTED, start=1))
    write_lines(tmp_path / "updates.jsonl", *lines)
    ledger = ledger_line(5, released=1, trained=1, skipped=1, dead=1, cancelled=1)
    write_lines(tmp_path / "trainer.json", ledger | {"attrition": msgspec.to_builtins(attrition), "finished": False})
    return tmp_path


def test_the_tables_add_up_by_outcome_length_and_environment(attrition: Attrition) -> None:
    outcomes, lengths, environments = (table.rows[1:] for table in attrition_tables(attrition))
    assert outcomes == [
        ["sampled", "6", "100.0%", "2,440", "0.8%", "610.0", "0.500", "stop 4"],
        ["trained", "2", "33.3%", "40", "50.0%", "20.0", "1.000", "stop 2"],
        ["stale", "2", "33.3%", "2,400", "0.0%", "1,200.0", "0.000", "stop 2"],
        ["dead", "2", "33.3%", "0", "", "", "", ""],
    ]
    assert [row[:4] for row in lengths] == [
        ["16", "1", "100.0%", "0.0%"],
        ["32", "1", "100.0%", "0.0%"],
        ["1,024", "1", "0.0%", "0.0%"],
        ["2,048", "1", "0.0%", "0.0%"],
        ["unknown", "2", "0.0%", "0.0%"],
    ]
    assert [row[-1] for row in lengths] == ["0.0%", "66.7%", "0.0%", "0.0%", ""]
    assert [row[0] for row in environments] == ["essays", "sums"]
    assert environments[1][-4:] == ["0.8%", "610.0 → 20.0", "0.500 → 1.000", "stop 100.0% → stop 100.0%"]
    assert attrition_tables(Attrition()) == []


WINDOWS = (
    "1 to 2|2|50.0%|0.0%|50.0%|0.0%|0.0%|0.0%|0.0%|0.0%|505.0 → 10.0|0.500 → 1.000|stop 100.0% → stop 100.0%",
    "3 to 4|3|66.7%|0.0%|33.3%|0.0%|0.0%|0.0%|0.0%|1.3%|500.0 → 50.0|0.167 → 0.250"
    "|length 33.3%, stop 66.7% → stop 100.0%",
    "3 to 4: essays|1|100.0%|0.0%|0.0%|0.0%|0.0%|0.0%|0.0%|0.0%|70.0 → 70.0|-0.500 → -0.500|stop 100.0% → stop 100.0%",
    "5 to 5|2|0.0%|0.0%|0.0%|0.0%|100.0%|0.0%|0.0%|| → | → | → ",
)
"""Rows of the table by window."""


def test_report_and_summary_have_the_tables_by_window_the_figures_and_the_warning(run_folder: Path) -> None:
    summary, file = write_report(run_folder)
    page = file.read_text()
    assert "Long rollouts are lost at a rate" in page, "each warning is in the page's notice"
    section = page[page.index("What was sampled and what was trained") :]
    for text in (
        "1 groups are not settled: what was sampled of them is in no table",
        "3 tries at groups ended with their producer",
        "The last window of groups: 20 of the 64 longest groups (900 tokens or more) were lost, 1 of the 192 others: "
        "long rollouts are lost at a rate that short ones are not",
    ):
        assert text in section
    for cells in WINDOWS:
        assert "".join(f"<td>{cell}</td>" for cell in cells.split("|")) in section
    assert json.loads((run_folder / "summary.json").read_text()) == summary
    found = summary["attrition"]
    assert found["outcomes"]["sampled"]["completion_tokens"] == 610.0
    assert found["outcomes"]["trained"]["num_tokens_masked_lag"] == 20
    assert found["num_tries_lost"] == 3 and found["lost_by_length"]["num_long_lost"] == 20
    assert dict(table_rows(summary))["rollouts"] == (
        "6 sampled: 33.3% trained, 33.3% stale, 33.3% dead; 610.0 tokens on average, 20.0 of those trained"
    )
    assert any(line.startswith("long rollouts are lost at a rate") for line in warnings_of(summary))
    summary["attrition"]["lost_by_length"] |= {"num_long_lost": 2}
    assert not any(line.startswith("long rollouts are lost") for line in warnings_of(summary))
