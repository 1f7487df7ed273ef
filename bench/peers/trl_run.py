"""TRL's GRPOTrainer on a run file's task, timed: seconds by phase and the time to an accuracy."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from bench.peers.trl_settings import training_rows, trl_settings
from penstock.producers.interfaces import Environment
from penstock.schemas.config import RunConfig
from penstock.schemas.process.plugins import construct
from penstock.schemas.prompt import Prompt, Reward

EVALUATION_BATCH = 512


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy after `update` updates. Times are seconds since training began.

    train_s: without the time that evaluations took. wall_s: with it. reward: mean since the last point.
    """

    update: int
    train_s: float
    wall_s: float
    accuracy: float
    reward: float | None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One model's training.

    train_cpu_s: processor seconds spent in `train_s`; the two differ if other work shares the machine.
    time_to_goal_s: training seconds, evaluations left out, to the first accuracy at the goal; None: not reached.
    phases_s: seconds by phase; they add up to `train_s`. generate: transformers' generate. score: rewards, advantages
        and padding. forward: the loss. backward. rest: optimizer, clipping, data loading and the loop around them.
    """

    model: str
    curve: list[CurvePoint]
    num_updates: int
    train_s: float
    train_cpu_s: float
    evaluation_s: float
    updates_per_s: float
    time_to_goal_s: float | None
    phases_s: dict[str, float]


class Stopwatch:
    """Seconds by name; names may nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def get(self, name: str) -> float:
        return self.seconds.get(name, 0.0)

    def phases_s(self, train_s: float) -> dict[str, float]:
        """See `Measurement`."""
        generate, rollout, forward, step = map(self.get, ("generate", "rollout", "forward", "step"))
        return {
            "generate": generate,
            "score": rollout - generate,
            "forward": forward,
            "backward": step - rollout - forward,
            "rest": train_s - step,
        }


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a stopwatch around the parts of its step; nothing else is changed."""

    stopwatch: Stopwatch

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.stopwatch("step"):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch("rollout"):
            return super()._generate_and_score_completions(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch("forward"):
            return super().compute_loss(*args, **kwargs)


class TrlEvaluator(TrainerCallback):
    """Evaluates every `every` updates, outside the training clock, and stops at the goal or the time limit."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        tokenizer: Any,
        *,
        every: int,
        goal: float,
        time_limit_s: float,
        report: Callable[[CurvePoint], None],
    ) -> None:
        self.curve: list[CurvePoint] = []
        self.stopwatch = Stopwatch()
        self.trainer: TimedTrainer | None = None
        self._every, self._goal, self._time_limit_s, self._report = every, goal, time_limit_s, report
        available = environment.num_evaluation_prompts
        wanted = config.evaluation.num_prompts
        num_prompts = available if wanted is None else min(wanted, available)
        self._prompts = [environment.evaluation_prompt(n) for n in range(1, num_prompts + 1)]
        self._environment, self._tokenizer = environment, tokenizer
        self._max_tokens = config.evaluation.max_tokens or config.sampling.max_tokens
        self._began = self._ended = 0.0
        self.train_cpu_s = 0.0

    @property
    def train_s(self) -> float:
        """The seconds of training so far, or of all of it once it has ended."""
        return (self._ended or time.perf_counter()) - self._began - self.stopwatch.get("evaluation")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self.train_cpu_s = -time.process_time()
        self._measure(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        is_over = self.train_s >= self._time_limit_s or state.global_step >= state.max_steps
        if is_over or state.global_step % self._every == 0:
            self._measure(state.global_step, model)
        control.should_training_stop = is_over or self.curve[-1].accuracy >= self._goal

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = time.perf_counter()
        self.train_cpu_s += time.process_time()

    def _measure(self, update: int, model: Any) -> None:
        train_s = self.train_s
        assert self.trainer is not None
        rewards = self.trainer._metrics["train"]["reward"]
        cpu_s = time.process_time()
        with self.stopwatch("evaluation"):
            accuracy = self._accuracy(model)
        self.train_cpu_s -= time.process_time() - cpu_s
        wall_s = time.perf_counter() - self._began
        reward = sum(rewards) / len(rewards) if rewards else None
        # Nothing else empties these lists while logging is off.
        self.trainer._metrics["train"].clear()
        point = CurvePoint(update=update, train_s=train_s, wall_s=wall_s, accuracy=accuracy, reward=reward)
        self.curve.append(point)
        self._report(point)

    @torch.no_grad()
    def _accuracy(self, model: Any) -> float:
        """Returns the mean greedy reward on the held-out prompts."""
        settings = GenerationConfig(
            max_new_tokens=self._max_tokens,
            do_sample=False,
            pad_token_id=self._tokenizer.pad_token_id,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        total = 0.0
        model.eval()
        for start in range(0, len(self._prompts), EVALUATION_BATCH):
            prompts = self._prompts[start : start + EVALUATION_BATCH]
            texts = [prompt.text for prompt in prompts]
            inputs = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
            inputs.pop("token_type_ids", None)
            outputs = model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            answers = self._tokenizer.batch_decode(outputs, skip_special_tokens=True)
            total += sum(score(self._environment, *pair) for pair in zip(prompts, answers, strict=True))
        model.train()
        return total / len(self._prompts)


def score(environment: Environment, prompt: Prompt, completion: str) -> float:
    reward = environment.reward(prompt, completion)
    return reward.value if isinstance(reward, Reward) else float(reward)


def measure(
    config: RunConfig,
    model_folder: Path,
    *,
    max_updates: int,
    every: int,
    goal: float,
    time_limit_s: float,
    report: Callable[[CurvePoint], None],
) -> Measurement:
    """Trains the model with TRL until greedy accuracy reaches `goal`, or the time or the updates run out.

    Raises:
        ConfigError: the run file asks for something that TRL does not offer in the same form.
    """
    disable_progress_bar()
    environment: Environment = construct(config.environment, "environment", Environment, seed=config.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    evaluator = TrlEvaluator(
        config, environment, tokenizer, every=every, goal=goal, time_limit_s=time_limit_s, report=report
    )

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        tasks = (Prompt(text=text, answer=right) for text, right in zip(prompts, answer, strict=True))
        return [score(environment, *pair) for pair in zip(tasks, completions, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl_settings(config, max_updates, scratch)
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_funcs=reward,
            args=settings,
            train_dataset=training_rows(environment, settings.max_steps * config.groups_per_batch),
            processing_class=tokenizer,
            callbacks=[evaluator],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.stopwatch = evaluator.stopwatch
        evaluator.trainer = trainer
        trainer.train()
    return _result(model_folder, trainer.state.global_step, evaluator, goal)


def _result(model_folder: Path, num_updates: int, evaluator: TrlEvaluator, goal: float) -> Measurement:
    train_s = evaluator.train_s
    return Measurement(
        model=str(model_folder),
        curve=evaluator.curve,
        num_updates=num_updates,
        train_s=train_s,
        train_cpu_s=evaluator.train_cpu_s,
        evaluation_s=evaluator.stopwatch.get("evaluation"),
        updates_per_s=num_updates / train_s,
        time_to_goal_s=next((point.train_s for point in evaluator.curve if point.accuracy >= goal), None),
        phases_s=evaluator.stopwatch.phases_s(train_s),
    )
