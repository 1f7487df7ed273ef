"""TensorBoard event files of a run."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from consumers.sinks.points import Point

_FLUSH_S = 5


class TensorBoard:
    """Event files in `folder/updates` and `folder/evaluations`, shown as two runs; the step is the update.

    start: points of later updates, and the evaluation after this one, come again: earlier ones are purged.
    """

    def __init__(self, folder: Path, start: int) -> None:
        first_step = {"updates": start + 1, "evaluations": start}
        self._writers = {
            kind: SummaryWriter(str(folder / kind), purge_step=step, flush_secs=_FLUSH_S)
            for kind, step in first_step.items()
        }

    def write(self, point: Point) -> None:
        writer = self._writers[point.kind]
        for name, value in point.numbers.items():
            writer.add_scalar(name, value, point.update, walltime=point.time_s)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
