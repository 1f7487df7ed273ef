"""Writes the report of a run: its summary, and one HTML page that refers to nothing outside itself."""

import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

from penstock.deploy.report.attrition import attrition_lines, attrition_tables, windows_of
from penstock.deploy.report.figures import FIGURES, FigureSpec, figure_svg
from penstock.deploy.report.means import MASKED
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import NOTHING, not_over, shown
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.metrics import figure_name
from penstock.schemas.process.files import write_whole

MUCH_SKIPPED = 0.5
"""From this share of the groups, those without a learning signal are among the key figures."""
TEMPLATE = Path(__file__).with_name("report_template.html")


def write_report(run_folder: Path) -> tuple[dict[str, Any], Path]:
    """Writes `summary.json` and `report.html` into the run folder; returns the summary and the page's path.

    Raises:
        TelemetryError: no such folder, or a malformed line (named with its file and number).
        ConfigError: `run.toml` is no run file.
    """
    telemetry = read_telemetry(run_folder)
    summary = summarize(telemetry)
    write_whole(run_folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    run_file = run_folder / "run.toml"
    configuration = run_file.read_text("utf-8") if run_file.is_file() else "run.toml is missing"
    page = run_folder / "report.html"
    write_whole(page, render(telemetry, summary, configuration))
    return summary, page


def render(telemetry: RunTelemetry, summary: dict[str, Any], configuration: str) -> str:
    """Renders the page. Every text that comes from the run is escaped here."""
    engine = summary["engine"] or {"": "no start event in producers/*.jsonl"}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Penstock: {telemetry.name}"),
        heading=html.escape(telemetry.name),
        subtitle=html.escape(_subtitle(telemetry, summary)),
        notice=_notice(summary),
        keys="\n".join(_key(*key) for key in key_figures(summary)),
        figures="\n".join(_figure(spec, telemetry) for spec in FIGURES),
        attrition=_attrition(telemetry),
        summary=_rows((name, _show(value)) for name, value in summary.items()),
        engine=_rows((name, _show(value)) for name, value in engine.items()),
        configuration=html.escape(configuration),
        footer=html.escape(_footer(telemetry)),
    )


def key_figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (label, value, remark) of each figure in the page's head."""
    s = summary
    rates = s["producer_tokens_per_s"] or {"total": None, "by_producer": {}}
    num_producers = len(rates["by_producer"])
    held_out = (s["held_out"] or {}).get(s["figure"], {})
    course = s["course"] or {}
    lengths, truncated = course.get("completion_tokens", {}), course.get("truncated_frac", {})
    return [
        (
            f"Held-out {figure_name(s['figure'])}",
            f"{shown(held_out.get('initial'), '.3f')} → {shown(held_out.get('final'), '.3f')}",
            f"{s['answered']}, {shown(s['num_evaluation_prompts'])} problems{_goal(s)}",
        ),
        _groups(s),
        ("Updates", shown(s["num_updates"]), f"{shown(s['updates_per_s'], '.2f')}/s in {shown(s['wall_s'])} s"),
        (
            "Completion length",
            f"{shown(lengths.get('first'), ',.1f')} → {shown(lengths.get('last'), ',.1f')}",
            f"tokens; {shown(truncated.get('last'), '.1%')} truncated at the end",
        ),
        ("Sampled tokens/s", shown(rates["total"]), f"{num_producers} producer{'s' * (num_producers != 1)}"),
        ("Trained tokens/s", shown(s["trainer_tokens_per_s"]), f"{shown(s['num_tokens_trained'])} tokens"),
        ("Mean lag", shown(s["mean_lag"], ".2f"), f"steps; {shown(s[MASKED], '.1%')} of the tokens masked"),
        (
            "Pause p50 / p99",
            f"{shown(s['pause_s_p50'], '.1f', scale=1000)} / {shown(s['pause_s_p99'], '.1f', ' ms', scale=1000)}",
            f"{shown(s['paused_share'], '.1%')} of the time paused",
        ),
    ]


def _groups(summary: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the tile of the groups, headed by those that taught nothing if there are many."""
    trained, skipped, dead = (summary[f"num_groups_{what}"] for what in ("trained", "skipped", "dead"))
    if skipped and skipped >= MUCH_SKIPPED * (trained + skipped):
        remark = f"their rewards are all equal; {trained:,} trained, {dead:,} dead"
        return "Groups without a learning signal", f"{skipped / (trained + skipped):.0%}", remark
    return "Groups trained", shown(trained), f"{shown(skipped)} skipped, {shown(dead)} dead"


def _goal(summary: dict[str, Any]) -> str:
    if summary["goal"] is None:
        return ""
    reached_s = summary["goal_reached_s"]
    return f"; goal {summary['goal']:g} " + (f"after {reached_s:,.0f} s" if reached_s is not None else "not reached")


def _subtitle(telemetry: RunTelemetry, summary: dict[str, Any]) -> str:
    parts = []
    if telemetry.start_s is not None:
        parts.append(f"{datetime.fromtimestamp(telemetry.start_s, UTC):%Y-%m-%d %H:%M} UTC")
    config = telemetry.config
    if config is not None:
        environments = (f"{name} ({environment.path})" for name, environment in config.every_environment.items())
        parts += [config.mode, config.model.path, *environments, f"seed {config.seed}"]
    if not summary["finished"]:
        planned = f" of {config.num_updates}" if config is not None else ""
        parts.append(f"not finished: {summary['num_updates'] or 0}{planned} updates")
    return " · ".join(parts)


def _notice(summary: dict[str, Any]) -> str:
    notes = []
    if not summary["finished"]:
        notes.append(f"This run is {not_over(summary)}.")
    if summary["missing"]:
        notes.append(f"Missing files: {', '.join(summary['missing'])}.")
    if summary["num_torn_lines"]:
        notes.append(f"Lines cut short (by a kill, or just being written) and left out: {summary['num_torn_lines']}.")
    if summary["engines_that_differ"]:
        notes.append(f"Producers whose engine differs from the first: {', '.join(summary['engines_that_differ'])}.")
    return f'<p class="notice">{html.escape(" ".join(notes))}</p>' if notes else ""


def _key(label: str, value: str, remark: str) -> str:
    return f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"


def _figure(spec: FigureSpec, telemetry: RunTelemetry) -> str:
    svg = figure_svg(spec, telemetry)
    if not svg:
        return ""
    return (
        f'<figure id="{spec.name}"><h2 id="{spec.name}-title">{html.escape(spec.title)}</h2>{svg}'
        f'<figcaption id="{spec.name}-caption">{html.escape(spec.caption)}</figcaption></figure>'
    )


def _attrition(telemetry: RunTelemetry) -> str:
    """Renders what was sampled and what was trained; "" before the first checkpoint with a rollout."""
    if telemetry.ledger is None or not telemetry.ledger.attrition.rollouts:
        return ""
    attrition = telemetry.ledger.attrition
    num_open = telemetry.ledger.num_groups_cancelled + telemetry.ledger.num_groups_open
    parts = [f"<p>{html.escape(line)}.</p>" for line in attrition_lines(attrition, num_open)]
    for title, rows in attrition_tables(attrition, windows_of(telemetry.updates)):
        parts.append(f"<h2>{html.escape(title)}</h2><table>{_rows(rows)}</table>")
    return f"<details open><summary>What was sampled and what was trained</summary>{''.join(parts)}</details>"


def _rows(rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "\n".join(f"<tr>{row}</tr>" for row in cells)


def _show(value: Any) -> str:
    if value is None or (isinstance(value, dict | list) and not value):
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _footer(telemetry: RunTelemetry) -> str:
    num_lines = len(telemetry.updates) + len(telemetry.evaluations) + sum(map(len, telemetry.producers.values()))
    drawn = f"Drawn by penstock from {num_lines:,} lines of the run's own telemetry. Tokens are sampled tokens."
    return " ".join([drawn, *telemetry.clock_notes()])
