"""The recipes of the models that `penstock make-model` makes, and the one that a folder holds. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

RECIPE_FILE = "recipe.json"


class ModelRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a model; equal recipes make equal models on one machine."""

    task: Literal["addition", "calculator", "pictures"] = "addition"
    """`addition`: the demo's. `calculator`: an agent that may call the tool of the environment `Calculator`.
    `pictures`: a model that sees, for the environment `DrawnShapes`; its tower has the sizes of its language model."""
    seed: int = 0
    """Initial weights and the examples of the warm start."""
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    """32 or 64, which the engine's attention kernels support on CPU and GPU."""
    max_tokens: int = 1024
    """The longest sequence, prompt included."""
    tie_word_embeddings: bool = False
    """One matrix for the embedding and the head."""
    train: bool = True
    """False leaves the initial weights as they are, for tests."""
    width: int = 2
    """Digits of an operand, as in the environments `Arithmetic` and `Calculator`."""
    forgotten_carries: float = 0.6
    """`addition`: share of the carries that the examples forget. Above a half the model adds digits well but prefers no
    carry."""
    guesses: float = 0.6
    """`calculator`: share of the examples that answer without the tool, with a number of as many digits."""
    num_steps: int = 600
    """Optimizer steps of the warm start; as many again may follow until the skill is reached."""
    batch_size: int = 64
    learning_rate: float = 2e-3
    """Peak, after a linear warm-up and before a cosine decay."""
    lowest_accuracy: float = 0.30
    highest_accuracy: float = 0.45
    """The warm start ends with an accuracy on the held-out problems between these two, or fails."""
    num_evaluation_prompts: int = 256
    """Held-out problems that the accuracy is measured on."""

    def __post_init__(self) -> None:
        if self.head_dim not in (32, 64):
            raise ValueError(f"ModelRecipe: head_dim is {self.head_dim}, expected 32 or 64")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"ModelRecipe: num_heads is {self.num_heads}, expected a multiple of {self.num_kv_heads}")
        for name in ("num_steps", "batch_size", "num_evaluation_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelRecipe: {name} is {getattr(self, name)}, expected 1 or more")
        for name in ("forgotten_carries", "guesses"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"ModelRecipe: {name} is {getattr(self, name)}, expected 0 to 1")
        if not 0.0 <= self.lowest_accuracy < self.highest_accuracy <= 1.0:
            band = f"lowest_accuracy is {self.lowest_accuracy} and highest_accuracy is {self.highest_accuracy}"
            raise ValueError(f"ModelRecipe: {band}, expected the first to be smaller and both in 0 to 1")


RECIPES = {
    "addition": ModelRecipe(),
    "calculator": ModelRecipe(task="calculator", batch_size=24, learning_rate=3e-3),  # dialogues are long
    "pictures": ModelRecipe(
        task="pictures",
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_steps=60,
        lowest_accuracy=0.0,
        highest_accuracy=0.3,
    ),
}
"""Each task's default recipe."""


class MadeModel(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `recipe.json` in the model's folder."""

    recipe: ModelRecipe
    num_parameters: int
    held_out_accuracy: float | None = None
    """Greedy exact match, of `calculator` the chance of the right answer by one call; None for a model that was
    not trained."""


class WarmStartError(RuntimeError):
    """The warm start ended outside the band of accuracies."""


def find_model(folder: Path, recipe: ModelRecipe, progress: Callable[[str], None] = print) -> MadeModel | None:
    """Returns the model that `folder` holds, and reports it; None if the folder is empty.

    Raises:
        FileExistsError: `folder` holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        found = msgspec.json.decode((folder / RECIPE_FILE).read_bytes(), type=MadeModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise FileExistsError(f"{folder} holds something other than a model made here: {error}") from error
    if found.recipe != recipe:
        old, new = msgspec.structs.asdict(found.recipe), msgspec.structs.asdict(recipe)
        changes = ", ".join(f"{name} {old[name]} (wanted {new[name]})" for name in new if old[name] != new[name])
        raise FileExistsError(f"{folder} holds another model: {changes}; remove it or name another folder")
    progress(f"{folder} already holds this model")
    return found
