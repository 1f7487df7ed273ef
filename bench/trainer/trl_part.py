"""TRL's GRPOTrainer on a run file's task, in the peers' environment: the time of its updates, by phase."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from bench.trainer.peer_job import TrlJob, TrlUpdates
from bench.trainer.trl_settings import conversation, training_rows, trl_settings
from penstock.producers.interfaces import Environment
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.process.plugins import construct
from penstock.schemas.prompt import Prompt, Reward

EVALUATION_BATCH = 512
PACKAGES = ("trl", "transformers", "accelerate", "torch")


class _TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a stopwatch around the parts of its step, which may nest, and the number of tokens of each
    update's completions; nothing else is changed."""

    seconds: dict[str, float]
    tokens: list[int]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._timed("step"):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("rollout"):
            batch = super()._generate_and_score_completions(*args, **kwargs)
        self.tokens.append(int(batch["completion_mask"].sum()))
        return batch

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._timed("forward"):
            return super().compute_loss(*args, **kwargs)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def phases_s(self, train_s: float) -> dict[str, float]:
        """Returns the seconds by phase, see `TrlUpdates`; they add up to `train_s`."""
        generate, rollout, forward, step = (self.seconds[name] for name in ("generate", "rollout", "forward", "step"))
        return {
            "generate": generate,
            "score": rollout - generate,
            "forward": forward,
            "backward": step - rollout - forward,
            "rest": train_s - step,
        }


class _Clock(TrainerCallback):
    """Takes the time of each update and, if there is a goal, the accuracy every few updates, while the clock stands
    still; training ends at the goal or the time limit.

    ends_s, processor_s: of the updates, since training began. curve: by evaluation, such a time and the accuracy.
    """

    def __init__(self, job: TrlJob, accuracy: Callable[[Any], float]) -> None:
        self.ends_s, self.processor_s = [0.0], [0.0]
        self.curve: list[tuple[float, float]] = []
        self._job = job
        self._accuracy = accuracy

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._began_s, self._processor_s = time.perf_counter(), time.process_time()
        if self._evaluates:
            self._evaluate(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter() - self._began_s)
        self.processor_s.append(time.process_time() - self._processor_s)
        if not self._evaluates:
            return
        is_over = self.ends_s[-1] >= self._job.limit_s or state.global_step >= state.max_steps
        if is_over or state.global_step % self._job.every == 0:
            self._evaluate(model)
        gain = self._job.gain
        goal = self._job.goal if gain is None else self.curve[0][1] + gain
        control.should_training_stop = is_over or self.curve[-1][1] >= goal

    @property
    def _evaluates(self) -> bool:
        return self._job.goal is not None or self._job.gain is not None

    def _evaluate(self, model: Any) -> None:
        began_s, processor_s = time.perf_counter(), time.process_time()
        self.curve.append((self.ends_s[-1], self._accuracy(model)))
        self._began_s += time.perf_counter() - began_s
        self._processor_s += time.process_time() - processor_s


def measure(job: TrlJob) -> TrlUpdates:
    """Trains with TRL."""
    torch.set_num_threads(job.num_threads)
    disable_progress_bar()
    config = load_config(Path(job.run_file))
    environment: Environment = construct(config.environment, "environment", Environment, seed=config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    clock = _Clock(job, lambda model: greedy_accuracy(model, config, environment, tokenizer))

    def reward(completions: list[Any], task: list[int], **_: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [score(environment, environment.prompt(index), text) for index, text in zip(task, texts, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl_settings(config, job.updates, scratch, job.pieces)
        trainer = _TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
            reward_funcs=reward,
            args=settings,
            train_dataset=training_rows(environment, settings.max_steps * config.groups_per_batch),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.seconds, trainer.tokens = {}, []
        trainer.train()
    num_updates, phases_s = len(trainer.tokens), trainer.phases_s(clock.ends_s[-1])
    return TrlUpdates(
        name=f"TRL {version('trl')}",
        packages={name: version(name) for name in PACKAGES},
        seconds=[end - start for start, end in pairwise(clock.ends_s)],
        tokens=trainer.tokens,
        phases_s={name: seconds / num_updates for name, seconds in phases_s.items()},
        curve=clock.curve,
        processor_s=clock.processor_s[1:],
    )


@torch.no_grad()
def greedy_accuracy(model: Any, config: RunConfig, environment: Environment, tokenizer: Any) -> float:
    """Returns the mean greedy reward on the held-out prompts."""
    num_prompts = environment.num_evaluation_prompts
    if config.evaluation.num_prompts is not None:
        num_prompts = min(num_prompts, config.evaluation.num_prompts)
    prompts = [environment.evaluation_prompt(n) for n in range(1, num_prompts + 1)]
    settings = GenerationConfig(
        max_new_tokens=config.evaluation.max_tokens or config.sampling.max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    total = 0.0
    model.eval()
    for start in range(0, num_prompts, EVALUATION_BATCH):
        batch = prompts[start : start + EVALUATION_BATCH]
        texts = [rendered(tokenizer, each) for each in batch]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        outputs = model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        total += sum(score(environment, *pair) for pair in zip(batch, answers, strict=True))
    model.train()
    return total / num_prompts


def rendered(tokenizer: Any, prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text
    text: str = tokenizer.apply_chat_template(conversation(prompt), add_generation_prompt=True, tokenize=False)
    return text


def score(environment: Environment, prompt: Prompt, completion: str) -> float:
    reward = environment.reward(prompt, completion)
    return reward.value if isinstance(reward, Reward) else float(reward)
