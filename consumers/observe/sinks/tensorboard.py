"""TensorBoard event files of a run."""

from contextlib import ExitStack
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from penstock.consumers.observe.sinks.points import COLUMNS, ShownCompletion, SinkPoint

_FLUSH_S = 5


class TensorBoard:
    """Event files in `folder/updates` and `folder/evaluations`, shown as two runs; the step is the update.

    start: points of later updates, and the evaluation after this one, will be written again: those in the files are
        purged. None purges nothing.

    Raises:
        OSError: from any method, if the files cannot be written. `write` may report points up to `_FLUSH_S` old.
    """

    def __init__(self, folder: Path, start: int | None) -> None:
        first_step = {"updates": None if start is None else start + 1, "evaluations": start}
        self._writers: dict[str, SummaryWriter] = {}
        with ExitStack() as opened:
            for kind, step in first_step.items():
                self._writers[kind] = SummaryWriter(str(folder / kind), purge_step=step, flush_secs=_FLUSH_S)
                opened.callback(self._writers[kind].close)
                self._writers[kind].flush()  # the purge is on the disk and need not be repeated
            self._opened = opened.pop_all()

    def write(self, point: SinkPoint) -> None:
        writer = self._writers[point.kind]
        for name, value in point.numbers.items():
            writer.add_scalar(name, value, point.update, walltime=point.time_s)
        if point.completions:
            writer.add_text("completions", _table(point.completions), point.update, walltime=point.time_s)

    def close(self) -> None:
        """Closes both writers, even if one of them fails."""
        self._opened.close()


def _table(completions: tuple[ShownCompletion, ...]) -> str:
    """Returns a Markdown table, whose cells hold neither lines nor columns of their own."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *completions]
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
