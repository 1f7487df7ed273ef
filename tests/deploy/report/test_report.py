"""The page of a run: whole, self-contained, escaped, and its figures those of the telemetry."""

import json
import math
import random
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import run_lines
import wire_examples
from docs.run_picture import NAMES, write_picture
from parsed_page import ParsedPage
from penstock.deploy.report.figures import FIGURES, draw
from penstock.deploy.report.report import write_report
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import table_rows
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.metrics import LAG_LABELS, TRAINER_GAUGES_BY_LAG, UPDATE_METRICS, lag_key
from run_lines import ledger_line, write_lines

START_S = 1_760_000_000.0
RUN_FILE = """
name = "demo"
seed = 7
num_updates = {num_updates}
max_lag = 2
[model]
path = "models/<b>demo</b>"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""
FINGERPRINT = msgspec.to_builtins(wire_examples.FINGERPRINT)
# One worker makes the page that most tests read.
pytestmark = pytest.mark.xdist_group("report")


def update_line(k: int, chance: random.Random) -> dict:
    """A line with every metric of the table, also of every lag bucket."""
    tokens = {"0": 120, "1": 400, "2": 160, **({"3": chance.randrange(1, 12)} if k % 3 else {"5": 40})}
    by_lag = [lag_key(name, label) for name in TRAINER_GAUGES_BY_LAG for label in LAG_LABELS]
    numbers = {key: 0.3 + 0.2 * chance.random() for key in (*UPDATE_METRICS, *by_lag, "reward/exact", "reward/form")}
    times = {"time_s": START_S + 1.5 + 0.24 * k, "wait_s": 0.06 * chance.random(), "step_s": 0.17, "publish_s": 0.01}
    counts = {"num_tokens_trained": 680, "num_tokens_masked_lag": tokens.get("3", 40), "num_groups_trained": 24}
    counts |= {"num_groups_skipped": 8, "policy_version": k, "queue_depth": chance.randrange(40)}
    return run_lines.update_line(k, **numbers | times | counts, lag_histogram=tokens)


def write_run(
    folder: Path, *, num_updates: int = 40, producers: tuple[str, ...] = ("producer-0", "producer-1")
) -> Path:
    """A run folder as a run of `num_updates` updates leaves it, drawn from a fixed seed."""
    chance = random.Random(5)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_FILE.format(num_updates=num_updates))
    write_lines(folder / "updates.jsonl", *(update_line(k, chance) for k in range(1, num_updates + 1)))
    evaluations = [
        {"policy_version": k, "update": k, "reward": 0.41 + k / 1000, "reward/exact": 0.3 + k / 100, "num_prompts": 256,
         "time_s": START_S + 1.8 + 0.24 * k}
        for k in range(0, num_updates + 1, 10)
    ]  # fmt: skip
    write_lines(folder / "evaluations.jsonl", *evaluations)
    for producer in producers:
        events: list[dict] = [{"event": "start", "time_s": START_S - 9, "fingerprint": FINGERPRINT}]
        events += [
            {"event": "rate", "time_s": START_S + 2.0 * n, "tokens_per_s": 0, "num_tokens": 7000 * n} for n in range(9)
        ]
        events += [
            {"event": "weights", "time_s": START_S + 1.6 + 0.24 * k, "policy_version": k,
             "pause_s": 0.034 + chance.expovariate(300)}
            for k in range(num_updates)
        ]  # fmt: skip
        write_lines(folder / "producers" / f"{producer}.jsonl", *events)
    counts = {"released": 9696, "trained": 24 * num_updates, "skipped": 8 * num_updates, "dead": 0, "cancelled": 96}
    write_lines(folder / "trainer.json", ledger_line(num_updates, **counts) | {"first_prompt_s": START_S})
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    return summarize(read_telemetry(folder))


def page_of(folder: Path) -> ParsedPage:
    return ParsedPage(write_report(folder)[1].read_text(encoding="utf-8"))


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but not made pictures of, which takes most of the time: for tests of the text beside them."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: file.write("<svg></svg>"))


def test_the_report_holds_every_figure_and_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    page, report = page_of(folder), (folder / "report.html").read_text(encoding="utf-8")
    assert page.open == [] and page.figures == [spec.name for spec in FIGURES]
    assert page.tags.count("svg") == len(FIGURES)
    for spec in FIGURES:
        assert spec.title in page.texts and spec.caption in page.texts
    shown = [*(text for row in table_rows(summary_of(folder)) for text in row), "2025-10-09 08:53 UTC · asynchronous"]
    assert [text for text in shown if text not in page.texts and text not in page.text] == []
    assert "main (penstock.producers.environments.arithmetic:Arithmetic)" in page.text
    assert not {"script", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    links = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
    assert links and all(value.startswith(("#", "data:")) for value in links)
    assert not re.search(r"url\((?!#)", report)
    assert "@import" not in report and "<!DOCTYPE svg" not in report
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in links if value.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", report))
    assert targets and targets <= set(ids)
    write_picture(read_telemetry(folder), tmp_path / "pictures" / "run.png")
    data = (tmp_path / "pictures" / "run.png").read_bytes()
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert len(NAMES) == 4 and data.startswith(b"\x89PNG") and width > 1800 and height > 900


def drawn(name: str, telemetry: RunTelemetry) -> list[Axes]:
    spec = next(spec for spec in FIGURES if spec.name == name)
    figure = Figure()
    assert draw(spec, figure, telemetry)
    return figure.axes


def test_a_noisy_line_is_the_telemetry_itself(tmp_path: Path) -> None:
    telemetry = read_telemetry(write_run(tmp_path / "demo"))
    for figure, names in (
        ("ess-chi2", ["ess_fraction", "applied_ess_fraction", "chi2"]),
        ("kl", ["rollout_correction/kl", "rollout_correction/k3_kl"]),
        ("clip-fractions", ["rollout_correction/clipped_frac", "policy_clipped_frac"]),
        ("reference-kl", ["reference_kl"]),
        ("teacher-kl", ["teacher_kl"]),
        ("reward-parts", ["reward/exact", "reward/form"]),
        ("reward-spread", ["reward_std"]),
        ("completions", ["completion_tokens", "truncated_frac"]),
    ):
        raw = [line for ax in drawn(figure, telemetry) for line in ax.lines[::2]]
        assert [list(line.get_ydata()) for line in raw] == [
            [update.metrics[name] for update in telemetry.updates] for name in names
        ], figure


@pytest.mark.parametrize(("goal", "figure", "label"), [(0, "reward", "reward"), (0.45, "reward/exact", "exact")])
def test_learning_is_drawn_of_the_goals_figure_under_its_name(
    goal: float, figure: str, label: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "demo")
    setting = f'evaluation.goal = {{ figure = "{figure}", value = {goal} }}\n' if goal else ""
    (folder / "run.toml").write_text(setting + RUN_FILE.format(num_updates=40))
    telemetry = read_telemetry(folder)
    (ax,) = drawn("learning-by-update", telemetry)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == [f"{label} (training, sampled)", f"{label} (held out, greedy)"] + ["goal 0.45"] * bool(goal)
    assert list(ax.lines[0].get_ydata()) == [update.metrics[figure] for update in telemetry.updates]
    assert list(ax.lines[2].get_ydata()) == [point.figures[figure] for point in telemetry.evaluations]


def test_a_figure_without_numbers_is_left_out_and_one_update_is_enough(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=1)
    assert page_of(folder).tags.count("svg") == len(FIGURES)
    (line,) = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    applied = ("applied_", "weight_", "corrected_", "rejected_", "reference_")
    line = {key: value for key, value in line.items() if not key.startswith(applied)}
    write_lines(folder / "updates.jsonl", line | {"entropy": math.nan, "grad_norm": math.inf})
    gone = {"weight-by-lag", "rejected-by-lag", "reference-kl", "entropy", "grad-norm"}
    assert page_of(folder).figures == [spec.name for spec in FIGURES if spec.name not in gone]


def test_the_slowest_groups_are_linked_to_their_traces_if_there_are_any(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_updates=12)
    phases = {"queue": 1.0, "sample": 2.0, "step": 0.5}
    lines = [
        run_lines.update_line(
            k,
            group_s=phases | ({"publish": k / 10} if k > 1 else {}),
            slowest_groups=[
                {"index": k, "total_s": k + 0.5, "phases": phases, "trace_id": f"{k:032x}" if k < 12 else ""}
            ],
        )
        for k in range(1, 13)
    ]
    write_lines(folder / "updates.jsonl", *lines)
    (folder / "run.toml").write_text(
        RUN_FILE.format(num_updates=12) + '[metrics]\ntrace_url = "http://tempo/trace/{trace_id}?a=1&b=2"\n'
    )
    summary, page = write_report(folder)
    assert summary["group_s"] == phases | {"publish": pytest.approx(0.7)}
    assert [group["index"] for group in summary["slowest_groups"]] == list(range(12, 2, -1))
    text = page.read_text()
    assert f'<a href="http://tempo/trace/{11:032x}?a=1&amp;b=2">{11:032x}</a>' in text
    assert "<td>12</td><td>12.5</td><td>queue 1, sample 2, step 0.5</td><td>n/a</td>" in text
    assert "queue 1 s, sample 2 s, step 0.5 s, publish 0.7 s" in text


def test_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    producers = "<script>alert(1)<_script>", "$a$&b"
    folder = write_run(tmp_path / "demo", num_updates=5, producers=producers)
    with (folder / "run.toml").open("a") as file:
        file.write("# <script>alert(2)</script>\n")
    page = page_of(folder)
    assert "script" not in page.tags and "b" not in page.tags
    for text in (*producers, "<script>alert(2)</script>", "models/<b>demo</b>"):
        assert text in page.text


def test_an_empty_run_folder_gives_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    files = "run.toml, updates.jsonl, evaluations.jsonl, trainer.json, producers/*.jsonl"
    assert f"Missing files: {files}." in page.text and "not finished: 0 updates" in page.text
    assert "svg" not in page.tags


@pytest.mark.usefixtures("unrendered")
def test_the_report_of_a_run_that_is_not_over_says_so_and_as_of_when(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    assert summary_of(folder)["finished"] is True and "state" not in dict(table_rows(summary_of(folder)))
    assert "This run is not over" not in page_of(folder).text
    ledger = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({**ledger, "num_updates": 30}))  # of before a resume
    assert summary_of(folder)["finished"] is False
    (folder / "trainer.json").write_text(json.dumps({**ledger, "num_updates": 25, "finished": False}))
    for name in ("updates.jsonl", "evaluations.jsonl", "producers/producer-1.jsonl"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-7])  # each is being written just now
    began_s = time.time()
    summary, text = summary_of(folder), page_of(folder).text
    assert summary["finished"] is False and began_s <= summary["as_of_s"] <= time.time()
    assert summary["num_updates"] == 39 and summary["num_torn_lines"] == 3
    stated = re.search(r"This run is not over, as of ([\d-]+ [\d:]+) UTC; the last update was [\d,]+ s before\.", text)
    assert stated and began_s - 1 <= datetime.fromisoformat(f"{stated[1]}+00:00").timestamp() <= time.time()
    assert "not finished: 39 of 40 updates" in text
    assert dict(table_rows(summary))["state"].startswith("not over, as of ")
    assert not list(folder.glob("*.partial*"))
