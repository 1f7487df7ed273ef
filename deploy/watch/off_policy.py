"""The view **Off-policy**: lag, correction and mismatch."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.deploy.report.means import MASKED, masked_lag_frac, mean_by_lag, metric_values, tokens_by_lag
from penstock.deploy.watch.snapshot import RunSnapshot
from penstock.deploy.watch.text import bar, count, joined, number, percent, sparkline
from penstock.schemas.metrics import LAG_LABELS, UPDATE_METRICS, title_of

_COLUMNS = ("ess_fraction", "applied_ess_fraction", "chi2", "k3_kl", "weight_mean", MASKED)
_SPARKLINES = ("ess_fraction", "applied_ess_fraction", "chi2", "weight_mean")


def off_policy(seen: RunSnapshot, width: int) -> RenderableType:
    recent = seen.recent
    if not recent:
        return Text("no batch has been trained yet")
    by_update = [tokens_by_lag(update) for update in recent]
    tokens = {label: sum(counts[label] for counts in by_update) for label in LAG_LABELS}
    total, masked = sum(tokens.values()), sum(update.num_tokens_masked_lag for update in recent)
    head = joined(
        [
            Text("lag of tokens", style="bold"),
            f"last {len(recent)} batches",
            f"bound {seen.config.oldest_lag}",
            f"{count(masked)} tokens ({percent(masked_lag_frac(recent))}) masked beyond it",
        ]
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    room = max(6, width - 72)
    for name in ("lag", "tokens", *map(title_of, _COLUMNS), "share"):
        table.add_column(name, justify="left" if name in ("lag", "share") else "right", no_wrap=True)
    for label in LAG_LABELS:
        share = tokens[label] / total if total else 0.0
        if not tokens[label]:
            table.add_row(label, "0", style="dim")
            continue
        values = {key: mean_by_lag(recent, key, label) for key in _COLUMNS}
        cells = [
            Text(percent(value) if key == MASKED else number(value), style=_cell_style(key, value))
            for key, value in values.items()
        ]
        shown = Text(bar(share, room), style="cyan").append(f" {percent(share)}", style="default")
        table.add_row(label, count(tokens[label]), *cells, shown)
    return Group(head, table, Text(), _mismatch(seen, width), *_sparklines(seen, width))


def _cell_style(key: str, value: float | None) -> str:
    return "bold red" if value is not None and UPDATE_METRICS[key].is_bad(value) else ""


def _mismatch(seen: RunSnapshot, width: int) -> Text:
    """Shows the mismatch at lag 0 beside the alert's band."""
    gaps = metric_values(seen.updates, "mismatch_lag0")
    if not gaps:
        return Text("mismatch at lag 0: no row of lag 0 yet")
    band = metric_values(seen.updates, "mismatch_lag0_band")[-1]
    is_out = gaps[-1] > band
    verdict = Text("ABOVE ITS BAND", style="bold red") if is_out else Text("within", style="green")
    return joined(
        [
            Text("mismatch at lag 0", style="bold"),
            Text(sparkline(gaps[-500:], max(6, width - 64)), style="cyan"),
            f"{number(gaps[-1])} nats, band {number(band)}",
            verdict,
        ]
    )


def _sparklines(seen: RunSnapshot, width: int) -> list[Text]:
    lines = []
    for key in _SPARKLINES:
        values = metric_values(seen.updates, key)
        if values:
            line = Text(sparkline(values[-500:], max(6, width - 34)), style="cyan")
            lines.append(joined([Text(f"{title_of(key):<17}", style="bold"), line, number(values[-1])]))
    return lines
