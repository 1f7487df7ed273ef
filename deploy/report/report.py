"""Writes the report of a run: its summary, and one HTML page that refers to nothing outside itself."""

import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

from penstock.deploy.report.attrition import attrition_lines, attrition_tables, windows_of
from penstock.deploy.report.examples import examples
from penstock.deploy.report.figures import FIGURES, FigureSpec, figure_svg
from penstock.deploy.report.means import slowest_groups
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import NOTHING, not_over, table_rows, warnings_of
from penstock.deploy.report.telemetry import RunTelemetry, read_telemetry
from penstock.schemas.process.files import write_whole

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
    write_whole(page, render(telemetry, summary, configuration, examples(run_folder, telemetry.config)))
    return summary, page


def render(telemetry: RunTelemetry, summary: dict[str, Any], configuration: str, answers: str = "") -> str:
    """Renders the page. Every text that comes from the run is escaped here. answers: see `examples`."""
    engine = summary["engine"] or {"": "no start event in producers/*.jsonl"}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Penstock: {telemetry.name}"),
        heading=html.escape(telemetry.name),
        subtitle=html.escape(_subtitle(telemetry, summary)),
        notice=_notice(summary),
        result=_rows(table_rows(summary)),
        figures="\n".join(_figure(spec, telemetry) for spec in FIGURES),
        attrition=_attrition(telemetry),
        slowest=_slowest(telemetry),
        answers=answers,
        summary=_rows((name, _show(value)) for name, value in summary.items()),
        engine=_rows((name, _show(value)) for name, value in engine.items()),
        configuration=html.escape(configuration),
        footer=html.escape(_footer(telemetry)),
    )


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
    notes += [f"{warning[0].upper()}{warning[1:]}." for warning in warnings_of(summary)]
    if summary["engines_that_differ"]:
        notes.append(f"Producers whose engine differs from the first: {', '.join(summary['engines_that_differ'])}.")
    return f'<p class="notice">{html.escape(" ".join(notes))}</p>' if notes else ""


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


def _slowest(telemetry: RunTelemetry) -> str:
    """Renders the groups that took longest, each with a link to its trace if the run file has its address."""
    groups = slowest_groups(telemetry.updates)
    if not groups:
        return ""
    template = "" if telemetry.config is None else telemetry.config.metrics.trace_url
    rows = ["<tr><td>group</td><td>seconds</td><td>of these</td><td>trace</td></tr>"]
    for group in groups:
        phases = ", ".join(f"{name} {seconds:.3g}" for name, seconds in group.phases.items())
        trace = html.escape(group.trace_id or NOTHING)
        if template and group.trace_id:
            trace = f'<a href="{html.escape(template.replace("{trace_id}", group.trace_id))}">{trace}</a>'
        cells = f"{group.index:,}", f"{group.total_s:.3g}", html.escape(phases), trace
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<details><summary>The slowest groups</summary><table>{''.join(rows)}</table></details>"


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
