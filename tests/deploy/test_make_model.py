from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from deploy.make_model import ALPHABET, MadeModel, ModelRecipe, WarmStartError, make_model
from producers.environments.arithmetic import Arithmetic
from schemas.prompt import Prompt

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


def test_the_tokenizer_gives_back_every_character(random_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    for text in ("07+34=041", "", "  two  spaces, a \n newline \n\n", "don 't , do . that !", ALPHABET):
        token_ids = tokenizer(text).input_ids
        assert len(token_ids) == len(text)
        assert tokenizer.decode(token_ids) == text


def test_a_character_without_a_token_is_an_error(random_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    with pytest.raises(Exception, match="UNK"):
        tokenizer("7 ÷ 8")


def test_the_end_of_the_text_is_one_token_that_decoding_can_skip(random_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    token_ids = tokenizer("041<eos>").input_ids
    assert len(token_ids) == 4
    assert token_ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "041"


def test_messages_have_a_chat_template(random_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(random_model)
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
    assert "It was not trained" in card
    assert f"{model.num_parameters():,}" in card


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_one_matrix_only_where_asked_for(tmp_path: Path, tied: bool):
    made = make_model(tmp_path / "m", msgspec.structs.replace(RANDOM, tie_word_embeddings=tied), progress=silent)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.tie_word_embeddings is tied
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is tied
    assert made.num_parameters == model.num_parameters()
    assert made.held_out_accuracy is None


def test_the_default_model_has_between_100k_and_1m_parameters(tmp_path: Path):
    assert 100_000 <= make_model(tmp_path / "m", ModelRecipe(train=False), progress=silent).num_parameters <= 1_000_000


def test_the_seed_decides_the_weights_and_leaves_the_process_alone(tmp_path: Path, random_model: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make_model(tmp_path / "same", RANDOM, progress=silent)
    make_model(tmp_path / "other", msgspec.structs.replace(RANDOM, seed=1), progress=silent)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = weights(random_model), weights(tmp_path / "same"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_folder_that_holds_the_model_is_left_as_it_is(tmp_path: Path):
    made = make_model(tmp_path / "m", RANDOM, progress=silent)
    changed = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert make_model(tmp_path / "m", RANDOM, progress=lines.append) == made
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == changed
    assert lines == [f"{tmp_path / 'm'} already holds this model"]


def test_a_folder_that_holds_something_else_is_never_overwritten(tmp_path: Path):
    make_model(tmp_path / "m", RANDOM, progress=silent)
    with pytest.raises(FileExistsError, match=r"another model: seed 0 \(wanted 3\)"):
        make_model(tmp_path / "m", msgspec.structs.replace(RANDOM, seed=3), progress=silent)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="something other than a model"):
        make_model(tmp_path / "theirs", RANDOM, progress=silent)
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "years of work"


def test_a_warm_start_outside_the_band_fails_and_saves_nothing(tmp_path: Path):
    lines: list[str] = []
    with pytest.raises(WarmStartError, match=r"after 40 steps the held-out accuracy is 0\.\d+, expected 0\.3 to 0\.45"):
        make_model(tmp_path / "m", QUICK, progress=lines.append)
    assert list(tmp_path.iterdir()) == []
    assert any("held-out accuracy" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 48}, "head_dim is 48, expected 32 or 64"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads is 3, expected a multiple of 2"),
        ({"forgotten_carries": 1.5}, r"forgotten_carries is 1\.5"),
        ({"lowest_accuracy": 0.5}, r"lowest_accuracy is 0\.5 and highest_accuracy is 0\.45"),
        ({"num_steps": 0}, "num_steps is 0, expected 1 or more"),
    ],
)
def test_an_impossible_recipe_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ModelRecipe(**arguments)


@pytest.mark.slow
def test_the_warm_start_ends_in_the_band_and_the_saved_model_confirms_it(tmp_path: Path):
    lines: list[str] = []
    made = make_model(tmp_path / "m", ModelRecipe(seed=5), progress=lines.append)
    assert 0.30 <= made.held_out_accuracy <= 0.45
    assert msgspec.json.decode((tmp_path / "m" / "recipe.json").read_bytes(), type=MadeModel) == made
    assert lines[0].startswith("warm start: step 100 of 600, loss ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    environment = Arithmetic(seed=0)
    prompts: list[Prompt] = [environment.evaluation_prompt(n) for n in range(1, 257)]
    token_ids = tokenizer([prompt.text for prompt in prompts], return_tensors="pt")
    sampled = model.generate(**token_ids, do_sample=False, temperature=None, max_new_tokens=4)[:, 6:]
    completions = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    rewards = [environment.reward(p, c).value for p, c in zip(prompts, completions, strict=True)]
    assert sum(rewards) / 256 == made.held_out_accuracy
