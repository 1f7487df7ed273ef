"""The row of long answers: its task, and the messages to and from TRL's process. Runs in both environments."""

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
    run_file: str
    updates: int
    num_threads: int


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
