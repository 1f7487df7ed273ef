"""The display of `penstock run`: a live view on a terminal, plain lines anywhere else."""

import contextlib
import errno
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.deploy.launch.progress import Progress
from penstock.deploy.report.lines import EvaluationPoint
from penstock.deploy.report.means import MASKED
from penstock.deploy.report.summary_table import NOTHING_LEARNED
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import Heartbeat
from penstock.schemas.metrics import figure_name
from penstock.schemas.policy import split_version

_NOTES_SHOWN = 5
_WAITS = "waits for agents: they abandoned the last groups"
_IDLE_BATCHES = 5
"""Batches in a row that train nothing before a warning."""


def open_view(config: RunConfig, runs: Path, console: Console | None = None) -> "View":
    """Opens the live view if standard output is a terminal, else plain lines."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(config, runs, console)
    return PlainView(config, runs)


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """Leaves out what cannot be shown for now: on a terminal that was just closed, or in a file on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOSPC):
            raise


class View:
    """Shows a run. Used as a context manager from one thread; costs little between frames."""

    frame_s = 0.5
    repeat_s = 60.0

    def __init__(self, config: RunConfig, runs: Path) -> None:
        self.config = config
        self.progress = Progress(config.folder(runs))
        self.states: dict[str, str] = {}
        self.heartbeats: Mapping[str, Heartbeat] = {}
        self._started = time.monotonic()
        self._next_frame = 0.0
        self._has_warned = self._has_warned_of_lag = False
        self._blocked = ""
        self._blocked_next = 0.0

    def note(self, text: str) -> None:
        """Reports an event."""
        raise NotImplementedError

    def draw(self) -> None:
        """Shows the current state."""
        raise NotImplementedError

    def state(self, part: str, state: str) -> None:
        """Sets what a part of the run is doing, and reports a change."""
        if self.states.get(part) != state:
            self.states[part] = state
            self.note(f"{part}: {state}")

    def blocked(self, reason: str) -> None:
        """Says why the run cannot go on, again every `repeat_s`, and once it goes on. reason: empty if it can; what is
        before its first colon is compared with the last one's, so that another reason is told at once."""
        is_other = reason.partition(": ")[0] != self._blocked.partition(": ")[0]
        if reason and (is_other or time.monotonic() >= self._blocked_next):
            self._blocked_next = time.monotonic() + self.repeat_s
            self.note(f"the run stands still: {reason}")
        elif self._blocked and not reason:
            self.note("the run goes on")
        self._blocked = reason

    def refresh(self, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Reads and draws, at most once per `frame_s`. The caller calls it often."""
        if time.monotonic() < self._next_frame:
            return
        self._next_frame = time.monotonic() + self.frame_s
        self.heartbeats = heartbeats
        self.progress.poll()
        is_idle = self.progress.num_idle >= _IDLE_BATCHES
        if is_idle and not self._has_warned:
            self.note(f"warning: {_IDLE_BATCHES} batches in a row trained nothing: {NOTHING_LEARNED}")
        self._has_warned = is_idle
        if (advice := self.progress.lag_advice) and not self._has_warned_of_lag:
            self.note(f"warning: {advice}")
            self._has_warned_of_lag = True
        if self.states.get("trainer") in ("running", _WAITS):
            self.state("trainer", _WAITS if self.progress.num_abandoned else "running")
        self.draw()

    def catch_up(self) -> None:
        """Draws the last state at once."""
        self.progress.poll()
        self.draw()

    def elapsed(self) -> str:
        return _duration(time.monotonic() - self._started)

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self._next_frame = 0.0
        self.refresh(self.heartbeats)


class PlainView(View):
    """A line of figures every `line_s` at most, and one for each event."""

    line_s = 5.0

    def __init__(self, config: RunConfig, runs: Path) -> None:
        super().__init__(config, runs)
        self._next_line = 0.0
        self._shown = self._position()

    def note(self, text: str) -> None:
        with _going_on():
            print(f"{self.elapsed()}  {text}", file=sys.stdout, flush=True)

    def draw(self) -> None:
        position = self._position()
        has_evaluation = position[1] != self._shown[1]
        if position != self._shown and (has_evaluation or time.monotonic() >= self._next_line):
            self._next_line = time.monotonic() + self.line_s
            self._shown = position
            self.note("  ".join(f"{name} {value}" for name, value in figures(self)))

    def catch_up(self) -> None:
        self._next_line = 0.0
        super().catch_up()

    def _position(self) -> tuple[int, int, int, int]:
        """Returns what a line is about: the numbers of batches, evaluations, abandoned groups and steps of the warm
        start."""
        progress = self.progress
        update, step = progress.update, progress.lines.warm_step
        return (
            update.update if update else 0,
            len(progress.lines.evaluations),
            progress.num_abandoned,
            step.step if step else 0,
        )


class LiveView(View):
    """A display that is redrawn in place twice a second."""

    def __init__(self, config: RunConfig, runs: Path, console: Console) -> None:
        super().__init__(config, runs)
        self._notes: deque[str] = deque(maxlen=_NOTES_SHOWN)
        # Without a thread: the launcher forks, which is a risk in a process with other threads.
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "View":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        with _going_on():
            self._live.stop()

    def note(self, text: str) -> None:
        self._notes.append(f"{self.elapsed()}  {text}")
        self._next_frame = 0.0

    def draw(self) -> None:
        with _going_on():
            self._live.update(self._display(), refresh=True)

    def _display(self) -> Group:
        config, update = self.config, self.progress.update
        title = Text.assemble((config.name, "bold"), f"  {config.mode}, seed {config.seed}, {self.elapsed()}")
        bar = ProgressBar(total=config.num_updates, completed=update.update if update else 0)
        if (step := self.progress.warm_step) is not None:
            bar = ProgressBar(total=step.num_steps, completed=step.step)
        numbers = Table.grid(padding=(0, 3))
        shown = figures(self)
        numbers.add_row(*(Text(name, style="dim") for name, _ in shown))
        numbers.add_row(*(Text(value, style="bold") for _, value in shown))
        # The empty line: the bar ends without a line break, and the headings would be on its line.
        notes = [Text("\n".join(self._notes), style="dim")]
        if self._blocked:
            notes.append(Text(f"the run stands still: {self._blocked}", style="bold red"))
        return Group(title, bar, Text(), numbers, Text(), self._parts(), *notes)

    def _parts(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("part", "state", "version", "tokens/s", "in flight", "pauses", "pause p50"):
            table.add_column(name, justify="left" if name in ("part", "state") else "right", no_wrap=True)
        for part in dict.fromkeys((*self.states, *sorted(self.heartbeats))):
            cells = [part, self.states.get(part, "serving elsewhere")]
            heartbeat = self.heartbeats.get(part)
            if heartbeat is not None:
                pauses = [pause_s for _, pause_s in self.progress.lines.pauses.get(part, ())]
                cells += [
                    shown_version(heartbeat.policy_version),
                    f"{heartbeat.tokens_per_s:,.0f}",
                    str(len(heartbeat.in_flight)),
                    f"{self.progress.lines.num_pauses[part]:,}" if pauses else "",
                    f"{median(pauses) * 1e3:.0f} ms" if pauses else "",
                ]
            table.add_row(*cells)
        return table


def figures(view: View) -> list[tuple[str, str]]:
    """Returns names and values of the figures to show, in order."""
    progress, num_updates = view.progress, view.config.num_updates
    if (step := progress.warm_step) is not None:
        return [
            ("warm start", f"{step.step}/{step.num_steps}"),
            ("left", _duration((step.num_steps - step.step) * step.step_s)),
            ("loss", _number(step.loss, ".4f")),
            ("tokens/s", f"{step.num_tokens / step.step_s:,.0f}"),
        ]
    update, evaluations = progress.update, progress.lines.evaluations
    figure = view.config.evaluation.figure
    held_out = _held_out(evaluations[-1], figure) if evaluations else "-"
    metrics = update.metrics if update else {}
    left = progress.left_s(num_updates)
    rate = progress.updates_per_s
    tokens = "+".join(f"{heartbeat.tokens_per_s:,.0f}" for _, heartbeat in sorted(view.heartbeats.items()))
    return [
        ("update", f"{update.update if update else 0}/{num_updates}"),
        ("updates/s", _number(rate, ".2f")),
        ("left", _duration(left) if left is not None else "-"),
        ("reward", _number(metrics.get("reward"), ".3f")),
        (f"held-out {figure_name(figure)}", held_out),
        ("lag", _number(progress.mean_lag, ".2f")),
        ("masked", _number(metrics.get(MASKED), ".0%")),
        ("ESS", _number(metrics.get("ess_fraction"), ".3f")),
        ("queue", _number(update.queue_depth if update else None, "d")),
        ("tokens/s", tokens or "-"),
        *([("dead", f"{progress.num_dead:,}")] if progress.num_dead else []),
        *([("abandoned", f"{progress.num_abandoned:,}")] if progress.num_abandoned else []),
    ]


def _held_out(point: EvaluationPoint, figure: str) -> str:
    """Returns `0.500`; `0.250 (3 of 9 failed)`; or `9 of 9 failed`, where the figure says nothing of the policy."""
    failed = f"{point.num_failed} of {point.num_prompts} failed"
    if point.num_failed == point.num_prompts:
        return failed
    return _number(point.figures.get(figure), ".3f") + (f" ({failed})" if point.num_failed else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def shown_version(version: int) -> str:
    """Returns `37`, or `2:37` after two rollbacks."""
    epoch, steps = split_version(version)
    if version < 0:
        return "-"
    return f"{epoch}:{steps}" if epoch else str(steps)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
