"""One part of a run on a core of its own, profiled lightly: `python -m bench.pipeline.pinned CORE PROFILE COMMAND...`.

COMMAND is one of the `penstock` command (`trainer RUN.toml ...`, `producer RUN.toml ...`). Every process that the part
starts stays on the same core. CORE -1 pins nothing.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from bench.machine import children_cpu_s

PERIOD_S = 0.01
WRITE_S = 1.0

IDLE = "idle"
KINDS = (
    ("/selectors.py", IDLE),
    ("/schemas/rollout.py", "encode"),
    ("/producers/environments/", "pose and reward"),
    ("/producers/rollout/rewards.py", "pose and reward"),
    ("/transformers/", "tokenize and decode"),
    ("/redis/", "Redis"),
    ("/producers/stream/connection.py", "Redis"),
    ("/vllm/", "vLLM's front end"),
    ("/producers/", "producer's own code"),
)
"""Part of a file's path, and the activity of a thread whose innermost matching frame is in such a file."""


class CpuSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the process.

    samples: of the process, by its activity. cpu_s: its own; children_cpu_s: of the processes it started.
    """

    time_s: float
    num_looks: int
    samples: dict[str, int]
    cpu_s: float
    children_cpu_s: float


class CpuSampler:
    """Samples the main thread and the rewards thread every `PERIOD_S`, and writes a snapshot line every `WRITE_S`."""

    def __init__(self, file: Path) -> None:
        self._main = threading.main_thread().ident
        self._samples: Counter[str] = Counter()
        self._num_looks = 0
        self._output = file.open("ab", buffering=0)

    def start(self) -> None:
        threading.Thread(target=self._run, name="bench-sampler", daemon=True).start()

    def _run(self) -> None:
        """Samples once a period, as long as the process lives; nothing else wakes it."""
        next_write = time.monotonic()
        while True:
            time.sleep(PERIOD_S)
            self._look(sys._current_frames())
            if time.monotonic() >= next_write:
                next_write += WRITE_S
                snapshot = CpuSnapshot(
                    time_s=time.time(),
                    num_looks=self._num_looks,
                    samples=dict(self._samples),
                    cpu_s=time.process_time(),
                    children_cpu_s=children_cpu_s(),
                )
                self._output.write(msgspec.json.encode(snapshot) + b"\n")

    def _look(self, frames: dict[int, FrameType]) -> None:
        self._num_looks += 1
        for thread, frame in frames.items():
            if thread == self._main:
                self._samples[classify(frame)] += 1
            elif _scores(frame):
                self._samples["pose and reward"] += 1


def classify(frame: FrameType | None) -> str:
    """Returns a thread's activity by its innermost frame that matches one of `KINDS`; `event loop` if none does."""
    while frame is not None:
        file = frame.f_code.co_filename
        for part, kind in KINDS:
            if part in file:
                return kind
        frame = frame.f_back
    return "event loop"


def _scores(frame: FrameType | None) -> bool:
    """True within a reward function, false while the scoring thread waits for work in its own file."""
    is_innermost = True
    while frame is not None:
        if "/producers/rollout/rewards.py" in frame.f_code.co_filename:
            return not is_innermost
        is_innermost = False
        frame = frame.f_back
    return False


def keep_phases(file: Path) -> None:
    """Makes every step of the trainer append its phases, one JSON line for each batch."""
    from penstock.consumers.learning.batch import Batch
    from penstock.consumers.learning.learner import Learner
    from penstock.consumers.learning.step_report import StepReport

    output, step = file.open("ab", buffering=0), Learner.step

    def step_and_keep(self: Learner, batch: Batch) -> StepReport:
        report = step(self, batch)
        output.write(msgspec.json.encode(report.phase_s) + b"\n")
        return report

    Learner.step = step_and_keep  # type: ignore[method-assign, unused-ignore]


def main(argv: Sequence[str] | None = None) -> int:
    core, profile, *command = sys.argv[1:] if argv is None else argv
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    if command[0] == "trainer":
        keep_phases(Path(profile))
    else:
        CpuSampler(Path(profile)).start()
    from penstock.deploy.cli import main as penstock

    return penstock(command)


if __name__ == "__main__":
    sys.exit(main())
