"""The view **Learning**: reward, accuracy, and the size of the steps."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.deploy.watch.snapshot import RunSnapshot
from penstock.deploy.watch.text import number, sparkline

_ROWS = (
    ("reward", "reward"),
    ("entropy (nats)", "entropy"),
    ("KL to behavior", "rollout_correction/k3_kl"),
    ("KL to reference", "reference_kl"),
    ("clip fraction", "policy_clipped_frac"),
    ("gradient norm", "grad_norm"),
    ("learning rate", "learning_rate"),
    ("loss", "loss"),
)
_BESIDE = 54
"""Columns beside a sparkline: the name, the latest number, the range."""


def learning(seen: RunSnapshot, width: int) -> RenderableType:
    if not seen.updates and not seen.evaluations:
        return Text("no batch has been trained yet")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    room = max(8, width - _BESIDE)
    table.add_column(
        f"updates {seen.updates[0].update} to {seen.updates[-1].update}" if seen.updates else "", width=room
    )
    for name in ("latest", "lowest", "highest"):
        table.add_column(name, justify="right", no_wrap=True)
    accuracies = [point.accuracy for point in seen.evaluations]
    for label, values in [("accuracy", accuracies), *((label, _course(seen, key)) for label, key in _ROWS)]:
        if values:
            course = Text(sparkline(values, room), style="green" if label in ("accuracy", "reward") else "cyan")
            table.add_row(Text(label, style="bold"), course, *map(number, (values[-1], min(values), max(values))))
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


def _course(seen: RunSnapshot, key: str) -> list[float]:
    return [update.metrics[key] for update in seen.updates if key in update.metrics]
