"""The rows with TRL: the task of one, and the messages to and from TRL's process. Runs in both environments."""

import msgspec

from penstock.schemas.prompt import Prompt


class LongAnswers:
    """The reward is the share of digits in an answer, so that nearly every group has something to train on."""

    num_evaluation_prompts = 0

    def __init__(self, *, seed: int) -> None:
        pass

    def prompt(self, index: int) -> Prompt:
        return Prompt(text=f"{index:04d}=", answer="")

    def evaluation_prompt(self, n: int) -> Prompt:
        raise ValueError(f"LongAnswers: held-out task {n} asked for, and there is none")

    def reward(self, prompt: Prompt, completion: str) -> float:
        return sum(map(str.isdigit, completion)) / max(1, len(completion))


class TrlJob(msgspec.Struct, frozen=True, kw_only=True):
    """TRL on the model, task, groups and learning rate of a run file, for at most `updates` updates.

    goal: the held-out greedy accuracy at which it ends; gain: it ends that much above the first one. Without either it
    evaluates nothing. every: updates between evaluations. limit_s: of training, if there is a goal. pieces: passes in
    which a batch is trained: 64 answers of SmolLM2 take 13 GB in one, for the logits.
    """

    run_file: str
    updates: int
    num_threads: int
    goal: float | None = None
    gain: float | None = None
    every: int = 5
    limit_s: float = 600.0
    pieces: int = 1


class PeerUpdates(msgspec.Struct, frozen=True, kw_only=True):
    """seconds, tokens: of each update; tokens are sampled ones that it trains. phases_s: of the mean update."""

    name: str
    seconds: list[float]
    tokens: list[int]
    phases_s: dict[str, float]

    @property
    def s_per_update(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


class TrlUpdates(PeerUpdates, frozen=True, kw_only=True):
    """All seconds are without evaluations.

    phases_s: generate: transformers' generate. score: rewards, advantages and padding. forward: the loss. backward.
        rest: optimizer, clipping, data loading and the loop around them.
    curve: seconds of training and the held-out accuracy then. processor_s: at the end of each update.
    """

    packages: dict[str, str]
    curve: list[tuple[float, float]]
    processor_s: list[float]

    def seconds_to(self, goal: float) -> float | None:
        """Returns the seconds to the first accuracy at the goal; None if it was not reached."""
        return next((train_s for train_s, accuracy in self.curve if accuracy >= goal), None)
