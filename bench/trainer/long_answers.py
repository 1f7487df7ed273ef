"""A task for measuring speed: a random model's answers, of uneven length, each with a reward of its own."""

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
