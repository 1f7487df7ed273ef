"""TensorBoard event files of a run."""

from pathlib import Path

from penstock.consumers.observe.sinks.points import SinkPoint
from torch.utils.tensorboard import SummaryWriter

_FLUSH_S = 5


class TensorBoard:
    """Event files in `folder/updates` and `folder/evaluations`, shown as two runs; the step is the update.

    start: points of later updates, and the evaluation after this one, come again: earlier ones are purged. None: no
    point comes again.

    Raises:
        OSError: of the files, by any method. `write` may tell of points given before, up to `_FLUSH_S` old.
    """

    def __init__(self, folder: Path, start: int | None) -> None:
        first_step = {"updates": None if start is None else start + 1, "evaluations": start}
        self._writers: dict[str, SummaryWriter] = {}
        try:
            for kind, step in first_step.items():
                self._writers[kind] = SummaryWriter(str(folder / kind), purge_step=step, flush_secs=_FLUSH_S)
                self._writers[kind].flush()  # what is purged is purged for good, and need not be again
        except BaseException:
            self._close()
            raise

    def write(self, point: SinkPoint) -> None:
        writer = self._writers[point.kind]
        for name, value in point.numbers.items():
            writer.add_scalar(name, value, point.update, walltime=point.time_s)

    def close(self) -> None:
        problems = self._close()
        if problems:
            raise problems[0]

    def _close(self) -> list[Exception]:
        """What one cannot write is no reason to leave the other's last points unwritten."""
        problems = []
        for writer in self._writers.values():
            try:
                writer.close()
            except Exception as error:
                problems.append(error)
        return problems
