"""One part of a run whose speed is known: `python -m bench.plan.part PACE trainer|producer RUN.toml ...`.

PACE is a `PartPace` as JSON. The trainer's updates are lengthened to their seconds; a producer has a `PacedEngine`.
"""

import asyncio
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.producers.environments.arithmetic import Arithmetic
from penstock.producers.interfaces import Completion, Restore
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.policy import WeightManifest
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import EngineFingerprint, SamplingSettings, VersionSpan

MAX_MODEL_LEN = 4096
_TOKEN = 4
_FINGERPRINT = EngineFingerprint(
    engine="paced", version="1", model="", dtype="", head_dtype="", logprobs_mode="", prefix_caching=False,
    async_scheduling=False,
)  # fmt: skip


class PartPace(msgspec.Struct, frozen=True, kw_only=True):
    """A step of n sequences takes `base_s + n * sequence_s`; lengths are log-normal; an update of n sampled tokens
    takes `update_s + n * token_s`."""

    base_s: float
    sequence_s: float
    median: float
    sigma: float
    pause_s: float
    update_s: float
    token_s: float = 0.0


class Tossed(Arithmetic):
    """Random rewards, so that siblings differ whatever is sampled."""

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return Reward(value=float(random.random() < 0.5))


class _Sequence:
    def __init__(self, length: int, done: "asyncio.Future[None]") -> None:
        self.left = self.length = length
        self.done = done
        self.spans: list[VersionSpan] = []

    def add(self, version: int) -> None:
        at = self.length - self.left
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, at + 1)
        else:
            self.spans.append(VersionSpan(version, at, at + 1))
        self.left -= 1


class PacedEngine:
    """Samples one token over and over at a set pace: every sequence that has a seat gets one in each step."""

    def __init__(self, pace: PartPace, config: RunConfig, seed: int) -> None:
        self.policy_version = 0
        self.fingerprint = _FINGERPRINT
        self.max_model_len = MAX_MODEL_LEN
        self._pace = pace
        self._seats = config.engine.max_num_seqs
        self._random = random.Random(seed)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._arrived = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._stepping = asyncio.create_task(self._step())

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        loop, pace, most = asyncio.get_running_loop(), self._pace, sampling.max_tokens
        lengths = [pace.median * self._random.lognormvariate(0.0, pace.sigma) for _ in range(num_siblings)]
        siblings = [_Sequence(max(1, min(most, round(length))), loop.create_future()) for length in lengths]
        self._waiting.extend(siblings)
        self._arrived.set()
        await asyncio.gather(*(each.done for each in siblings))
        return [
            Completion(
                token_ids=array("i", [_TOKEN] * each.length).tobytes(),
                behavior_logprobs=array("f", [-1.0] * each.length).tobytes(),
                version_spans=tuple(each.spans),
                finish_reason="length" if each.length == most else "stop",
            )
            for each in siblings
        ]

    def sampled(self, request_id: str) -> list[Completion]:
        return []

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        self._unpaused.clear()
        await asyncio.sleep(self._pace.pause_s)
        self.policy_version = manifest.version
        self._unpaused.set()
        return self._pace.pause_s

    async def close(self) -> None:
        self._stepping.cancel()

    async def _step(self) -> None:
        """Steps as long as there is something to sample; `generate` and the end of a load unblock it."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._running or self._waiting:
                await self._unpaused.wait()
                while self._waiting and len(self._running) < self._seats:
                    self._running.append(self._waiting.popleft())
                await asyncio.sleep(self._pace.base_s + len(self._running) * self._pace.sequence_s)
                for each in self._running:
                    each.add(self.policy_version)
                    if not each.left and not each.done.done():
                        each.done.set_result(None)
                self._running = [each for each in self._running if each.left]


def draw_out(pace: PartPace) -> None:
    """Lengthens every step of the trainer to its time, unless it already takes longer."""
    from penstock.consumers.learning.batch import Batch
    from penstock.consumers.learning.learner import Learner
    from penstock.consumers.learning.step_report import StepReport

    step = Learner.step

    def drawn_out(self: Learner, batch: Batch) -> StepReport:
        began_s = time.monotonic()
        report = step(self, batch)
        takes_s = pace.update_s + pace.token_s * sum(report.lag_histogram.values())
        time.sleep(max(0.0, began_s + takes_s - time.monotonic()))
        return report

    Learner.step = drawn_out  # type: ignore[method-assign, unused-ignore]


def main(argv: Sequence[str] | None = None) -> int:
    text, *command = sys.argv[1:] if argv is None else argv
    pace = msgspec.json.decode(text, type=PartPace)
    if command[0] == "trainer":
        from penstock.deploy.cli import main as penstock

        draw_out(pace)
        return penstock(command)
    from penstock.producers.__main__ import main as produce

    async def start(config: RunConfig, *, seed: int) -> PacedEngine:
        return PacedEngine(pace, config, seed)

    _, run_file, _, runs, _, producer_id = command
    return produce(load_config(Path(run_file)), runs=Path(runs), producer_id=producer_id, engine_factory=start)


if __name__ == "__main__":
    sys.exit(main())
