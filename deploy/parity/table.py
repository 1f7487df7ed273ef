"""A parity report as text."""

import sys

from penstock.consumers.parity.gaps import passes
from penstock.consumers.parity.report import Gap, Hypothesis, ParityReport, Status, Verdict
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WORDS: dict[Status, tuple[str, str]] = {
    "parity": ("PARITY", "green"),
    "mismatch": ("MISMATCH", "red"),
    "unclear": ("COULD NOT TELL", "yellow"),
}
_VERSIONS_SHOWN = 6
_LAYERS_SHOWN = 6
_WIDTH = 140


def print_report(report: ParityReport, title: str, console: Console | None = None) -> None:
    """Prints what was checked, the readings with their residuals, lags, layers, notes, and the verdict last; without a
    console, to stdout."""
    console = console or _console()
    _say(
        console,
        f"Parity of {title}: {report.num_groups:,} groups, {report.num_rollouts:,} rollouts, {report.num_tokens:,} "
        f"tokens, {_versions(report.versions)}, {report.dtype}, {report.seconds:.1f} s",
    )
    console.print(_hypotheses(report))
    if report.lags:
        _say(console, "Objective: recorded logprobs against the trainer as it is now, by lag")
        console.print(_lags(report))
    if report.layers:
        _say(console, "Layers: engine against trainer on the same input, relative error")
        console.print(_layers(report))
    for note in report.notes:
        _say(console, f"note: {note}")
    console.print()
    print_verdict(report.verdict, console)


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """Prints the verdict, and what to do where it does not say so itself."""
    console = console or _console()
    word, colour = _WORDS[verdict.status]
    sentence = verdict.sentence.removeprefix("parity: ").removeprefix("could not tell: ")
    console.print(f"[bold {colour}]{word}[/]  {escape(sentence)}", soft_wrap=True)
    if verdict.advice and verdict.advice not in verdict.sentence:
        _say(console, verdict.advice)


def _versions(versions: tuple[int, ...]) -> str:
    """Versions as numbers of their epoch where there was only one, else `epoch:steps`."""
    if not versions:
        return "no policy"
    several = max(versions) >= VERSIONS_PER_EPOCH
    names = ["{}:{}".format(*divmod(v, VERSIONS_PER_EPOCH)) if several else str(v) for v in versions]
    if len(names) > _VERSIONS_SHOWN:
        names = [*names[: _VERSIONS_SHOWN - 1], "...", names[-1]]
    return f"{'policy' if len(versions) == 1 else 'policies'} {', '.join(names)}"


def _hypotheses(report: ParityReport) -> Table:
    table = _bare_table()
    for heading in ("layer", "these are logprobs ..."):
        table.add_column(heading, overflow="fold")
    for heading in ("tokens", "mean", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    before = ""
    for each in report.hypotheses:
        layer = each.layer if each.layer != before else ""
        before = each.layer
        style = "bold" if each.name == report.verdict.cause else ""
        table.add_row(layer, escape(each.says), *_numbers(each.gap), escape(_remark(each, report)), style=style)
    return table


def _remark(each: Hypothesis, report: ParityReport) -> str:
    within = "within tolerance" if passes(each.gap, report.tolerance) else ""
    return "; ".join(filter(None, (within, each.note)))


def _numbers(gap: Gap) -> tuple[str, str, str, str]:
    if not gap.num_tokens:
        return "0", "-", "-", "-"
    return f"{gap.num_tokens:,}", f"{gap.mean:.1e}", f"{gap.p99:.1e}", f"{gap.max:.1e}"


def _lags(report: ParityReport) -> Table:
    table = _bare_table()
    for heading in ("lag", "tokens", "mean |Δ|", "p99 |Δ|", "KL", "k3", "χ²", "ESS", "|ratio - 1| ·10⁴"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.lags:
        table.add_row(
            row.label,
            f"{row.num_tokens:,}",
            *(f"{value:.1e}" for value in (row.mean, row.p99, row.kl, row.k3_kl, row.chi2)),
            f"{row.ess_fraction:.4f}",
            f"{row.ratio_deviation:.3g}",
        )
    return table


def _layers(report: ParityReport) -> Table:
    """Those that are off, else the worst few."""
    table = _bare_table()
    table.add_column("part", no_wrap=True)
    for heading in ("error", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    off = [layer for layer in report.layers if not layer.error <= layer.allowed]
    ranked = sorted(report.layers, key=lambda layer: -layer.error / layer.allowed)
    shown = off[:_LAYERS_SHOWN] or ranked[:_LAYERS_SHOWN]
    for layer in shown:
        remark = "" if layer.error <= layer.allowed else "OFF"
        table.add_row(escape(layer.name), f"{layer.error:.1e}", f"{layer.allowed:.0e}", remark)
    if len(shown) < len(report.layers):
        table.add_row(f"... {len(report.layers) - len(shown)} more", "", "", "")
    return table


def _bare_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _console() -> Console:
    """Of stdout; a pipe or a file gets lines as wide as they are."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
