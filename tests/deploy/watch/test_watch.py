"""`penstock watch`: the views, what they are made of, and what they show while a part does not answer."""

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.deploy import cli
from penstock.deploy.report.lines import Update, to_record
from penstock.deploy.watch.flow import bottleneck
from penstock.deploy.watch.gathering import Gatherer
from penstock.deploy.watch.screen import all_views, one_view
from penstock.deploy.watch.snapshot import Pauses, ProducerSeen, RedisSeen, RunSnapshot
from penstock.deploy.watch.text import sparkline
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, load_config
from penstock.schemas.metrics import LAG_LABELS, lag_key
from penstock.schemas.process.redis_url import connection_file
from real_server import RealServer
from run_lines import update_line, write_lines
from terminal import Terminal
from waiting import wait_for
from wire_examples import heartbeat

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(
    name="r",
    num_updates=100,
    groups_per_batch=8,
    model=ModelConfig(path="m"),
    environment=EnvironmentConfig(path="a:B"),
)
BEGAN_S = 1e9


def line(update: int, *, wait_s: float = 0.1, time_s: float | None = None, **changes: Any) -> dict[str, Any]:
    """A line of updates.jsonl."""
    fields: dict[str, Any] = {
        "time_s": BEGAN_S + update if time_s is None else time_s,
        "lag_histogram": {"0": 100, "1": 300, "3": 40, "9": 10},
        "num_tokens_trained": 440, "num_tokens_masked_lag": 10, "num_groups_trained": 6, "num_groups_skipped": 2,
        "credit": 24, "queue_depth": 5, "wait_s": wait_s, "step_s": 0.6, "publish_s": 0.1,
        "reward": update / 100, "grad_norm": 0.5, "learning_rate": 2e-4, "entropy": 0.7,
        "rollout_correction/k3_kl": 1e-3, "policy_clipped_frac": 0.01,
        "mismatch_lag0": 2e-6, "mismatch_lag0_band": 1e-5, "ess_fraction": 0.97,
        "weight_changed_frac": 0.08, "weight_chunk_bytes": 118_204, "publish_blocked_s": 0.004, "weight_chain": 9,
        "weight_redis_bytes": 3_170_240,
    }  # fmt: skip
    for label, num_tokens in zip(LAG_LABELS, (60, 40, 300, 40, 0, 0), strict=True):
        fields[lag_key("num_tokens", label)] = float(num_tokens)
        if num_tokens:
            for name in ("ess_fraction", "applied_ess_fraction", "chi2", "k3_kl", "weight_mean", "masked_frac"):
                fields[lag_key(name, label)] = 0.25 if label == "2-3" else 0.5
    return update_line(update, **fields | changes)


def updates(count: int = 30, **changes: Any) -> tuple[Update, ...]:
    return tuple(to_record(line(n, **changes), Update) for n in range(1, count + 1))


def redis_seen(**changes: Any) -> RedisSeen:
    fields: dict[str, Any] = {
        "producers": {f"producer-{n}": ProducerSeen(heartbeat(f"producer-{n}"), n) for n in (0, 1)},
        "num_prompts": 12, "num_claimed": 9, "num_stream_entries": 3, "finished": False, "has_trainer": True,
    }  # fmt: skip
    return RedisSeen(**fields | changes)


def snapshot(**changes: Any) -> RunSnapshot:
    fields: dict[str, Any] = {
        "config": CONFIG, "redis": redis_seen(), "updates": updates(), "time_s": BEGAN_S + 35,
        "pauses": {"producer-0": Pauses(((0.0, 0.023), (1.0, 0.031))), "producer-1": Pauses()},
    }  # fmt: skip
    return RunSnapshot(**fields | changes)


def shown(seen: RunSnapshot, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(all_views(seen, width))
    return console.file.getvalue()


def test_a_course_is_drawn_of_any_numbers():
    for values, width, wanted in (
        ([], 10, ""),
        ([5.0] * 4, 10, "▄▄▄▄"),
        ([0, 0, 4, 4, 8, 8], 3, "▁▅█"),
        ([float("nan"), 1.0, 2.0], 5, "▁█"),
        ([0, 1.7e308, -1.7e308], 10, "▅█▁"),
    ):
        assert sparkline(values, width) == wanted, values


def test_the_bottleneck_is_named():
    full = updates(wait_s=0.01, queue_depth=24)
    for changes, part in (
        ({"updates": updates(wait_s=2.0)}, "producers"),
        ({"updates": updates(wait_s=2.0), "pauses": {"producer-0": Pauses(((0.0, 30.0),))}}, "weight updates"),
        ({"updates": updates(wait_s=0.01)}, "nobody"),
        ({"updates": full}, "trainer"),
        ({"updates": ()}, "start"),
        ({"redis": redis_seen(producers={})}, "producers"),
        ({"redis": redis_seen(has_trainer=False)}, "trainer"),
        ({"updates": updates(time_s=1000.0)}, "trainer"),
        ({"is_over": True}, ""),
        ({"redis": None}, ""),
    ):
        named, why = bottleneck(snapshot(**changes))
        assert named == part and bool(why) == bool(part), changes
    assert "24 of 24 groups wait" in bottleneck(snapshot(updates=full))[1]


def test_the_views_fit_the_width_they_have():
    words = ("waited for", "busy", "1.00 updates/s", "producer-0", "2,500", "27 ms", "5,000 tokens/s", "credit", "24",
             "8.0% changed by an update", "118 kB each", "9 deltas", "3.2 MB in Redis",
             "reward", "entropy", "KL to behavior", "clip fraction", "gradient norm", "learning rate", "0.3000",
             "lag of tokens", "bound 4", "200 tokens (2.2%) masked beyond it",
             "0-mixed", "2-3", "8+", "mismatch at lag 0", "2.0e-06", "1.0e-05",
             "within")  # fmt: skip
    for width in (80, 120, 200):
        text = shown(snapshot(), width)
        assert max(map(len, text.splitlines())) <= width
        assert [word for word in words if word not in " ".join(text.split())] == [], width
    alive = {"producer-0": ProducerSeen(heartbeat("producer-0"), 1)}
    rows = [row.split() for row in shown(snapshot(redis=redis_seen(producers=alive))).splitlines()]
    assert ["producer-0", "7", "1", "2,500", "5", "2", "27", "ms", "31", "ms", "0.1%"] in rows
    assert ["producer-1", "away"] in [row[:2] for row in rows]


def test_what_is_out_of_its_band_or_does_not_answer_stands_out():
    seen = snapshot(updates=updates(mismatch_lag0=3e-5))
    assert "ABOVE ITS BAND" in shown(seen)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    console.print(one_view(seen, 3, 100))
    assert "\x1b[1;31m0.2500" in console.file.getvalue(), "ESS 0.25 at lag 2-3"
    text = shown(snapshot(redis=None, without_redis="Connection refused"))
    assert "Redis does not answer: Connection refused" in text and "producer-1" in text and "gradient norm" in text
    hostile = heartbeat("p\x1b[2J", last_error="\x1b]0;title\x07 [bold]no\nmore")
    text = shown(snapshot(redis=redis_seen(producers={hostile.producer_id: ProducerSeen(hostile, None)})))
    assert "\x1b" not in text and "\x07" not in text and "p\\x1b[2J" in text and "[bold]no\\nmore" in text


def write_run(runs: Path, *, finished: bool) -> Path:
    folder = runs / "r"
    (folder / "producers").mkdir(parents=True)
    (folder / "run.toml").write_text('name = "r"\nnum_updates = 30\n[model]\npath = "m"\n[environment]\npath = "a:B"\n')
    now_s = time.time()
    rows = [line(n, time_s=now_s - 7200 + n) for n in range(1, 31)]
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"update": 31, "tor')
    point = {"policy_version": 20, "update": 20, "reward": 0.875, "num_prompts": 8, "time_s": now_s - 7100}
    write_lines(folder / "evaluations.jsonl", point)
    pause = {"event": "weights", "time_s": now_s - 7175, "policy_version": 20, "pause_s": 0.017}
    (folder / "producers" / "producer-0.jsonl").write_text(json.dumps(pause) + "\nnot json\n")
    (folder / "trainer.json").write_text(json.dumps({"finished": finished, "num_updates": 30}))
    return folder


def test_a_run_that_has_ended_is_shown_from_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path / "runs", finished=True)
    for run in ("r", str(folder)):
        assert cli.main(["watch", run, "--runs", str(tmp_path / "runs"), "--once"]) == 0
        text = capsys.readouterr().out
        assert "update 30/30" in text and "over: finished" in text and "120 min ago" in text
        assert "17 ms" in text and "0.8750" in text and "waited for" not in text
    assert not (folder / "lock").exists(), "nothing is started or locked to look at it"
    (folder / "trainer.json").write_text(json.dumps({"finished": True, "num_updates": 20}))
    assert not Gatherer(folder, load_config(folder / "run.toml")).gather().is_over, "it was continued after its end"
    assert cli.main(["watch", "r", "--runs", str(tmp_path / "runs")]) == 0
    assert "not running; last update" in capsys.readouterr().out
    now_s = time.time()  # the share of pauses of a young producer is of its own time
    events = [{"event": "weights", "time_s": now_s - 20 + n, "policy_version": n, "pause_s": 0.5} for n in range(20)]
    write_lines(folder / "producers" / "young.jsonl", *events)
    write_lines(folder / "updates.jsonl", line(30, time_s=now_s))
    assert Gatherer(folder, CONFIG).gather().pauses["young"].share == pytest.approx(10 / 20.5, rel=0.1)


def test_what_is_no_run_folder_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs", finished=True)
    for run, url, message in (
        ("nothing", "", "nothing: neither a folder nor a run in runs"),
        (str(folder / "run.toml"), "", "a file; expected a run's name or folder"),
        ("http://trainer:9090/metrics", "", "a run on other machines is shown by Grafana"),
        ("elsewhere", "redis://127.0.0.1:1", "no run folder in runs; a run whose folder is on other machines is shown"),
    ):
        monkeypatch.setenv("REDIS_URL", url)
        assert cli.main(["watch", run, "--once"]) == 2
        assert message in capsys.readouterr().err, run


@pytest.mark.redis
def test_a_redis_that_goes_and_comes_back_elsewhere_is_shown_as_it_is(server_binary, tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path, finished=False)
    file = connection_file(folder)
    file.parent.mkdir()
    gatherer = Gatherer(folder, CONFIG)
    assert "no server yet" in gatherer.gather().without_redis
    first, second = RealServer(server_binary), RealServer(server_binary)
    try:
        file.write_text(json.dumps({"url": first.url}))
        assert gatherer.gather().redis is not None
        first.stop()
        away = gatherer.gather()
        assert away.redis is None and away.without_redis and len(away.updates) == 30
        file.write_text(json.dumps({"url": second.url}))  # a resume has started another
        assert wait_for(gatherer.gather, lambda seen: seen.redis is not None)
    finally:
        first.remove()
        second.remove()


@pytest.fixture
def at_a_terminal(tmp_path, monkeypatch) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []
    monkeypatch.delenv("REDIS_URL", raising=False)

    def start(*arguments: str, width: int = 100) -> Terminal:
        names = ("COLUMNS", "LINES", "NO_COLOR")
        variables = {name: value for name, value in os.environ.items() if name not in names}
        environment = {**variables, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "penstock.deploy.cli", "watch", *arguments, "--runs", str(tmp_path)]
        opened.append(Terminal(command, environment=environment, width=width))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def has(word: str) -> Callable[[list[str]], bool]:
    return lambda frame: any(word in text for text in frame)


def test_keys_choose_the_view_a_resize_is_followed_and_every_end_leaves_the_terminal_as_it_was(tmp_path, at_a_terminal):
    write_run(tmp_path, finished=True)
    terminal = at_a_terminal("r")
    terminal.wait_for(has("producer-0"))
    terminal.press("2")
    terminal.wait_for(has("gradient norm"))
    terminal.press("3")
    wide = terminal.wait_for(has("mismatch at lag 0"))
    assert 80 < max(map(len, wide)) <= 100
    terminal.resize(80)
    narrow = terminal.wait_for(lambda frame: has("mismatch at lag 0")(frame) and max(map(len, frame)) <= 80)
    assert has("over: finished")(narrow)
    terminal.press("x")
    terminal.press("1")
    terminal.wait_for(has("producer-0"))
    terminal.press("q")
    ended = [terminal]
    for end in (signal.SIGINT, signal.SIGTERM):
        ended.append(at_a_terminal("r"))
        ended[-1].wait_for(has("producer-0"))
        ended[-1].process.send_signal(end)
    for terminal in ended:
        assert terminal.wait() == 0 and "Traceback" not in terminal.output
        assert terminal.attributes_now() == terminal.attributes
        assert "\x1b[?1049l" in terminal.output and "\x1b[?25h" in terminal.output, "the screen and the cursor are back"
    once = at_a_terminal("r", "--once", width=80)
    assert once.wait() == 0
    assert "\x1b[?1049h" not in once.output and "mismatch at lag 0" in once.output
