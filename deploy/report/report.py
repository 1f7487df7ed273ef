"""The report of a run: one HTML page that refers to nothing outside itself."""

import html
import json
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

from penstock.deploy.report.figures import FIGURES, FigureSpec, figure_svg
from penstock.deploy.report.summary import NOTHING, not_over, shown, summarize
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.process.files import write_whole

TEMPLATE = Path(__file__).with_name("report_template.html")


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` into the run folder and returns its path: one file, nothing loaded from elsewhere.

    Raises:
        TelemetryError: no such folder, or a malformed line (named with its file and number).
        ConfigError: `run.toml` is there but is no run file.
    """
    telemetry = read_telemetry(run_folder)
    run_file = run_folder / "run.toml"
    configuration = run_file.read_text() if run_file.is_file() else "run.toml is missing"
    report = run_folder / "report.html"
    write_whole(report, render(telemetry, summarize(telemetry), configuration))
    return report


def render(telemetry: RunTelemetry, summary: dict[str, Any], configuration: str) -> str:
    """Renders the page. Every text that comes from the run is escaped here."""
    figures = [_figure(spec, telemetry) for spec in FIGURES]
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Penstock: {telemetry.name}"),
        heading=html.escape(telemetry.name),
        subtitle=html.escape(_subtitle(telemetry, summary)),
        notice=_notice(summary),
        keys="\n".join(_key(*key) for key in key_figures(summary)),
        figures="\n".join(figures),
        summary=_table(summary),
        engine=_table(summary["engine"] or {"": "no start event in producers/*.jsonl"}),
        configuration=html.escape(configuration),
        footer=html.escape(_footer(telemetry)),
    )


def key_figures(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of each figure in the page's head."""
    s = summary
    rates = s["producer_tokens_per_s"] or {"total": None, "by_producer": {}}
    num_producers = len(rates["by_producer"])
    goal, goal_s = next(iter(s["time_to_accuracy"].items()))
    dead, skipped = shown(s["num_groups_dead"], ",.0f"), shown(s["num_groups_skipped"], ",.0f")
    return [
        (
            "Held-out accuracy",
            f"{shown(s['initial_accuracy'], '.3f')} → {shown(s['final_accuracy'], '.3f')}",
            f"greedy, {shown(s['num_evaluation_prompts'], ',.0f')} problems",
        ),
        (
            f"Time to {goal}",
            shown(goal_s, ",.0f", " s"),
            "from the first prompt" if goal_s is not None else "not reached",
        ),
        (
            "Updates",
            shown(s["num_updates"], ",.0f"),
            f"{shown(s['updates_per_s'], '.2f')}/s in {shown(s['wall_s'], ',.0f')} s",
        ),
        ("Groups trained", shown(s["num_groups_trained"], ",.0f"), f"{skipped} skipped, {dead} dead"),
        ("Sampled tokens/s", shown(rates["total"], ",.0f"), f"{num_producers} producer{'s' * (num_producers != 1)}"),
        (
            "Trained tokens/s",
            shown(s["trainer_tokens_per_s"], ",.0f"),
            f"{shown(s['num_tokens_trained'], ',.0f')} tokens",
        ),
        (
            "Mean lag",
            shown(s["mean_lag"], ".2f"),
            f"steps; {shown(s['num_tokens_masked_lag'], ',.0f')} tokens masked",
        ),
        (
            "Pause p50 / p99",
            f"{shown(s['pause_s_p50'], '.1f', scale=1000)} / {shown(s['pause_s_p99'], '.1f', ' ms', scale=1000)}",
            f"{shown(s['paused_share'], '.1%')} of the time paused",
        ),
    ]


def _subtitle(telemetry: RunTelemetry, summary: dict[str, Any]) -> str:
    parts = []
    if telemetry.start_s is not None:
        parts.append(f"{datetime.fromtimestamp(telemetry.start_s, UTC):%Y-%m-%d %H:%M} UTC")
    config = telemetry.config
    if config is not None:
        parts += [config.mode, config.model.path, config.environment.path, f"seed {config.seed}"]
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
    svg, has_data = figure_svg(spec, telemetry)
    if spec.optional and not has_data:
        return ""
    return (
        f'<figure id="{spec.name}"><h2 id="{spec.name}-title">{html.escape(spec.title)}</h2>{svg}'
        f'<figcaption id="{spec.name}-caption">{html.escape(spec.caption)}</figcaption></figure>'
    )


def _table(values: dict[str, Any]) -> str:
    return "\n".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(_show(value))}</td></tr>"
        for name, value in values.items()
    )


def _show(value: Any) -> str:
    if value is None or (isinstance(value, dict | list) and not value):
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _footer(telemetry: RunTelemetry) -> str:
    num_lines = len(telemetry.updates) + len(telemetry.evaluations) + sum(map(len, telemetry.producers.values()))
    return f"Drawn by penstock from {num_lines:,} lines of the run's own telemetry. Tokens are sampled tokens."
