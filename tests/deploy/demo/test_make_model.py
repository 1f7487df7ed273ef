from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Processor,
)

from penstock.deploy.cli import main
from penstock.deploy.demo.calculator_lessons import NO_TARGET, CalculatorLessons, build_calculator_tokenizer
from penstock.deploy.demo.char_tokenizer import ALPHABET
from penstock.deploy.demo.make_model import RECIPES, MadeModel, ModelRecipe, WarmStartError, make_model
from penstock.deploy.demo.picture_lessons import PictureLessons
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.producers.environments.calculator import TOOLS
from penstock.producers.environments.pictures import MOST, DrawnShapes
from penstock.schemas.prompt import Prompt

RANDOM = ModelRecipe(train=False, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1)
QUICK = ModelRecipe(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, num_steps=20, batch_size=8,
    num_evaluation_prompts=16,
)  # fmt: skip


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "random"
    make_model(folder, RANDOM, progress=silent)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_tokenizer_gives_back_every_character_and_has_an_end_and_a_chat_template(random_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    for text in ("07+34=041", "", "  two  spaces, a \n newline \n\n", "don 't , do . that !", ALPHABET):
        token_ids = tokenizer(text).input_ids
        assert len(token_ids) == len(text) and tokenizer.decode(token_ids) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("7 ÷ 8")
    token_ids = tokenizer("041<eos>").input_ids
    assert len(token_ids) == 4 and token_ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "041"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Be brief.\nuser: 1+1?\nassistant: "


def test_the_folder_holds_what_an_engine_loads(random_model: Path):
    model = AutoModelForCausalLM.from_pretrained(random_model)
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    generation = GenerationConfig.from_pretrained(random_model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert generation.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == model.config.pad_token_id == tokenizer.pad_token_id
    card = (random_model / "README.md").read_text()
    assert "It was not trained" in card and f"{model.num_parameters():,}" in card
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_the_seed_decides_the_weights_and_leaves_the_process_alone(tmp_path: Path, random_model: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_model(tmp_path / "same", RANDOM, progress=silent)
    make_model(tmp_path / "other", msgspec.structs.replace(RANDOM, seed=1, tie_word_embeddings=True), progress=silent)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = weights(random_model), weights(tmp_path / "same"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(other["lm_head.weight"], other["model.embed_tokens.weight"]), "one matrix where it is asked for"


def test_a_folder_that_holds_the_model_is_left_as_it_is_and_another_is_never_overwritten(tmp_path: Path):
    made = make_model(tmp_path / "m", RANDOM, progress=silent)
    changed = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert make_model(tmp_path / "m", RANDOM, progress=lines.append) == made
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == changed
    assert lines == [f"{tmp_path / 'm'} already holds this model"]
    with pytest.raises(FileExistsError, match=r"another model: seed 0 \(wanted 3\)"):
        make_model(tmp_path / "m", msgspec.structs.replace(RANDOM, seed=3), progress=silent)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="something other than a model"):
        make_model(tmp_path / "theirs", RANDOM, progress=silent)
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "years of work"


def test_a_warm_start_outside_the_band_fails_and_saves_nothing(tmp_path: Path):
    lines: list[str] = []
    with pytest.raises(
        WarmStartError, match=r"after 100 steps the held-out accuracy is 0\.\d+, expected 0\.3 to 0\.45"
    ):
        make_model(tmp_path / "m", msgspec.structs.replace(QUICK, num_steps=50), progress=lines.append)
    assert list(tmp_path.iterdir()) == []
    assert any("held-out accuracy" in line for line in lines)
    quick = msgspec.structs.replace(QUICK, task="calculator", num_steps=2)
    with pytest.raises(WarmStartError, match=r"after 4 steps .* right once the tool is called, expected 0\.9"):
        make_model(tmp_path / "m", quick, progress=silent)
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_recipe_is_refused():
    for arguments, message in (
        ({"head_dim": 48}, "head_dim is 48, expected 32 or 64"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3, expected a multiple of 2"),
        ({"forgotten_carries": 1.5}, r"forgotten_carries is 1\.5"),
        ({"lowest_accuracy": 0.5}, r"lowest_accuracy is 0\.5 and highest_accuracy is 0\.45"),
        ({"num_steps": 0}, "num_steps is 0, expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelRecipe(**arguments)


@pytest.mark.slow
def test_the_warm_start_ends_in_the_band_and_the_saved_model_confirms_it(demo_model: Path):
    made = msgspec.json.decode((demo_model / "recipe.json").read_bytes(), type=MadeModel)
    assert made.recipe == ModelRecipe() and 0.30 <= made.held_out_accuracy <= 0.45
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    environment = Arithmetic(seed=0)
    prompts: list[Prompt] = [environment.evaluation_prompt(n) for n in range(1, 257)]
    token_ids = tokenizer([prompt.text for prompt in prompts], return_tensors="pt")
    sampled = model.generate(**token_ids, do_sample=False, temperature=None, max_new_tokens=4)[:, 6:]
    completions = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards = [environment.reward(p, c).value for p, c in zip(prompts, completions, strict=True)]
    assert sum(rewards) / 256 == made.held_out_accuracy


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "47*83-26"}}</tool_call>'
DIALOGUE = (
    "<|im_start|>system\ntools: calculator<|im_end|>\n<|im_start|>user\nWhat is 47*83-26?<|im_end|>\n"
    f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>tool\n3875<|im_end|>\n"
    "<|im_start|>assistant\n3875<|im_end|>\n"
)
MESSAGES = [
    {"role": "user", "content": "What is 47*83-26?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "47*83-26"}}}],
    },
    {"role": "tool", "content": "3875"},
    {"role": "assistant", "content": "3875"},
]


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "calling"
    make_model(folder, msgspec.structs.replace(RANDOM, task="calculator"), progress=silent)
    return folder


def test_the_calculator_models_chat_template_writes_calls_as_hermes_reads_them(calling_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(calling_model)
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False) == DIALOGUE
    asked = tokenizer.apply_chat_template(MESSAGES[:1], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert DIALOGUE.startswith(asked) and asked.endswith("<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(MESSAGES[2:3], tokenize=False) == "<|im_start|>tool\n3875<|im_end|>\n"


def test_the_calculator_models_tokenizer_keeps_a_call_short_and_gives_it_back(calling_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(calling_model)
    token_ids = tokenizer(CALL).input_ids
    assert len(token_ids) == len("47*83-26") + 6
    for text in (DIALOGUE, CALL, "the user's tool says: system", '{"name": "x"}', ALPHABET):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer(DIALOGUE).input_ids)[-2:] == ["<|im_end|>", "\n"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == CALL


def test_the_calculator_lessons_train_what_the_model_says_and_nothing_else():
    recipe = ModelRecipe(task="calculator", batch_size=200, num_evaluation_prompts=4)
    tokenizer = build_calculator_tokenizer(256)
    inputs, targets = CalculatorLessons(tokenizer, recipe).batch()
    num_called = 0
    for row, wanted in zip(inputs["input_ids"][:, 1:], targets, strict=True):
        assert torch.equal(row[wanted != NO_TARGET], wanted[wanted != NO_TARGET])
        text = tokenizer.decode(row, skip_special_tokens=False)
        said = [part.partition("<|im_start|>assistant\n")[2] for part in text.split("<|im_end|>\n")]
        assert tokenizer.decode(wanted[wanted != NO_TARGET]) == "".join(f"{part}<|im_end|>" for part in said if part)
        num_called += "<tool_call>" in text
    assert num_called / 200 == pytest.approx(1 - recipe.guesses, abs=0.12)


def test_the_command_makes_the_model_of_a_task_and_takes_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture):
    fields = {"train": "false", "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}
    settings = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    assert main(["make-model", str(tmp_path / "m"), "--task", "calculator", "--seed", "3", *settings]) == 0
    made = msgspec.json.decode((tmp_path / "m" / "recipe.json").read_bytes(), type=MadeModel)
    wanted = {"seed": 3, "train": False, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1}
    assert made.recipe == msgspec.structs.replace(RECIPES["calculator"], **wanted)
    assert "may call a calculator" in (tmp_path / "m" / "README.md").read_text()
    assert main(["make-model", str(tmp_path / "m"), "--set", "guesses=2"]) == 2
    assert "guesses is 2.0, expected 0 to 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_calculator_model_knows_how_to_call_and_mostly_does_not(calculator_model: Path):
    made = make_model(calculator_model, RECIPES["calculator"], progress=silent)
    assert 0.30 <= made.held_out_accuracy <= 0.45
    assert "Chance of the right answer" in (calculator_model / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(calculator_model)
    tokenizer = AutoTokenizer.from_pretrained(calculator_model)
    asked = tokenizer.apply_chat_template(
        MESSAGES[:1], tools=TOOLS, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    sampled = model.generate(**asked, max_new_tokens=24, num_return_sequences=100)[:, asked["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    called = [text for text in said if text.startswith("<tool_call>")]
    assert 0.25 <= len(called) / 100 <= 0.6
    assert sum(text == CALL for text in called) / len(called) > 0.7
    assert all(text.lstrip("-").isdecimal() for text in said if text not in called)


def test_the_model_that_sees_is_taught_to_answer_with_a_digit_whatever_it_sees(tmp_path: Path):
    made = make_model(tmp_path / "m", msgspec.structs.replace(RECIPES["pictures"], train=False), progress=silent)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "m")
    processor = Idefics3Processor.from_pretrained(tmp_path / "m")
    assert model.num_parameters() == made.num_parameters and type(model).__name__.startswith("Idefics3")
    recipe = msgspec.structs.replace(RECIPES["pictures"], batch_size=200, num_evaluation_prompts=60)
    lessons = PictureLessons(processor.tokenizer, recipe)
    inputs, targets = lessons.batch()
    answers = processor.tokenizer.batch_decode(targets)
    assert Counter(answers).keys() == {f"{digit}<eos>" for digit in range(1, MOST + 1)}
    truth = [DrawnShapes(seed=recipe.seed).prompt(n).answer for n in range(1, 201)]
    agreed = sum(answer[0] == right for answer, right in zip(answers, truth, strict=True))
    assert agreed / 200 == pytest.approx(1 / MOST, abs=0.1), "guesses"
    num_seen = (inputs["input_ids"] == model.config.image_token_id).sum(-1)
    assert set(num_seen.tolist()) == {9} and inputs["pixel_values"].shape == (200, 1, 3, 48, 48)
    seen = model.get_image_features(inputs["pixel_values"][:2]).pooler_output
    assert seen.shape[1:] == (9, recipe.hidden_size) and not torch.allclose(seen[0], seen[1])
    assert "sees" in (tmp_path / "m" / "README.md").read_text()
    accuracy, known = lessons.held_out(model)
    assert accuracy < 0.3 and known < 1
