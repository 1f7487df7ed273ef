"""The view **Learning**: rewards, completions, and the size of the steps."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.deploy.report.means import metric_values
from penstock.deploy.watch.snapshot import RunSnapshot
from penstock.deploy.watch.text import number, safe, sparkline
from penstock.schemas.metrics import REWARD, figure_name, figures_of, title_of

_ROWS = (
    "reward_std",
    "completion_tokens",
    "truncated_frac",
    "entropy",
    "rollout_correction/k3_kl",
    "reference_kl",
    "teacher_kl",
    "policy_clipped_frac",
    "grad_norm",
    "learning_rate",
    "loss",
)
_LABEL = 20
_FIXED = _LABEL + 38
"""Characters of a row outside its sparkline: the name, the latest number, the range."""
_PARTS = 6
"""The most parts of the reward that are shown."""


def learning(seen: RunSnapshot, width: int) -> RenderableType:
    if not seen.updates and not seen.evaluations:
        return Text("no batch has been trained yet")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    room = max(8, width - _FIXED)
    table.add_column(
        f"updates {seen.updates[0].update} to {seen.updates[-1].update}" if seen.updates else "", width=room
    )
    for name in ("latest", "lowest", "highest"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, values in _rows(seen):
        if values:
            line = Text(sparkline(values, room), style="green" if "reward" in label else "cyan")
            table.add_row(Text(label, style="bold"), line, *map(number, (values[-1], min(values), max(values))))
    newest = seen.newest
    notes = []
    if newest is not None and newest.skipped_reason is not None:
        notes.append(Text(f"update {newest.update} made no step: {newest.skipped_reason}", style="red"))
    trained = sum(update.num_groups_trained for update in seen.recent)
    skipped = sum(update.num_groups_skipped for update in seen.recent)
    if trained + skipped:
        share = trained / (trained + skipped)
        notes.append(Text(f"groups with a learning signal, last {len(seen.recent)} batches: {share:.0%}"))
    return Group(table, Text(), *notes)


def _rows(seen: RunSnapshot) -> Iterator[tuple[str, list[float]]]:
    """Yields each row's label and values: held-out rewards, the batches' rewards with their parts, other metrics."""
    updates = [update.metrics for update in seen.updates]
    points = [point.figures for point in seen.evaluations]
    for where, lines in (("held-out ", points), ("", updates)):
        parts = sorted({name for line in lines for name in figures_of(line) if name != REWARD})
        for name in (REWARD, *parts[:_PARTS]):
            label = safe(where + figure_name(name), _LABEL)
            yield label, [line[name] for line in lines if name in line]
    for key in _ROWS:
        yield title_of(key), metric_values(seen.updates, key)
