"""The demo's model: a small Qwen3 that has learned to add from examples in which carries are often forgotten."""

import itertools
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from producers.environments.arithmetic import Arithmetic
from schemas.prompt import Prompt

RECIPE_FILE = "recipe.json"
PAD, EOS = "<pad>", "<eos>"
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_WARM_UP_STEPS = 20
_LAST_LEARNING_RATE = 0.05
"""Share of the learning rate that the schedule ends at."""
_DIGITS_KNOWN = 0.97
"""Share of the answers that must be right but for carries. Below .9 the RL that follows is slow and stops short."""


class ModelRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides what the model is; equal recipes make equal models on one machine."""

    seed: int = 0
    """Initial weights, problems and forgotten carries of the warm start."""
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    """32 or 64: sizes that the engine's attention kernels know on a CPU and on a GPU."""
    max_tokens: int = 1024
    """The longest sequence, prompt included."""
    tie_word_embeddings: bool = False
    """One matrix for the embedding and the head."""
    train: bool = True
    """False leaves the initial weights as they are, for tests."""
    width: int = 2
    """Digits of an operand, as in the environment `Arithmetic`."""
    forgotten_carries: float = 0.6
    """Share of the carries that the examples forget. Above a half the model adds digits well but prefers no carry."""
    num_steps: int = 600
    """Optimizer steps of the warm start; as many again may follow until the digits are known."""
    batch_size: int = 64
    learning_rate: float = 2e-3
    """Peak, after a linear warm-up and before a cosine decay."""
    lowest_accuracy: float = 0.30
    highest_accuracy: float = 0.45
    """The warm start ends with a greedy exact match on the held-out problems between these two, or fails."""
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
        if not 0.0 <= self.forgotten_carries <= 1.0:
            raise ValueError(f"ModelRecipe: forgotten_carries is {self.forgotten_carries}, expected 0 to 1")
        if not 0.0 <= self.lowest_accuracy < self.highest_accuracy <= 1.0:
            band = f"lowest_accuracy is {self.lowest_accuracy} and highest_accuracy is {self.highest_accuracy}"
            raise ValueError(f"ModelRecipe: {band}, expected the first to be smaller and both in 0 to 1")


class MadeModel(msgspec.Struct, frozen=True, kw_only=True):
    """What `recipe.json` in the model's folder holds."""

    recipe: ModelRecipe
    num_parameters: int
    held_out_accuracy: float | None = None
    """Greedy exact match; None for a model that was not trained."""


class WarmStartError(RuntimeError):
    """The warm start ended outside the band of accuracies."""


def make_model(
    folder: str | Path, recipe: ModelRecipe | None = None, *, progress: Callable[[str], None] = print
) -> MadeModel:
    """Builds, warm-starts and saves the model with its tokenizer; does nothing where `folder` already holds it.

    Raises:
        FileExistsError: `folder` holds something else.
        WarmStartError: the accuracy is outside the recipe's band; nothing was saved.
    """
    folder, recipe = Path(folder), recipe or ModelRecipe()
    disable_progress_bar()  # transformers draws one even for a megabyte
    if (found := _find_model(folder, recipe)) is not None:
        progress(f"{folder} already holds this model")
        return found
    # Tests make several models in one process: none of them may move the process's own random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        tokenizer = build_tokenizer(recipe.max_tokens)
        model = build_model(recipe, tokenizer)
        accuracy = warm_start(model, tokenizer, recipe, progress) if recipe.train else None
    made = MadeModel(recipe=recipe, num_parameters=model.num_parameters(), held_out_accuracy=accuracy)
    _save(folder, made, model, tokenizer)
    progress(f"saved {made.num_parameters:,} parameters to {folder}")
    return made


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII and newline; any other character is an error, never dropped."""
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


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


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: ModelRecipe, progress: Callable[[str], None]
) -> float:
    """Trains on sums with forgotten carries until the digits are known; returns the held-out accuracy.

    Raises:
        WarmStartError: the accuracy is outside the band, or the digits are not known after twice `num_steps`.
    """
    environment = Arithmetic(seed=recipe.seed, width=recipe.width, num_evaluation_prompts=recipe.num_evaluation_prompts)
    forgetting = random.Random(f"{recipe.seed}:forgotten carries")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    indices = itertools.count(1)
    for step in range(1, 2 * recipe.num_steps + 1):
        prompts = [environment.prompt(index) for index in itertools.islice(indices, recipe.batch_size)]
        texts = [_example(prompt, recipe.forgotten_carries, forgetting) for prompt in prompts]
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.num_steps)
        loss = _step(model, optimizer, tokenizer(texts, return_tensors="pt").input_ids, recipe.width + 2)
        if step % 100 == 0:
            progress(f"warm start: step {step} of {recipe.num_steps}, loss {loss:.3f}")
        if step >= recipe.num_steps and (step - recipe.num_steps) % 20 == 0:
            accuracy, digits_known = held_out_accuracy(model, tokenizer, environment)
            progress(f"warm start: held-out accuracy {accuracy:.3f}, right but for carries {digits_known:.3f}")
            if digits_known >= _DIGITS_KNOWN and recipe.lowest_accuracy <= accuracy <= recipe.highest_accuracy:
                return accuracy
    raise WarmStartError(
        f"after {step} steps the held-out accuracy is {accuracy:.3f}, expected {recipe.lowest_accuracy} to "
        f"{recipe.highest_accuracy}, and {digits_known:.3f} of the answers are right but for carries, expected "
        f"{_DIGITS_KNOWN}: more num_steps raise both, a larger forgotten_carries lowers the accuracy"
    )


@torch.no_grad()
def held_out_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, environment: Arithmetic
) -> tuple[float, float]:
    """Shares of the held-out problems whose greedy answer is exact, and is right but for forgotten carries."""
    prompts = [environment.evaluation_prompt(n) for n in range(1, environment.num_evaluation_prompts + 1)]
    token_ids = tokenizer([prompt.text for prompt in prompts], return_tensors="pt").input_ids
    prompt_length = token_ids.shape[1]
    for _ in range(len(prompts[0].answer) + 1):
        likeliest = model(input_ids=token_ids, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        token_ids = torch.cat([token_ids, likeliest], dim=1)
    answers = [text.partition(EOS)[0] for text in tokenizer.batch_decode(token_ids[:, prompt_length:])]
    num_exact = sum(answer == prompt.answer for answer, prompt in zip(answers, prompts, strict=True))
    num_known = sum(answer in _sums_but_for_carries(prompt) for answer, prompt in zip(answers, prompts, strict=True))
    return num_exact / len(prompts), num_known / len(prompts)


def _step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, token_ids: torch.Tensor, answer: int) -> float:
    """One step on the last `answer` tokens of each row."""
    logits = model(input_ids=token_ids[:, :-1], logits_to_keep=answer).logits
    loss = F.cross_entropy(logits.flatten(0, 1), token_ids[:, -answer:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _schedule(step: int, num_steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return min(1.0, step / _WARM_UP_STEPS) * max(_LAST_LEARNING_RATE, cosine)


def _example(prompt: Prompt, share: float, forgetting: random.Random) -> str:
    """The sum from right to left, each carry forgotten with probability `share`: after `47+85=` it may be `122`."""
    digits, carry = "", 0
    for x, y in _columns(prompt):
        column = x + y + carry
        digits = str(column % 10) + digits
        carry = int(column >= 10 and forgetting.random() >= share)
    return f"{prompt.text}{carry}{digits}{EOS}"


def _sums_but_for_carries(prompt: Prompt) -> set[str]:
    """Every answer that some choice of forgotten carries gives, the right one among them."""
    unfinished = {("", 0)}
    for x, y in _columns(prompt):
        sums = {(str((x + y + carry) % 10) + digits, x + y + carry) for digits, carry in unfinished}
        unfinished = {(digits, carry) for digits, column in sums for carry in {0, column // 10}}
    return {str(carry) + digits for digits, carry in unfinished}


def _columns(prompt: Prompt) -> list[tuple[int, int]]:
    assert prompt.text is not None
    a, b = prompt.text.removesuffix("=").split("+")
    return [(int(x), int(y)) for x, y in zip(reversed(a), reversed(b), strict=True)]


def _find_model(folder: Path, recipe: ModelRecipe) -> MadeModel | None:
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
    return found


def _save(folder: Path, made: MadeModel, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder appears whole or not at all: an interrupted save must not pass for a model.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
        ).save_pretrained(unfinished)
        (unfinished / "README.md").write_text(_model_card(made))
        (unfinished / RECIPE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2))
        # Temporary folders and weight files are private; an engine in a container may be another user.
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
    if made.held_out_accuracy is None:
        training = "It was not trained: the weights are random. It serves tests."
    else:
        training = (
            f"Trained for {recipe.num_steps} steps or more on {recipe.width}-digit additions in which each carry was"
            f" forgotten with probability\n{recipe.forgotten_carries}, it knows the digits and mostly leaves out the"
            " carry. Reinforcement learning can teach it the rest.\n\nGreedy exact match on"
            f" {recipe.num_evaluation_prompts} held-out problems: {made.held_out_accuracy:.3f}."
        )
    return (
        f"# A small adding model\n\nQwen3 architecture, {made.num_parameters:,} fp32 parameters; {embeddings}."
        f" One token a character.\n\n{training}\n\n`{RECIPE_FILE}` holds every setting it was made with."
        " It is of no use outside this demonstration.\n"
    )
