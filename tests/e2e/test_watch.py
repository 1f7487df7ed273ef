"""A real run observed while it trains: at a terminal, through a pipe, in its report, and in its logs."""

import json

import pytest

from demo_run import VARIABLES, DemoRun
from monitored_run import MonitoredRun
from terminal import Terminal

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


def assert_shown_as_under_way(run: MonitoredRun) -> None:
    text = run.ask("watch", run.name, "--once")
    assert "waited for" in text and "mismatch at lag 0" in text and max(map(len, text.splitlines())) <= 80
    assert "not over, as of" in " ".join(run.ask("report", run.name).split())
    assert "This run is not over" in (run.folder / "report.html").read_text()


def test_a_run_is_seen_while_it_trains_and_after_its_end(
    live_run: MonitoredRun, request: pytest.FixtureRequest
) -> None:
    assert_shown_as_under_way(live_run)
    terminal = Terminal(live_run.command("watch", live_run.name), environment=VARIABLES, width=100)
    try:
        shown = "\n".join(terminal.wait_for(lambda frame: any("waited for" in text for text in frame)))
        assert "producer-0" in shown and "updates/s" in shown, shown
        assert "away" not in shown and "does not answer" not in shown, shown
        terminal.press("2")
        shown = "\n".join(terminal.wait_for(lambda frame: any("gradient norm" in text for text in frame)))
        assert all(
            word in shown for word in ("reward", "held-out reward", "entropy", "KL to behavior", "learning rate")
        ), shown
        terminal.press("3")
        shown = "\n".join(terminal.wait_for(lambda frame: any("mismatch at lag 0" in text for text in frame)))
        assert "within" in shown and "ESS" in shown and "bound 4" in shown, shown
        terminal.resize(80)
        terminal.wait_for(lambda frame: max(map(len, frame)) <= 80)
        terminal.press("1")
        terminal.wait_for(lambda frame: any("waited for" in text for text in frame))
        request.getfixturevalue("ended_run")
        gone = ("not running", "Redis does not answer")
        shown = "\n".join(terminal.wait_for(lambda frame: all(any(word in text for text in frame) for word in gone)))
        assert "wait" in shown, "what there was is shown on"
        terminal.press("q")
        assert terminal.wait() == 0 and terminal.attributes_now() == terminal.attributes
    finally:
        terminal.close()


def test_every_line_of_its_processes_is_a_record(ended_run: MonitoredRun, resumed_run: DemoRun) -> None:
    for name in ("trainer", "producer-0"):
        for run, lines in ((ended_run, ended_run.log_lines(name)), (resumed_run, resumed_run.fresh_lines[name])):
            for line in lines:
                assert line.startswith("{"), f"{name}: {line}"
            records = [json.loads(line) for line in lines]
            assert {record["run"] for record in records} == {run.name}
            own = [record for record in records if record["role"] == name.partition("-")[0]]
            assert own and any("policy_version" in record for record in own)
            assert len(records) < 200, "no line per request or token"
            if name == "producer-0":
                assert {record["id"] for record in records} == {"producer-0"}
                assert {record["role"] for record in records} <= {"producer", "engine"}
