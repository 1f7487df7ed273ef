import json
import math
import random
import re
import time
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.run_picture import NAMES, write_picture
from penstock.deploy.report.figures import FIGURES, draw
from penstock.deploy.report.report import key_figures, write_report
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import table_rows
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.metrics import LAG_LABELS

START_S = 1_760_000_000.0
RUN_FILE = """
name = "{name}"
seed = 7
num_updates = {num_updates}
max_lag = 2
[model]
path = "models/<b>demo</b>"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
[trainer]
learning_rate = 2e-4
max_grad_norm = 1.0
"""
FINGERPRINT = {
    "engine": "vllm",
    "version": "0.32.0",
    "model": "models/demo",
    "dtype": "float32",
    "head_dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "prefix_caching": False,
    "async_scheduling": False,
}
# One worker makes the page that most tests read.
pytestmark = pytest.mark.xdist_group("report")


def diagnostics(tokens: list[int], chance: random.Random) -> dict[str, float]:
    """Numbers of a drift that grows with the lag; `tokens` by lag."""
    found = {
        "rollout_correction/kl": chance.gauss(2e-4, 4e-4),
        "rollout_correction/k3_kl": abs(chance.gauss(6e-4, 2e-4)),
        "rollout_correction/clipped_frac": abs(chance.gauss(2e-4, 2e-4)),
        "chi2": abs(chance.gauss(1.3e-3, 5e-4)),
        "ess_fraction": 1 - abs(chance.gauss(1.3e-3, 5e-4)),
        "applied_ess_fraction": 1 - abs(chance.gauss(8e-4, 3e-4)),
        "mismatch_lag0": 3e-6 * chance.random(),
    }
    counts = dict.fromkeys(LAG_LABELS, 0)
    for lag, count in enumerate(tokens):
        counts["0" if lag == 0 else "1" if lag == 1 else "2-3" if lag < 4 else "4-7"] += count
    for label, variance in zip(LAG_LABELS, (1e-9, 1e-5, 1e-3, 2.5e-3, 6e-3, 2e-2), strict=True):
        if counts[label]:
            k3 = variance / 2 * chance.uniform(0.5, 1.5)
            values = {
                "num_tokens": float(counts[label]),
                "kl": chance.gauss(k3, variance**0.5 / 10),
                "k3_kl": k3,
                "chi2": 2 * k3 * chance.uniform(0.8, 1.2),
                "ess_fraction": 1 / (1 + 2 * k3),
                "applied_ess_fraction": 1 / (1 + 1.5 * k3),
                "weight_mean": 1 - 2 * k3 + chance.gauss(0, variance**0.5 / 10),
                "corrected_frac": 4 * k3,
                "masked_frac": 2.5 * k3,
                "rejected_frac_positive": 2 * k3,
                "rejected_frac_negative": 3 * k3,
            }
            found |= {f"{name}/lag_{label}": value for name, value in values.items()}
    return found


def update_line(k: int, chance: random.Random) -> dict:
    progress = 1 - math.exp(-k / 120)
    tokens = [int(700 * chance.uniform(0.1, 0.25)), int(700 * chance.uniform(0.5, 0.7)), 160, int(12 * chance.random())]
    return {
        "update": k,
        "policy_version": k,
        "time_s": START_S + 1.5 + 0.24 * k + 0.02 * chance.random(),
        "reward": min(1.0, 0.38 + 0.6 * progress + chance.gauss(0, 0.03)),
        "reward/exact": min(1.0, 0.3 + 0.6 * progress + chance.gauss(0, 0.03)),
        "reward/form": min(1.0, 0.9 + chance.gauss(0, 0.03)),
        "reward_std": 0.4 * math.exp(-k / 150),
        "completion_tokens": 3 + 30 * progress + chance.gauss(0, 1),
        "truncated_frac": abs(chance.gauss(0.05, 0.02)),
        "loss": chance.gauss(0, 0.01),
        "reference_kl": 2e-4 * k * chance.uniform(0.9, 1.1),
        "teacher_kl": 1.5 * math.exp(-k / 80) * chance.uniform(0.9, 1.1),
        "entropy": 0.7 * math.exp(-k / 150) + 0.05 + chance.gauss(0, 0.01),
        "policy_clipped_frac": 0.0,
        **diagnostics(tokens[:3] if k % 50 else [*tokens[:3], 0, 40], chance),
        "grad_norm": 0.4 + chance.random() * 0.5 + (1.3 if k == 120 else 0),
        "learning_rate": 2e-4,
        "lag_histogram": {str(lag): count for lag, count in enumerate(tokens) if count},
        "num_tokens_trained": sum(tokens[:3]),
        "num_tokens_masked_lag": tokens[3],
        "num_groups_trained": 24,
        "num_groups_skipped": 8,
        "queue_depth": chance.randrange(0, 40),
        "skipped_reason": None,
        "wait_s": 0.06 * chance.random(),
        "step_s": 0.16 + 0.02 * chance.random(),
        "publish_s": 0.008 + 0.004 * chance.random(),
    }


def write_lines(file: Path, lines: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path, *, num_updates: int = 300, producers: tuple[str, ...] = ("producer-0", "producer-1")
) -> Path:
    """A run folder as a demo of `num_updates` updates leaves it, drawn from a fixed seed."""
    chance = random.Random(5)
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_FILE.format(name="demo", num_updates=num_updates))
    updates = [update_line(k, chance) for k in range(1, num_updates + 1)]
    write_lines(folder / "updates.jsonl", updates)
    evaluations = [
        {
            "policy_version": k,
            "update": k,
            "reward/exact": 0.3 + 0.55 * (1 - math.exp(-k / 110)),
            "reward": 0.41 + 0.55 * (1 - math.exp(-k / 110)),
            "num_prompts": 256,
            "num_failed": 0,
            "time_s": START_S + 1.8 + 0.24 * k,
        }
        for k in range(0, num_updates + 1, 25)
    ]
    write_lines(folder / "evaluations.jsonl", evaluations)
    end_s = updates[-1]["time_s"]
    for producer in producers:
        events: list[dict] = [{"event": "start", "time_s": START_S - 9, "fingerprint": FINGERPRINT}]
        num_tokens = 0
        for second in range(-8, int(end_s - START_S) + 3, 2):
            rate = 0 if second < 0 else 3600 + 300 * chance.random()
            num_tokens += int(2 * rate)
            event = {"event": "rate", "time_s": START_S + second, "tokens_per_s": rate, "num_tokens": num_tokens}
            events.append(event | {"in_flight": 32, "policy_version": 1})
        for k in range(num_updates):
            event = {"event": "weights", "time_s": START_S + 1.6 + 0.24 * k, "policy_version": k, "load_s": 0.012}
            pause_s = 0.034 + chance.expovariate(300) + (0.3 if k == 77 else 0)
            events.append(event | {"pause_s": pause_s, "prefetch_s": 0.004, "bytes": 1_300_000})
        write_lines(folder / "producers" / f"{producer}.jsonl", sorted(events, key=lambda event: event["time_s"]))
    ledger = {
        "num_updates": num_updates,
        "num_groups_released": 9696,
        "num_groups_trained": 24 * num_updates,
        "num_groups_skipped": 8 * num_updates,
        "num_groups_dead": 0,
        "num_groups_cancelled": 96,
        "num_tokens_trained": sum(line["num_tokens_trained"] for line in updates),
        "first_prompt_s": START_S,
        "last_update_s": end_s,
        "finished": True,
    }
    (folder / "trainer.json").write_text(json.dumps(ledger))
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    return summarize(read_telemetry(folder))


def page_of(folder: Path) -> Path:
    return write_report(folder)[1]


class ParsedPage(HTMLParser):
    """Every tag, attribute and visible text of a page, and the tags left open."""

    VOID = frozenset(("meta", "link", "br", "hr", "img", "input"))

    def __init__(self, source: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unexpected </{tag}>"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its report."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo")
    assert page_of(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def report(reported: Path) -> str:
    return (reported / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, but not made pictures of, which takes most of the time: for tests of the text beside them."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **settings: file.write("<svg></svg>"))


def test_the_report_holds_every_figure_with_its_caption_and_data(report: str) -> None:
    page = ParsedPage(report)
    assert page.open == []
    figures = [value for tag, name, value in page.attributes if tag == "figure" and name == "id"]
    assert figures == [spec.name for spec in FIGURES]
    assert page.tags.count("svg") == len(FIGURES)
    for spec in FIGURES:
        assert spec.title in page.texts and spec.caption in page.texts


def test_the_report_refers_to_nothing_outside_itself(report: str) -> None:
    page = ParsedPage(report)
    assert not {"script", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    references = [
        value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "data")
    ]
    assert references
    assert all(value.startswith(("#", "data:")) for value in references)
    assert not re.search(r"url\((?!#)", report)
    assert "@import" not in report and "<!DOCTYPE svg" not in report


def test_ids_are_unique_and_every_internal_reference_has_its_target(report: str) -> None:
    attributes = ParsedPage(report).attributes
    ids = [value for _, name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for _, name, value in attributes if name in ("href", "xlink:href") and value.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", report))
    assert targets and targets <= set(ids)


def test_the_head_shows_the_key_figures(report: str) -> None:
    text = " ".join(ParsedPage(report).texts)
    assert "0.410 → 0.924" in text
    assert "greedy, 256 problems" in text
    assert "2025-10-09 08:53 UTC · asynchronous" in text
    assert "300" in text and "2 producers" in text


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> RunTelemetry:
    return read_telemetry(write_run(tmp_path_factory.mktemp("runs") / "demo", num_updates=60))


def drawn(name: str, telemetry: RunTelemetry) -> list[Axes]:
    spec = next(spec for spec in FIGURES if spec.name == name)
    figure = Figure()
    assert draw(spec, figure, telemetry)
    return figure.axes


@pytest.mark.parametrize(
    ("figure", "names"),
    [
        ("ess-chi2", ["ess_fraction", "applied_ess_fraction", "chi2"]),
        ("kl", ["rollout_correction/kl", "rollout_correction/k3_kl"]),
        ("clip-fractions", ["rollout_correction/clipped_frac", "policy_clipped_frac"]),
        ("reference-kl", ["reference_kl"]),
        ("teacher-kl", ["teacher_kl"]),
        ("reward-parts", ["reward/exact", "reward/form"]),
        ("reward-spread", ["reward_std"]),
        ("completions", ["completion_tokens", "truncated_frac"]),
    ],
)
def test_a_noisy_line_is_the_telemetry_itself(telemetry: RunTelemetry, figure: str, names: list[str]) -> None:
    raw = [line for ax in drawn(figure, telemetry) for line in ax.lines[::2]]
    assert len(raw) == len(names)
    for line, name in zip(raw, names, strict=True):
        assert list(line.get_ydata()) == [update.metrics[name] for update in telemetry.updates]


@pytest.mark.parametrize(
    ("goal", "figure", "label"),
    [
        ("", "reward", "reward"),
        ('evaluation.goal = { figure = "reward/exact", value = 0.45 }', "reward/exact", "exact"),
    ],
)
def test_learning_is_drawn_of_the_goals_figure_under_its_name(
    goal: str, figure: str, label: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "demo", num_updates=60)
    (folder / "run.toml").write_text(goal + RUN_FILE.format(name="demo", num_updates=60))
    telemetry = read_telemetry(folder)
    (ax,) = drawn("learning-by-update", telemetry)
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == [f"{label} (training, sampled)", f"{label} (held out, greedy)"] + ["goal 0.45"] * bool(goal)
    assert list(ax.lines[0].get_ydata()) == [update.metrics[figure] for update in telemetry.updates]
    assert list(ax.lines[2].get_ydata()) == [point.figures[figure] for point in telemetry.evaluations]
    tiles = {name: remark for name, _, remark in key_figures(summary_of(folder))}
    assert ("goal 0.45 after" in tiles[f"Held-out {label}"]) == bool(goal)


def test_a_run_without_correction_shows_its_mismatch_just_as_well(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=6)
    lines = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    applied = ("applied_", "weight_", "corrected_", "masked_", "reference_")
    lines = [{key: value for key, value in line.items() if not key.startswith(applied)} for line in lines]
    write_lines(folder / "updates.jsonl", lines)
    page = ParsedPage(page_of(folder).read_text(encoding="utf-8"))
    figures = [value for tag, name, value in page.attributes if tag == "figure" and name == "id"]
    gone = {"weight-by-lag", "masked-by-lag", "reference-kl"}
    assert figures == [spec.name for spec in FIGURES if spec.name not in gone], "no empty panel is drawn"


def test_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "demo", num_updates=5, producers=("<script>alert(1)</script>".replace("/", "_"), "$a$&b")
    )
    configuration = (folder / "run.toml").read_text() + "# <script>alert(2)</script>\n"
    (folder / "run.toml").write_text(configuration)
    report = page_of(folder).read_text(encoding="utf-8")
    page = ParsedPage(report)
    assert "script" not in page.tags and "b" not in page.tags
    text = " ".join(page.texts)
    assert "<script>alert(1)<_script>" in text and "$a$&b" in text
    assert "<script>alert(2)</script>" in text and "models/<b>demo</b>" in text


def test_an_empty_run_folder_gives_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    page = ParsedPage(page_of(tmp_path).read_text(encoding="utf-8"))
    text = " ".join(page.texts)
    assert "Missing files: run.toml, updates.jsonl, evaluations.jsonl, trainer.json, producers/*.jsonl." in text
    assert "svg" not in page.tags
    assert "not finished: 0 updates" in text


def test_a_run_of_one_update_is_drawn(tmp_path: Path) -> None:
    page = ParsedPage(page_of(write_run(tmp_path / "demo", num_updates=1)).read_text(encoding="utf-8"))
    assert page.tags.count("svg") == len(FIGURES)


def test_a_metric_that_was_never_finite_leaves_its_figure_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=6)
    lines = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    write_lines(folder / "updates.jsonl", [line | {"entropy": math.nan, "grad_norm": math.inf} for line in lines])
    telemetry = read_telemetry(folder)
    assert {spec.name for spec in FIGURES if not draw(spec, Figure(), telemetry)} == {"entropy", "grad-norm"}


def test_tile_and_figure_give_the_same_percentiles_of_the_pauses(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=40)
    early = {"event": "weights", "time_s": START_S - 5, "policy_version": 0, "pause_s": 9.0}
    for file in (folder / "producers").iterdir():
        file.write_text(json.dumps(early) + "\n" + file.read_text())
    (ax,) = drawn("pauses", read_telemetry(folder))
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    summary = summary_of(folder)
    assert f"p50 {1000 * summary['pause_s_p50']:.1f} ms" in legend
    assert f"p99 {1000 * summary['pause_s_p99']:.1f} ms" in legend


def test_the_picture_of_the_readme_is_a_png_of_four_panels(tmp_path: Path) -> None:
    assert len(NAMES) == 4
    write_picture(read_telemetry(write_run(tmp_path / "demo", num_updates=40)), tmp_path / "pictures" / "run.png")
    data = (tmp_path / "pictures" / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width > 1800 and height > 900


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:-num_bytes])


@pytest.mark.usefixtures("unrendered")
def test_the_report_of_a_run_under_way_says_so_and_as_of_when(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=40)
    ledger = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({**ledger, "num_updates": 25, "finished": False}))
    for name in ("updates.jsonl", "evaluations.jsonl", "producers/producer-1.jsonl"):
        cut(folder / name, 7)  # each is being written just now
    began_s = time.time()
    summary = summary_of(folder)
    text = page_of(folder).read_text()
    assert summary["finished"] is False and began_s <= summary["as_of_s"] <= time.time()
    assert summary["num_updates"] == 39 and summary["num_torn_lines"] == 3
    stated = re.search(r"This run is not over, as of ([\d-]+ [\d:]+) UTC; the last update was [\d,]+ s before\.", text)
    assert stated and began_s - 1 <= datetime.fromisoformat(f"{stated[1]}+00:00").timestamp() <= time.time()
    assert "not finished: 39 of 40 updates" in text
    assert dict(table_rows(summary))["state"].startswith("not over, as of ")
    assert not list(folder.glob("*.partial*"))


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_is_continued_after_its_end_is_not_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo", num_updates=40)
    assert summary_of(folder)["finished"] is True and "state" not in dict(table_rows(summary_of(folder)))
    assert "This run is not over" not in page_of(folder).read_text()
    ledger = json.loads((folder / "trainer.json").read_text())
    (folder / "trainer.json").write_text(json.dumps({**ledger, "num_updates": 30}))  # of before the resume
    assert summary_of(folder)["finished"] is False
