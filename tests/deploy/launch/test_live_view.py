"""The view of a run, on a terminal and elsewhere."""

import io
import json
import re
from collections.abc import Iterator

import msgspec
import pytest
from prometheus_client import start_http_server
from rich.console import Console

from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.stream.ledger import Ledger
from penstock.deploy.launch.live_view import LiveView, PlainView, open_view
from penstock.deploy.launch.progress import Progress
from penstock.schemas.config import EnvironmentConfig, EvaluationConfig, GoalConfig, ModelConfig, RunConfig
from penstock.schemas.metrics import TrainerMetric
from penstock.schemas.policy import make_version
from penstock.schemas.process.prometheus import register_metrics_port
from run_lines import update_line
from wire_examples import heartbeat

CONFIG = RunConfig(name="r", num_updates=10, model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"))


def append(file, **line: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def append_update(folder, number: int, **fields: object) -> None:
    append(folder / "updates.jsonl", **update_line(number, **{"reward": 0.625, "ess_fraction": 0.987, **fields}))


def append_evaluation(folder, update: int, reward: float, num_failed: int = 0, **parts: float) -> None:
    append(
        folder / "evaluations.jsonl",
        policy_version=update,
        update=update,
        reward=reward,
        **{f"reward/{name}": value for name, value in parts.items()},
        num_prompts=9,
        num_failed=num_failed,
        time_s=0.0,
    )


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, legacy_windows=False)


def test_live_view_shows_every_figure_on_a_terminal(tmp_path):
    console = terminal()
    view = open_view(CONFIG, tmp_path, console)
    assert isinstance(view, LiveView)
    with view:
        view.state("trainer", "running")
        view.state("producer-0", "serving")
        append_update(tmp_path / "r", 4, masked_frac=0.274)
        append_evaluation(tmp_path / "r", 4, 0.375)
        append(
            tmp_path / "r" / "producers" / "producer-0.jsonl",
            event="weights",
            time_s=0,
            policy_version=3,
            pause_s=0.0234,
        )
        view.refresh(
            {"producer-0": heartbeat("producer-0", policy_version=make_version(2, 3)), "far-1": heartbeat("far-1")}
        )
    shown = console.file.getvalue()
    figures = ("4/10", "0.625", "0.375", "0.75", "27%", "0.987", "2", "2,500+2,500", "producer-0", "2:3", "23 ms", "7")
    for wanted in figures:
        assert wanted in shown, wanted
    assert any("updates/s" in line and "held-out reward" in line for line in shown.splitlines()), (
        "the headings are cropped"
    )
    assert "serving elsewhere" in shown  # a producer of another machine
    assert "producer-0: serving" in shown


def test_the_figure_of_the_goal_is_shown_under_its_own_name_and_failed_prompts_beside_it(tmp_path, capsys):
    exact = GoalConfig(figure="reward/exact", value=0.9)
    for n, (goal, reward, num_failed, shown) in enumerate(
        (
            (None, 0.5, 0, "held-out reward 0.500"),
            (exact, 0.5, 0, "held-out exact 0.250"),
            (None, 0.0, 9, "held-out reward 9 of 9 failed  "),
            (None, 0.25, 3, "held-out reward 0.250 (3 of 9 failed)  "),
        )
    ):
        config = msgspec.structs.replace(CONFIG, evaluation=EvaluationConfig(goal=goal))
        with open_view(config, tmp_path / str(n), Console(file=io.StringIO())):
            append_evaluation(tmp_path / str(n) / "r", 3, reward, num_failed=num_failed, exact=0.25)
        assert shown in capsys.readouterr().out, shown


@pytest.fixture
def trainer_metrics(tmp_path, monkeypatch) -> Iterator[TrainerMetrics]:
    """The metrics of a trainer that serves them, at which a view looks whenever it draws."""
    monkeypatch.setattr(Progress, "scrape_s", 0.0)
    metrics = TrainerMetrics()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    register_metrics_port(tmp_path / "r", "trainer", "127.0.0.1", server.server_port)
    yield metrics
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_that_waits_for_agents_says_so_until_a_batch_comes(trainer_metrics, plain, tmp_path, capsys):
    def told() -> str:
        plain.refresh({})
        return capsys.readouterr().out

    plain.line_s = 0.0
    plain.state("trainer", "running")
    append_update(tmp_path / "r", 1)
    trainer_metrics[TrainerMetric.GROUPS_ABANDONED].set(3)
    assert "agents" not in told(), "a batch came a moment ago"
    text = told()
    assert "trainer: waits for agents: they abandoned the last groups" in text and "abandoned 3" in text
    append_update(tmp_path / "r", 2)
    text = told()
    assert "trainer: running" in text and "abandoned" not in text
    plain.state("trainer", "stopping")
    told()
    assert "waits" not in told() and plain.states["trainer"] == "stopping"


def test_dead_groups_are_counted_where_there_are_any(trainer_metrics, plain, tmp_path, capsys):
    plain.line_s, ledger = 0.0, Ledger()
    for index, outcome in enumerate(("trained", "dead"), start=1):
        ledger.settle(index, outcome)
        trainer_metrics.count_groups(ledger)
        append_update(tmp_path / "r", index)
        plain.refresh({})
        assert ("  dead 1" in capsys.readouterr().out) == (outcome == "dead")


@pytest.fixture
def plain(tmp_path) -> PlainView:
    view = open_view(CONFIG, tmp_path, Console(file=io.StringIO()))
    assert isinstance(view, PlainView)
    view.frame_s = 0.0
    return view


def test_plain_view_prints_what_happens_once_progress_now_and_then_and_each_evaluation(plain, tmp_path, capsys):
    plain.state("producer-0", "starting the engine")
    plain.state("producer-0", "starting the engine")
    assert re.fullmatch(r"\d:\d\d  producer-0: starting the engine\n", capsys.readouterr().out)
    for number in (1, 2, 3):
        append_update(tmp_path / "r", number)
        plain.refresh({"producer-0": heartbeat("producer-0")})
    (line,) = capsys.readouterr().out.splitlines()
    assert "update 1/10" in line and "reward 0.625" in line and "tokens/s 2,500" in line
    append_evaluation(tmp_path / "r", 3, 0.5)
    plain.refresh({})
    (line,) = capsys.readouterr().out.splitlines()
    assert "update 3/10" in line and "held-out reward 0.500" in line
    plain.refresh({})
    assert capsys.readouterr().out == ""


def test_time_left_follows_the_rate_of_this_session(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("penstock.deploy.launch.progress.time.monotonic", lambda: clock[0])
    append_update(tmp_path, 50)  # by an earlier session of a resumed run
    progress = Progress(tmp_path)
    assert progress.update.update == 50
    assert progress.left_s(100) is None
    for number in (60, 62, 64):
        clock[0] += 1.0
        append_update(tmp_path, number)
        progress.poll()
    assert progress.updates_per_s == 2.0
    assert progress.left_s(100) == 18.0


def test_a_line_is_read_once_it_is_whole_and_foreign_ones_are_passed_over(tmp_path):
    progress, file = Progress(tmp_path), tmp_path / "updates.jsonl"
    append_update(tmp_path, 1)
    whole = file.read_text()
    file.write_text(whole[:40])
    progress.poll()
    assert progress.update is None
    with file.open("a") as out:
        out.write(whole[40:])
    progress.poll()
    assert progress.update.update == 1
    with file.open("a") as out:
        out.write('{"update": 2, "poli\nnot json\n')
    append_update(tmp_path, 3, reward=None)
    progress.poll()
    assert progress.update.update == 3 and progress.mean_lag == 0.75


def test_batches_in_a_row_that_train_nothing_are_warned_of_once_until_one_trains(plain, tmp_path, capsys):
    def warnings(*trained: int) -> int:
        for num_groups in trained:
            number = (plain.progress.update.update if plain.progress.update else 0) + 1
            append_update(tmp_path / "r", number, num_groups_trained=num_groups, num_groups_skipped=4 - num_groups)
            plain.refresh({})
        return capsys.readouterr().out.count("warning: 5 batches in a row trained nothing: the rewards within each")

    assert warnings(4, 0, 0, 0, 0) == 0
    assert warnings(0, 0, 0) == 1
    assert warnings(1, 0, 0, 0, 0) == 0
    assert warnings(0) == 1


def test_many_tokens_masked_for_lag_are_warned_of_once_with_what_helps(plain, tmp_path, capsys):
    for number in range(1, 30):
        lags = {"1": 73, "3": 27} if number > 5 else {"1": 100}
        append_update(tmp_path / "r", number, lag_histogram=lags, num_tokens_masked_lag=lags.get("3", 0))
        plain.refresh({})
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert "14% of the sampled tokens were masked for their lag, older than twice max_lag: after a resume" in warning


def test_the_reason_is_repeated_until_the_run_goes_on(plain, capsys):
    for repeat_s in (0.0, 0.0, 60.0, 60.0):
        plain.repeat_s = repeat_s
        plain.blocked("Redis is away")
    plain.blocked("")
    shown = capsys.readouterr().out
    assert shown.count("the run stands still: Redis is away") == 3 and "the run goes on" in shown
