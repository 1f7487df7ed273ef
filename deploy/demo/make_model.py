"""Makes small models that can do a task but mostly do it wrong, which RL fixes in minutes on CPU."""

import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.deploy.demo.addition_lessons import AdditionLessons
from penstock.deploy.demo.calculator_lessons import CalculatorLessons, build_calculator_tokenizer
from penstock.deploy.demo.char_tokenizer import build_tokenizer
from penstock.deploy.demo.model_recipe import (
    RECIPE_FILE,
    RECIPES,
    MadeModel,
    ModelRecipe,
    WarmStartError,
    find_model,
)
from penstock.deploy.demo.picture_lessons import (
    PictureLessons,
    build_processor,
    build_seeing_model,
    build_seeing_tokenizer,
)

__all__ = ["RECIPES", "MadeModel", "ModelRecipe", "WarmStartError", "build_model", "build_tokenizer", "make_model"]

_WARM_UP_STEPS = 20
_LAST_LEARNING_RATE = 0.05
"""Share of the peak learning rate at which the schedule ends."""


def make_model(
    folder: str | Path, recipe: ModelRecipe | None = None, *, progress: Callable[[str], None] = print
) -> MadeModel:
    """Builds, warm-starts and saves the model with its tokenizer; does nothing if `folder` already holds it.

    Raises:
        FileExistsError: `folder` holds something else.
        WarmStartError: the accuracy is outside the recipe's band; nothing was saved.
    """
    folder, recipe = Path(folder), recipe or ModelRecipe()
    disable_progress_bar()  # transformers shows one even for a megabyte
    if (found := find_model(folder, recipe, progress)) is not None:
        return found
    # Tests make several models in one process, whose own random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        task = _TASKS[recipe.task]
        tokenizer = task.tokenizer(recipe.max_tokens)
        model = task.model(recipe, tokenizer)
        accuracy = None
        if recipe.train:
            accuracy = warm_start(model, task.lessons(tokenizer, recipe), recipe, progress)
    made = MadeModel(recipe=recipe, num_parameters=model.num_parameters(), held_out_accuracy=accuracy)
    _save(folder, made, model, tokenizer, *([] if task.processor is None else [task.processor(tokenizer)]))
    progress(f"saved {made.num_parameters:,} parameters to {folder}")
    return made


def build_model(recipe: ModelRecipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_tokens,
        # The default of 0.02 suits wide models; here it delays the warm start by hundreds of steps.
        initializer_range=recipe.hidden_size**-0.5,
        tie_word_embeddings=recipe.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


class Lessons(Protocol):
    """The lessons of one task."""

    skill: str
    """Name of the second share that `held_out` measures, to follow "held-out accuracy 0.4,"."""
    enough: float
    """The lowest skill that RL can start from."""
    advice: str
    """How fields of the recipe change the two shares."""

    def batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns the next examples, inputs of the model with `input_ids`, `[batch, length]`, and the targets of their
        last positions, `[batch, at most length - 1]`; -100 for none."""
        ...

    def held_out(self, model: Any) -> tuple[float, float]:
        """Returns the shares of held-out problems with right answers and with the skill."""
        ...


class _Task(NamedTuple):
    """What makes the parts of a task's model. processor: of images, for one that sees."""

    tokenizer: Callable[[int], PreTrainedTokenizerFast]
    model: Callable[[ModelRecipe, PreTrainedTokenizerFast], PreTrainedModel]
    lessons: Callable[[PreTrainedTokenizerFast, ModelRecipe], Lessons]
    processor: Callable[[PreTrainedTokenizerFast], Any] | None = None


_TASKS = {
    "addition": _Task(build_tokenizer, build_model, AdditionLessons),
    "calculator": _Task(build_calculator_tokenizer, build_model, CalculatorLessons),
    "pictures": _Task(build_seeing_tokenizer, build_seeing_model, PictureLessons, build_processor),
}


def warm_start(model: PreTrainedModel, lessons: Lessons, recipe: ModelRecipe, progress: Callable[[str], None]) -> float:
    """Trains until the skill is reached; returns the held-out accuracy.

    Raises:
        WarmStartError: the accuracy is outside the band, or the skill is missing after twice `num_steps`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, 2 * recipe.num_steps + 1):
        inputs, targets = lessons.batch()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.num_steps)
        loss = _step(model, optimizer, inputs, targets)
        if step % 100 == 0:
            progress(f"warm start: step {step} of {recipe.num_steps}, loss {loss:.3f}")
        if step >= recipe.num_steps and (step - recipe.num_steps) % 20 == 0:
            accuracy, known = lessons.held_out(model)
            progress(f"warm start: held-out accuracy {accuracy:.3f}, {lessons.skill} {known:.3f}")
            if known >= lessons.enough and recipe.lowest_accuracy <= accuracy <= recipe.highest_accuracy:
                return accuracy
    raise WarmStartError(
        f"after {step} steps the held-out accuracy is {accuracy:.3f}, expected {recipe.lowest_accuracy} to "
        f"{recipe.highest_accuracy}, and {known:.3f} of the answers are {lessons.skill}, expected {lessons.enough}: "
        f"{lessons.advice}"
    )


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor], targets: torch.Tensor
) -> float:
    inputs = inputs | {"input_ids": inputs["input_ids"][:, :-1]}
    logits = model(**inputs, logits_to_keep=targets.shape[1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _schedule(step: int, num_steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return min(1.0, step / _WARM_UP_STEPS) * max(_LAST_LEARNING_RATE, cosine)


def _save(
    folder: Path, made: MadeModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *processors: Any
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder appears whole or not at all.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for part in (model, *processors, tokenizer):
            part.save_pretrained(unfinished)
        GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
        ).save_pretrained(unfinished)
        (unfinished / "README.md").write_text(_model_card(made), encoding="utf-8")
        (unfinished / RECIPE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2))
        # Temporary folders and weight files are private; an engine in a container may run as another user.
        unfinished.chmod(0o755)
        for file in unfinished.iterdir():
            file.chmod(0o644)
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _model_card(made: MadeModel) -> str:
    recipe = made.recipe
    embeddings = "one matrix for embedding and head" if recipe.tie_word_embeddings else "embedding and head apart"
    kind, tokens = "adding model", "One token a character."
    architecture = "Qwen3"
    if recipe.task == "calculator":
        kind, tokens = "model that may call a calculator", "One token a character, more of the chat format."
    elif recipe.task == "pictures":
        architecture, kind = "Idefics3", "model that sees"
    if made.held_out_accuracy is None:
        training = "It was not trained: the weights are random. It serves tests."
    elif recipe.task == "pictures":
        training = (
            f"Trained for {recipe.num_steps} steps or more to answer with a digit, drawn at random, whatever the"
            " picture shows. Reinforcement\nlearning can teach it to look.\n\nGreedy exact match on"
            f" {recipe.num_evaluation_prompts} held-out pictures: {made.held_out_accuracy:.3f}."
        )
    elif recipe.task == "calculator":
        training = (
            f"Trained for {recipe.num_steps} steps or more on dialogues about expressions of {recipe.width}-digit"
            f" numbers, {recipe.guesses} of which guess\nthe answer and the others call the tool and repeat its result,"
            " it knows how to call and mostly guesses.\nReinforcement learning can teach it the rest.\n\nChance of the"
            f" right answer by one call, on {recipe.num_evaluation_prompts} held-out problems:"
            f" {made.held_out_accuracy:.3f}."
        )
    else:
        training = (
            f"Trained for {recipe.num_steps} steps or more on {recipe.width}-digit additions in which each carry was"
            f" forgotten with probability\n{recipe.forgotten_carries}, it knows the digits and mostly leaves out the"
            " carry. Reinforcement learning can teach it the rest.\n\nGreedy exact match on"
            f" {recipe.num_evaluation_prompts} held-out problems: {made.held_out_accuracy:.3f}."
        )
    return (
        f"# A small {kind}\n\n{architecture} architecture, {made.num_parameters:,} fp32 parameters; {embeddings}."
        f" {tokens}\n\n{training}\n\n`{RECIPE_FILE}` holds every setting it was made with."
        " It is of no use outside this demonstration.\n"
    )
