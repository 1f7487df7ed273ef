"""`penstock watch`: the views, what they are made of, and what they show while a part does not answer."""

import io
import json
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest, start_http_server
from rich.console import Console

from parity_records import INSTANCES, write_parity
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.deploy import cli
from penstock.deploy.launch.endpoints import MetricsEndpoint, Samples, scrape
from penstock.deploy.report.telemetry import Update
from penstock.deploy.watch.flow import bottleneck
from penstock.deploy.watch.gathering import Gatherer, read_redis
from penstock.deploy.watch.scraped import Scraped
from penstock.deploy.watch.screen import all_views, one_view
from penstock.deploy.watch.snapshot import Pauses, ProducerSeen, RedisSeen, RunSnapshot
from penstock.deploy.watch.text import number, size, sparkline
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.schemas.config import EnvironmentConfig, MetricsConfig, ModelConfig, RunConfig, load_config
from penstock.schemas.heartbeat import Heartbeat, InFlight, encode_heartbeat
from penstock.schemas.keys import Keys
from penstock.schemas.metrics import LAG_LABELS, lag_key
from penstock.schemas.process.prometheus import register_metrics_port
from penstock.schemas.process.redis_url import connection_file
from penstock.schemas.producer_parity import ProducerParity
from real_server import RealServer
from resilient_producer import ResilientProducer
from scripted_learner import ScriptedLearner
from short_run import ShortRun
from terminal import Terminal
from waiting import wait_for
from wire_examples import FINGERPRINT

ROOT = Path(__file__).parents[3]
CONFIG = RunConfig(
    name="r",
    num_updates=100,
    groups_per_batch=8,
    model=ModelConfig(path="m"),
    environment=EnvironmentConfig(path="a:B"),
)
BEGAN_S = 1e9


def heartbeat(producer_id: str, **changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {
        "producer_id": producer_id, "host": "h", "pid": 1, "policy_version": 7,
        "in_flight": (InFlight(index=1, claimed_s=0.0, attempt=1),) * 5, "tokens_per_s": 2500.0,
        "num_tokens_generated": 0, "num_groups_appended": 0, "num_weight_loads_failed": 0, "metrics_port": 0,
        "fingerprint": FINGERPRINT, "sent_s": 0.0,
    }  # fmt: skip
    return Heartbeat(**fields | changes)


def line(update: int, *, wait_s: float = 0.1, time_s: float | None = None, **changes: Any) -> dict[str, Any]:
    """A line of updates.jsonl."""
    fields: dict[str, Any] = {
        "update": update, "policy_version": update, "time_s": BEGAN_S + update if time_s is None else time_s,
        "lag_histogram": {"0": 100, "1": 300, "3": 40, "9": 10},
        "num_tokens_trained": 440, "num_tokens_masked_lag": 10, "num_tokens_rejected": 0,
        "num_groups_trained": 6, "num_groups_skipped": 2, "num_optimizer_steps": 1, "steps_skipped": {},
        "environments": {}, "fill_skipped_groups": 0, "fill_skipped_tokens": 0, "credit": 24,
        "skipped_reason": None, "queue_depth": 5, "wait_s": wait_s, "step_s": 0.6, "publish_s": 0.1,
        "reward": update / 100, "loss": 0.1, "grad_norm": 0.5, "learning_rate": 2e-4, "entropy": 0.7,
        "policy_clipped_frac": 0.01, "rollout_correction/k3_kl": 1e-3, "mismatch_lag0": 2e-6, "ess_fraction": 0.97,
        "applied_ess_fraction": 0.98, "chi2": 0.03, "weight_mean": 0.99,
    }  # fmt: skip
    for label, num_tokens in zip(LAG_LABELS, (60, 40, 300, 40, 0, 0), strict=True):
        fields[lag_key("num_tokens", label)] = float(num_tokens)
        if num_tokens:
            for name in ("ess_fraction", "applied_ess_fraction", "chi2", "k3_kl", "weight_mean", "masked_frac"):
                fields[lag_key(name, label)] = 0.25 if label == "2-3" else 0.5
    return fields | changes


def updates(count: int = 30, **changes: Any) -> tuple[Update, ...]:
    from penstock.deploy.report.telemetry import to_record

    return tuple(to_record(line(n, **changes), Update) for n in range(1, count + 1))


def redis_seen(**changes: Any) -> RedisSeen:
    fields: dict[str, Any] = {
        "producers": {
            "producer-0": ProducerSeen(heartbeat("producer-0"), 1),
            "producer-1": ProducerSeen(heartbeat("producer-1"), 0),
        },
        "num_prompts": 12, "num_claimed": 9, "num_stream_entries": 3, "finished": False, "has_trainer": True,
    }  # fmt: skip
    return RedisSeen(**fields | changes)


def snapshot(**changes: Any) -> RunSnapshot:
    fields: dict[str, Any] = {
        "name": "r", "config": CONFIG, "redis": redis_seen(), "updates": updates(),
        "producers": ("producer-0", "producer-1"), "time_s": BEGAN_S + 35,
    }  # fmt: skip
    return RunSnapshot(**fields | changes)


def shown(seen: RunSnapshot, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(all_views(seen, width))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "wanted"),
    [
        ([], 10, ""),
        ([1.0], 10, "▄"),
        ([0.0, 1.0], 10, "▁█"),
        ([5.0] * 4, 10, "▄▄▄▄"),
        ([0, 0, 4, 4, 8, 8], 3, "▁▅█"),
        ([float("nan"), 1.0, 2.0], 5, "▁█"),
        ([0, 1.7e308, -1.7e308], 10, "▅█▁"),
        ([0.0, 0.0, 1.7e308, 1.7e308], 2, "▁█"),
        ([-5e-324, 5e-324], 10, "▁█"),
    ],
)
def test_a_sparkline_shows_the_course_in_the_room_it_has(values, width, wanted):
    assert sparkline(values, width) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, "-"), (0.0, "0"), (0.98765, "0.9877"), (12345.6, "12,346"), (1.23e-6, "1.2e-06"), (3.14159, "3.142"),
     (float("inf"), "-"), (-0.02, "-0.0200"), (-1.7e308, "-1.7e+308")],
)  # fmt: skip
def test_a_number_is_short_and_says_something(value, wanted):
    assert number(value) == wanted


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"updates": updates(wait_s=2.0)}, "producers"),
        ({"updates": updates(wait_s=2.0), "pauses": {"producer-0": Pauses(((0.0, 30.0),))}}, "weight updates"),
        ({"updates": updates(wait_s=0.01)}, "nobody"),
        ({"updates": updates(wait_s=0.01, queue_depth=24)}, "trainer"),
        ({"updates": ()}, "start"),
        ({"redis": None, "without_redis": "refused", "trainer": Samples("")}, "Redis"),
        ({"redis": redis_seen(producers={})}, "producers"),
        ({"redis": redis_seen(has_trainer=False)}, "trainer"),
        ({"updates": updates(time_s=1000.0)}, "trainer"),
        ({"updates": updates(time_s=1000.0), "trainer": Samples("penstock_abandoned_groups 3\n")}, "agents"),
        ({"updates": (), "trainer": Samples("penstock_abandoned_groups 3\n")}, "agents"),
        ({"updates": updates(wait_s=0.01), "trainer": Samples("penstock_abandoned_groups 1\n")}, "nobody"),
        ({"is_over": True}, ""),
        ({"redis": None}, ""),
    ],
    ids=[
        "waits",
        "pauses",
        "even",
        "full",
        "begins",
        "no redis",
        "no producer",
        "no trainer",
        "silent",
        "no agent",
        "no agent yet",
        "one agent less",
        "over",
        "ended",
    ],
)
def test_the_bottleneck_is_named(changes, part):
    named, why = bottleneck(snapshot(**changes))
    assert named == part and bool(why) == bool(part)


def test_the_groups_that_wait_are_those_of_now_in_the_reason_as_in_the_table():
    # As of the last batch, 12 prompts were open and 12 groups ready; Redis has 2 prompts left now.
    gauges = Samples("penstock_groups_open 24\npenstock_prompts_open 12\npenstock_credit_groups 24\n")
    seen = snapshot(
        config=None, redis=redis_seen(num_prompts=2, num_claimed=2), trainer=gauges, updates=updates(wait_s=0.01)
    )
    part, why = bottleneck(seen)
    assert part == "trainer" and "22 of 24 groups wait" in why
    assert "ready to train   free credit" in shown(seen) and seen.num_ready == 22


def test_the_share_of_pauses_of_a_young_producer_is_of_its_own_time(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder, now_s = write_run(tmp_path, finished=True), time.time()
    lines = [{"event": "weights", "time_s": now_s - 20 + n, "policy_version": n, "pause_s": 0.5} for n in range(20)]
    (folder / "producers" / "young.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    update = json.dumps(line(30, time_s=now_s))
    (folder / "updates.jsonl").write_text(update + "\n")
    share = Gatherer("r", folder, CONFIG).gather().pauses["young"].share
    assert share == pytest.approx(10 / 20.5, rel=0.1)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_views_fit_the_width_they_have(width):
    pauses = {"producer-0": Pauses(((0.0, 0.023), (1.0, 0.031)))}
    text = shown(snapshot(pauses=pauses), width)
    assert max(map(len, text.splitlines())) <= width
    words = ("waited for", "busy", "updates/s", "producer-0", "2,500", "27 ms", "5,000 tokens/s", "credit", "24",
             "reward", "entropy", "KL to behavior", "clip fraction", "gradient norm", "learning rate", "0.3000",
             "lag of sampled tokens", "0-mixed", "2-3", "8+", "mismatch at lag 0", "2.0e-06", "1.0e-05",
             "within")  # fmt: skip
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("name", ["producer-0", "producer-of-some-far-pod-a1b2c3"])
def test_a_producers_name_and_its_numbers_are_whole_in_80_columns(name):
    long = heartbeat(name, tokens_per_s=123456.0)
    pauses = {name: Pauses(((0.0, 1.234),) * 48)}
    found = ProducerParity(producer_id=name, gap=1.2e-3)
    seen = snapshot(
        redis=redis_seen(producers={name: ProducerSeen(long, 1, None, found)}),
        producers=(name, "producer-1"),
        pauses=pauses,
        starting=frozenset({"producer-1"}),
    )
    rows = shown(seen).partition("producer ")[2].splitlines()
    assert "…" not in "".join(rows) and max(map(len, rows)) <= 80
    assert rows[0].split() == ["policy", "lag", "tokens/s", "groups", "mismatch", "pauses", "p50", "longest", "paused"]
    at = next(n for n, row in enumerate(rows) if row.startswith(name[:10]))
    assert name in "".join(row[:11].strip() for row in rows[at : at + 4])
    assert rows[at].split()[1:] == [*["7", "1", "123,456", "5", "1.2e-03", "48", "1,234", "ms", "1,234", "ms"], "99%"]


@pytest.mark.redis
def test_a_quarantined_producer_is_red_and_named_with_what_its_rows_show(redis_client):
    keys = Keys("r")
    for name, instance in INSTANCES.items():
        redis_client.set(keys.producer(name), encode_heartbeat(heartbeat(name, instance=instance)))
    write_parity(redis_client, keys)
    seen = snapshot(redis=read_redis(redis_client, keys, {}), producers=())
    told = shown(seen, 120)
    rows = {row.split()[0]: row.split() for row in told.splitlines() if row.split()[:1] and row.split()[0] in INSTANCES}
    assert {name: row[5] for name, row in rows.items()} == {
        "sound": "2.0e-04", "bad": "3.1e-01", "again": "-", "torn": "-", "deep": "-",
    }  # fmt: skip
    said = [line for line in told.splitlines() if "quarantined" in line]
    assert said == [r"bad: quarantined: engine and trainer differ \x1b[2J[bold] by 0.31 nats"]
    assert "\x1b" not in told and "of before" not in told
    console = Console(file=io.StringIO(), width=120, force_terminal=True, legacy_windows=False)
    console.print(one_view(seen, 1, 120))
    red = [line for line in console.file.getvalue().splitlines() if line.startswith("\x1b[31m")]
    names = [line.removeprefix("\x1b[31m").split()[0] for line in red]
    assert [name for name in names if name.rstrip(":") in INSTANCES] == ["bad", "bad:"]


def test_a_producer_that_boots_is_not_called_gone():
    seen = snapshot(redis=redis_seen(producers={}), starting=frozenset({"producer-1"}), updates=())
    rows = {text.split()[0]: text.split()[1] for text in shown(seen).splitlines() if text.startswith("producer-")}
    assert rows == {"producer-0": "gone", "producer-1": "starting"}
    assert bottleneck(seen) == ("start", "the producers are starting")


def test_a_producer_that_answers_without_a_token_sampled_is_starting(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path, finished=False)  # producer-0 has lines of before its restart
    metrics = ProducerMetrics(run="r", producer="producer-0")
    gatherer = Gatherer("r", folder, CONFIG)
    port = metrics.registry.serve(MetricsConfig(port=0), folder, "producer-0")
    try:
        assert port and gatherer.gather().starting == {"producer-0"} and gatherer.gather().is_running
        metrics.tokens_generated.inc(5)
        assert not gatherer.gather().starting
    finally:
        metrics.registry.close()


def test_a_lag_bucket_that_hardly_counts_and_a_mismatch_out_of_its_band_stand_out():
    seen = snapshot(updates=updates(mismatch_lag0=3e-5))
    assert "ABOVE ITS BAND" in shown(seen)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    console.print(one_view(seen, 3, 100))
    assert "\x1b[1;31m0.2500" in console.file.getvalue(), "ESS 0.25 at lag 2-3"


def test_how_policies_travel_is_told_in_one_line():
    figures = {"weight_changed_frac": 0.08, "weight_chunk_bytes": 118_204, "publish_blocked_s": 0.004,
               "weight_chain": 9, "weight_redis_bytes": 3_170_240}  # fmt: skip
    redis = redis_seen(
        producers={
            "producer-0": ProducerSeen(heartbeat("producer-0"), 1, BEGAN_S + 35),
            "producer-1": ProducerSeen(heartbeat("producer-1"), 0, BEGAN_S + 31),
        }
    )
    seen = snapshot(updates=updates(**figures), redis=redis, rebuilt={"new": 2, "wrong": 1, "dirty": 3})
    (told,) = (line for line in shown(seen, 200).splitlines() if line.startswith("weights"))
    assert "8.0% changed by an update  118 kB each  training held up 4 ms  9 deltas on the anchor" in told
    assert "3.2 MB in Redis  oldest held 4 s: producer-1  copies rebuilt: dirty 3, wrong 1" in told
    assert "weights" not in shown(snapshot(redis=None)).split("Learning")[0].split("trainer")[0]
    alone = snapshot(updates=(), redis=redis)
    assert "weights  oldest held 4 s: producer-1" in shown(alone)


@pytest.mark.parametrize(
    ("num_bytes", "wanted"),
    [(0, "0 B"), (950, "950 B"), (1000, "1.0 kB"), (118_204, "118 kB"), (3_170_240, "3.2 MB"), (16e9, "16 GB"),
     (4e12, "4000 GB")],
)  # fmt: skip
def test_a_size_is_short(num_bytes, wanted):
    assert size(num_bytes) == wanted


def test_the_age_of_a_policy_is_read_once_and_copies_that_were_rebuilt_are_counted(redis_client):
    keys = Keys("r")
    for version, manifest in ((7, {"created_s": 12.5, "chunks": [1]}), (8, {}), (9, b"\xff")):
        value = manifest if isinstance(manifest, bytes) else json.dumps(manifest)
        redis_client.xadd(keys.policy, {"manifest": value}, id=f"{version}-1")
    for version in (7, 8, 9, 10):
        redis_client.set(
            keys.producer(f"p{version}"), encode_heartbeat(heartbeat(f"p{version}", policy_version=version))
        )
    known: dict[int, float] = {}
    assert read_redis(redis_client, keys, known).producers["p7"].announced_s == 12.5 and known == {7: 12.5}
    redis_client.delete(keys.policy)
    assert read_redis(redis_client, keys, known).producers["p7"].announced_s == 12.5


def test_copies_of_weights_that_were_rebuilt_are_counted_over_all_producers(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    metrics = {name: ProducerMetrics(run="r", producer=name) for name in ("producer-0", "producer-1")}
    for name, reason in (
        ("producer-0", "new"),
        ("producer-0", "wrong"),
        ("producer-0", "dirty"),
        ("producer-1", "dirty"),
    ):
        metrics[name].copies_rebuilt.labels(reason).inc()
    folder = write_run(tmp_path, finished=False)
    try:
        for name, each in metrics.items():
            each.registry.serve(MetricsConfig(port=0), folder, name)
        assert Gatherer("r", folder, CONFIG).gather().rebuilt == {"new": 1, "wrong": 1, "dirty": 2}
    finally:
        for each in metrics.values():
            each.registry.close()


def test_what_does_not_answer_is_named_and_the_rest_is_shown():
    gone = shown(snapshot(redis=redis_seen(producers={"producer-0": ProducerSeen(heartbeat("producer-0"), 1)})))
    (row,) = [text.split() for text in gone.splitlines() if text.startswith("producer-1")]
    assert row[1] == "gone"
    text = shown(snapshot(redis=None, without_redis="Connection refused", trainer=Samples("")))
    assert "Redis does not answer: Connection refused" in text and "producer-1" in text and "gradient norm" in text
    text = shown(snapshot(without_trainer="timed out"))
    assert "its metrics cannot be read: timed out" in text and "busy" in text


def test_text_of_producers_does_not_steer_the_terminal():
    hostile = heartbeat("p\x1b[2J", last_error="\x1b]0;title\x07 [bold]no\nmore")
    text = shown(snapshot(redis=redis_seen(producers={hostile.producer_id: ProducerSeen(hostile, None)}), producers=()))
    assert "\x1b" not in text and "\x07" not in text and "p\\x1b[2J" in text and "[bold]no\\nmore" in text


@pytest.fixture
def trainer_endpoint() -> Iterator[tuple[TrainerMetrics, int]]:
    metrics = TrainerMetrics()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    yield metrics, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_trainer_without_its_folder_is_told_by_its_metrics(trainer_endpoint):
    metrics, port = trainer_endpoint
    scraped = Scraped()

    def look() -> None:
        (endpoint,) = scrape([("trainer", f"127.0.0.1:{port}")])
        assert endpoint.samples is not None, endpoint.problem
        scraped.add([endpoint], time.time())

    look()
    assert list(scraped.updates) == [], "nothing was trained yet"
    metrics.record(line(1, wait_s=0.3))
    look()
    look()
    for n in (2, 3):
        metrics.record(line(n, wait_s=0.5))
    metrics.evaluate({"reward": 0.75, "reward/exact": 0.5}, {})
    look()
    first, last = scraped.updates
    assert (first.update, last.update, last.policy_version, last.queue_depth) == (1, 3, 3, 5)
    assert (first.wait_s, last.wait_s, last.step_s) == pytest.approx((0.3, 0.5, 0.6))
    assert last.num_tokens_trained == 440 and last.metrics["reward"] == 0.03
    assert last.metrics["ess_fraction/lag_2-3"] == 0.25 and "ess_fraction/lag_8+" not in last.metrics
    assert [point.figures for point in scraped.evaluations] == [{"reward": 0.75, "reward/exact": 0.5}]
    text = shown(snapshot(updates=tuple(scraped.updates), evaluations=tuple(scraped.evaluations)))
    assert "0.7500" in text and "wait" in text


def test_pauses_of_a_producer_elsewhere_come_from_its_metrics():
    metrics, scraped = ProducerMetrics(), Scraped()
    for pauses in ((), (0.02, 0.04), ()):
        for pause_s in pauses:
            metrics.pause_s.observe(pause_s)
        text = generate_latest(metrics.registry).decode()
        scraped.add([MetricsEndpoint("far", "a:1", Samples(text))], 100.0)
    assert list(scraped.pauses["far"]) == [(100.0, pytest.approx(0.03))] * 2


def test_an_endpoint_that_does_not_answer_is_a_problem_not_an_error():
    (nobody,) = scrape([("trainer", "127.0.0.1:1")])
    assert nobody.samples is None and "refused" in nobody.problem
    (nowhere,) = scrape([("trainer", "no-such-host.invalid:1")])
    assert nowhere.samples is None and nowhere.problem


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that says `answer` to everybody."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"-ERR unknown command 'GET'\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na 1\n",
        b"HTTP/1.1 200 OK\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe",
        b'HTTP/1.1 200 OK\r\n\r\na{x="1", ="2"} 3\n',
        b"HTTP/1.1 404 Not Found\r\n\r\n",
    ],
)
def test_an_endpoint_that_talks_otherwise_is_a_problem_not_an_error(answer):
    with answering(answer) as address:
        (seen,) = scrape([("trainer", address)])
    assert seen.samples is None and seen.problem


@pytest.mark.parametrize("host", ["a b", "a\x00b", "a\r\nHost: c", "ü" * 70, "[::1", "a:b", "", ".", "a\x7f"])
def test_a_host_that_is_none_is_a_problem_not_an_error(host, tmp_path, monkeypatch, capsys):
    (seen,) = scrape([("producer-0", f"{host}:1")])
    assert seen.samples is None and seen.problem
    monkeypatch.delenv("REDIS_URL", raising=False)
    register_metrics_port(write_run(tmp_path, finished=False), "trainer", host, 1)
    assert cli.main(["watch", "r", "--runs", str(tmp_path), "--once"]) == 0
    assert "update 30/30" in capsys.readouterr().out


def write_run(runs: Path, *, finished: bool, num_updates: int = 30) -> Path:
    folder = runs / "r"
    (folder / "producers").mkdir(parents=True)
    (folder / "run.toml").write_text('name = "r"\nnum_updates = 30\n[model]\npath = "m"\n[environment]\npath = "a:B"\n')
    now_s = time.time()
    rows = [line(n, time_s=now_s - 7200 + n) for n in range(1, num_updates + 1)]
    (folder / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"update": 31, "tor')
    point = {"policy_version": 20, "update": 20, "reward": 0.875, "num_prompts": 8, "time_s": now_s - 7100}
    (folder / "evaluations.jsonl").write_text(json.dumps(point) + "\n")
    pause = {"event": "weights", "time_s": now_s - 7175, "policy_version": 20, "pause_s": 0.017}
    (folder / "producers" / "producer-0.jsonl").write_text(json.dumps(pause) + "\nnot json\n")
    ledger = {"finished": finished, "num_updates": num_updates}
    (folder / "trainer.json").write_text(json.dumps(ledger))
    return folder


@pytest.mark.parametrize("by", ["name", "folder", "run file"])
def test_a_finished_run_is_shown_from_its_folder(by, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path / "runs", finished=True)
    run = {"name": "r", "folder": str(folder), "run file": str(folder / "run.toml")}[by]
    assert cli.main(["watch", run, "--runs", str(tmp_path / "runs"), "--once"]) == 0
    text = capsys.readouterr().out
    assert "update 30/30" in text and "over: finished" in text and "120 min ago" in text
    assert "17 ms" in text and "0.8750" in text and "waited for" not in text
    assert not (folder / "lock").exists(), "nothing is started or locked to look at it"


def test_a_run_that_was_stopped_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    write_run(tmp_path / "runs", finished=False)
    assert cli.main(["watch", "r", "--runs", str(tmp_path / "runs")]) == 0
    assert "not running; last update" in capsys.readouterr().out


def test_a_run_continued_after_its_end_is_not_over(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path, finished=True)
    (folder / "trainer.json").write_text(json.dumps({"finished": True, "num_updates": 20}))
    assert not Gatherer("r", folder, load_config(folder / "run.toml")).gather().is_over


def test_a_trainer_whose_target_is_stale_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path, finished=False)
    register_metrics_port(folder, "trainer", "127.0.0.1", 1)
    (folder / "metrics" / "odd.json").write_text("{")
    seen = Gatherer("r", folder, CONFIG).gather()
    assert seen.trainer is None and "refused" in seen.without_trainer and len(seen.updates) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["watch", "nothing"], "penstock: nothing: neither a folder nor a run in runs"),
        (["watch", "runs"], "penstock: runs: a folder without run.toml, so no run"),
        (["watch", "odd.toml"], "penstock: odd.toml: not TOML"),
        (["watch", "r", "--metrics", "http://h:1/metrics"], "--metrics http://h:1/metrics: expected HOST:PORT"),
    ],
)
def test_a_run_that_is_none_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REDIS_URL", raising=False)
    write_run(tmp_path / "runs", finished=True)
    (tmp_path / "odd.toml").write_text("name = ")
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.redis
def test_a_name_that_redis_does_not_know_is_refused(redis_url, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert cli.main(["watch", "nobody", "--runs", str(tmp_path), "--once"]) == 2
    assert "nor a run in" in capsys.readouterr().err
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert cli.main(["watch", "nobody", "--runs", str(tmp_path), "--once"]) == 1
    assert "no Redis answers" in capsys.readouterr().err


class SlowLearner(ScriptedLearner):
    """Takes so long that its run is looked at before the end, unless `is_seen`."""

    is_seen: threading.Event

    def step(self, batch):
        self.is_seen.wait(0.05 if self.num_steps < 100 else 1.0)
        return super().step(batch)


def slow_learner(monkeypatch) -> threading.Event:
    """For the next trainer; returns what ends its slowness."""
    monkeypatch.setattr("penstock.consumers.__main__.load_learner", SlowLearner)
    SlowLearner.is_seen = threading.Event()
    return SlowLearner.is_seen


@pytest.mark.redis
def test_a_live_run_is_seen_through_its_redis_with_its_folder_and_without(redis_url, tmp_path, monkeypatch, capsys):
    run = ShortRun(redis_url, tmp_path / "runs", monkeypatch, num_updates=400)
    is_seen = slow_learner(monkeypatch)
    producer = ResilientProducer(redis_url, "test", None)
    try:
        producer.start()
        trainer = run.trainer()
        port = trainer.run_log.metrics.serve(MetricsConfig(port=0), run.folder)
        run.train(trainer)
        gatherer = Gatherer("test", run.folder, run.config)
        seen = wait_for(gatherer.gather, lambda seen: len(seen.updates) > 5)
        assert seen.redis.has_trainer and seen.is_running and not seen.is_over
        assert seen.credit == run.config.credit and seen.shares and seen.trainer is not None
        assert 0 <= seen.redis.num_claimed <= seen.redis.num_prompts <= run.config.credit
        assert seen.evaluations[0].reward is not None
        # From elsewhere: no folder, the trainer's endpoint named by hand.
        far = Gatherer("test", None, None, [f"127.0.0.1:{port}"])
        seen = wait_for(far.gather, lambda seen: len(seen.updates) > 2)
        assert seen.credit == run.config.credit and seen.shares and seen.newest.metrics["reward"] > 0
        assert (
            cli.main(["watch", "test", "--runs", str(tmp_path / "none"), "--once", "--metrics", f"127.0.0.1:{port}"])
            == 0
        )
        assert "waited for" in capsys.readouterr().out
    finally:
        is_seen.set()
        producer.stop.set()
        run.close()
        producer.join()


@pytest.mark.redis
def test_a_redis_that_goes_and_comes_back_elsewhere_is_shown_as_it_is(server_binary, tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = write_run(tmp_path, finished=False)
    file = connection_file(folder)
    file.parent.mkdir()
    gatherer = Gatherer("r", folder, CONFIG)
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


def test_keys_choose_the_view_a_resize_is_followed_and_q_leaves_the_terminal_as_it_was(tmp_path, at_a_terminal):
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
    assert terminal.wait() == 0
    assert terminal.attributes_now() == terminal.attributes
    assert "\x1b[?1049l" in terminal.output and "\x1b[?25h" in terminal.output, "the screen and the cursor are back"


@pytest.mark.redis
def test_a_live_run_is_drawn_until_its_end_and_beyond(redis_url, tmp_path, monkeypatch, at_a_terminal):
    run = ShortRun(redis_url, tmp_path, monkeypatch, num_updates=300)
    is_seen = slow_learner(monkeypatch)
    producer = ResilientProducer(redis_url, "test", None)
    try:
        producer.start()
        trainer = run.trainer()
        trainer.run_log.metrics.serve(MetricsConfig(port=0), run.folder)
        training = run.train(trainer)
        terminal = at_a_terminal("test", width=80)
        first = terminal.wait_for(lambda frame: has("waited for")(frame) and has("credit")(frame))
        update = next(text.split()[2] for text in first if text.startswith("test  update"))
        terminal.wait_for(lambda frame: has("/300")(frame) and not has(f" {update} ")(frame))
        terminal.press("2")
        terminal.wait_for(has("reward"))
        is_seen.set()
        training.join()
        terminal.wait_for(lambda frame: has("update 300/300")(frame) and has("over: finished")(frame))
        terminal.press("q")
        assert terminal.wait() == 0
    finally:
        is_seen.set()
        producer.stop.set()
        run.close()
        producer.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_terminal_as_it_was(number, tmp_path, at_a_terminal):
    write_run(tmp_path, finished=False)
    terminal = at_a_terminal("r")
    terminal.wait_for(has("not running"))
    terminal.process.send_signal(number)
    assert terminal.wait() == 0
    assert terminal.attributes_now() == terminal.attributes and "Traceback" not in terminal.output
    assert "\x1b[?1049l" in terminal.output


def test_once_prints_every_view_on_a_terminal_too(tmp_path, at_a_terminal):
    write_run(tmp_path, finished=True)
    terminal = at_a_terminal("r", "--once", width=80)
    assert terminal.wait() == 0
    assert "\x1b[?1049h" not in terminal.output and "mismatch at lag 0" in terminal.output
