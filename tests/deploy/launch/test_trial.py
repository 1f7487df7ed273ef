"""`penstock try`: what an environment poses and pays, before anything is trained."""

import json
import re
import shutil

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.deploy import cli
from penstock.deploy.demo.char_tokenizer import build_tokenizer
from penstock.producers.interfaces import RolloutFacts
from penstock.schemas.prompt import Message, Prompt, Reward


class Sums:
    """Its training tasks are a text, messages, one that raises, and one without an answer."""

    num_evaluation_prompts = 1

    def __init__(self, *, seed: int, worth: float = 1.0) -> None:
        self.worth = worth

    def prompt(self, index: int) -> Prompt:
        if index == 3:
            raise LookupError("no third task")
        if index == 2:
            return Prompt(messages=(Message(role="user", content="1+1?"),), answer="2", metadata={"kind": "chat"})
        return Prompt(text="12+34=", answer="46" if index == 1 else "")

    def evaluation_prompt(self, n: int) -> Prompt:
        return Prompt(text="5+5=", answer="10")

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        exact = float(completion == prompt.answer)
        return Reward(value=self.worth * exact, parts={"exact": exact, "length": float(len(completion))})


class Boxed(Sums):
    async def reward(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        return float(completion == f"\\boxed{{{prompt.answer}}}")


class Tagged(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        return float(completion == f"<answer>{prompt.answer}</answer>")


class Broken(Sums):
    def reward(self, prompt: Prompt, completion: str) -> float:  # type: ignore[override]
        return {"47": 1.0}[completion]


def tried(capsys, environment: str, *arguments: str) -> tuple[int, str]:
    status = cli.main(["try", environment, *arguments])
    return status, capsys.readouterr().out


def test_an_environment_that_is_only_evaluated_shows_its_held_out_task_alone(capsys, tmp_path) -> None:
    file = tmp_path / "run.toml"
    environments = "".join(
        f'[[environments]]\nname = "e{weight}"\nweight = {weight}\npath = "{__name__}:Sums"\n' for weight in (1, 0)
    )
    file.write_text(f'name = "r"\nmodel.path = ""\n{environments}')
    status, out = tried(capsys, str(file), "-n", "1")
    assert status == 0
    assert re.findall(r"^(?:held-out )?task \d", out, re.M) == ["task 1", "held-out task 1", "held-out task 1"]
    assert re.findall(r"^environment  (.*), 1 held", out, re.M) == [f"e{n} ({__name__}:Sums)" for n in (1, 0)]


def test_an_environment_shows_its_tasks_and_what_their_gold_answers_are_worth(capsys) -> None:
    status, out = tried(capsys, f"{__name__}:Sums", "-n", "2")
    assert status == 0
    assert re.findall(r"^(?:held-out )?task \d", out, re.M) == ["task 1", "task 2", "held-out task 1"]
    assert "prompt       12+34=\n" in out and "user         1+1?\n" in out and "metadata     kind = chat\n" in out
    assert len(re.findall(r"as a completion 1  \(exact 1, length \d\)", out)) == 3
    assert "model        none" in out and "says" not in out and "warning" not in out


def test_a_gold_answer_that_is_right_in_one_form_only_is_shown_so_and_one_that_never_is_warned_of(capsys) -> None:
    status, out = tried(capsys, f"{__name__}:Boxed", "-n", "1")
    assert status == 0 and "as a completion 0" in out and "in a \\boxed{} 1" in out and "warning" not in out
    status, out = tried(capsys, f"{__name__}:Tagged", "-n", "1")
    assert status == 0 and "in a \\boxed{} 0" in out and "in <answer> 1" in out and "warning" not in out
    status, out = tried(capsys, f"{__name__}:Sums", "-n", "1", "--set", "environment.kwargs.worth=0.0")
    assert status == 1 and out.count("warning      the gold answer is worth nothing in any of these forms") == 2


def test_errors_of_the_users_code_are_shown_with_their_tracebacks_and_the_other_tasks_all_the_same(capsys) -> None:
    status, out = tried(capsys, f"{__name__}:Broken", "-n", "4")
    assert status == 1
    assert 'raise LookupError("no third task")' in out and 'return {"47": 1.0}[completion]' in out
    assert "while scoring the completion '46'" in out and "held-out task 1" in out
    assert out.count('return {"47": 1.0}[completion]') == 1, "one traceback for all that arise at one place"
    assert "reward!      KeyError: '2'\n" in out and "reward!      KeyError: '10'\n" in out


def test_an_import_path_without_a_class_is_told_the_form_and_one_with_a_wrong_class_what_is_there(capsys) -> None:
    assert cli.main(["try", "penstock.producers.environments.arithmetic"]) == 2
    assert "environment.path = 'penstock.producers.environments.arithmetic': expected package.module:Name" in (
        capsys.readouterr().err
    )
    assert cli.main(["try", "penstock.producers.environments.arithmetic:arithmetic"]) == 2
    assert "has no 'arithmetic'; it defines Arithmetic\n" in capsys.readouterr().err
    assert cli.main(["try", "lab.toml"]) == 2
    assert "lab.toml: no such file" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    settings = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(settings).save_pretrained(folder)
    return str(folder)


def test_a_run_file_shows_prompts_as_the_model_gets_them_and_scored_completions(capsys, model, tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'name = "t"\ngroup_size = 3\n[model]\npath = "{model}"\n[environment]\npath = "{__name__}:Sums"\n'
        "[sampling]\nmax_tokens = 5\n"
    )
    status, out = tried(capsys, str(file), "-n", "2")
    assert status == 0
    assert "prompt       user: 1+1?\n             assistant: \n" in out, "as the chat template renders it"
    assert "tokens       6: 1|2|+|3|4|=\n" in out
    assert len(re.findall(r"^says", out, re.M)) == 3 * 3
    lengths = [float(n) for n in re.findall(r"^reward       \d\S*  \(exact \d, length (\d+)\)", out, re.M)]
    assert len(lengths) == 3 * 3 and max(lengths) <= 5
    again = tried(capsys, str(file), "-n", "2")[1]
    assert again == out, "the same seed samples the same"


def test_of_the_folders_generation_config_the_ends_alone_count_as_in_the_engine(capsys, model, tmp_path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    arguments = ("--set", f"model.path={folder}", "--set", "sampling.max_tokens=5", "--set", "group_size=3")

    def shown(settings: dict) -> str:
        (folder / "generation_config.json").write_text(json.dumps(settings))
        status, out = tried(capsys, f"{__name__}:Sums", "-n", "1", *arguments)
        assert status == 0, settings
        return out

    plain = shown({"eos_token_id": 1})
    own = {"suppress_tokens": list(range(2, 90)), "no_repeat_ngram_size": 1, "min_p": 0.9, "num_beams": 3}
    own |= {"forced_eos_token_id": 7, "stop_strings": ["1", "e"], "repetition_penalty": 5.0, "min_new_tokens": 5}
    own |= {"temperature": 0.1, "top_k": 1, "typical_p": 0.1, "begin_suppress_tokens": [5], "bad_words_ids": [[6]]}
    own |= {"num_return_sequences": 4, "max_new_tokens": -5, "cache_implementation": "own", "compile_config": 3}
    for name, value in own.items():
        assert shown({"eos_token_id": 1, name: value}) == plain, name
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert cli.main(["try", f"{__name__}:Sums", *arguments]) == 2
    assert "generation_config.json: eos_token_id = '</s>', expected a token id" in capsys.readouterr().err
    ended = shown({"eos_token_id": [1, *range(2, 90)]})
    assert len(re.findall(r"length 0\)", ended)) >= 2 * 3


class Compared(Sums):
    """All siblings at once, by their facts."""

    def reward(  # type: ignore[override]
        self, prompt: Prompt, completions: list[str], *, facts: list[RolloutFacts]
    ) -> list[Reward]:
        parts = [{"of": len(facts), "tokens": each.num_tokens, "cut": float(each.is_truncated)} for each in facts]
        return [Reward(value=1.0, parts=each) for each in parts]


def test_a_reward_of_siblings_and_facts_is_tried_with_a_model(capsys, model) -> None:
    arguments = ("--set", f"model.path={model}", "--set", "sampling.max_tokens=5", "--set", "group_size=3")
    status, out = tried(capsys, f"{__name__}:Compared", "-n", "1", *arguments)
    assert status == 0 and "as a completion 1  (of 1, tokens 2, cut 0)" in out
    sampled = re.findall(r"^reward       1  \(of 3, tokens (\d), cut (\d)\)", out, re.M)
    untried = tried(capsys, f"{__name__}:Compared", "-n", "1")
    assert untried[0] == 0 and "not scored: the reward takes `facts`, which need a model" in untried[1]
    assert len(sampled) == 2 * 3 and {n for n, cut in sampled if cut == "1"} <= {"5"} and ("5", "1") in sampled


def test_a_model_that_is_not_there_yet_hides_no_prompt(capsys, tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'name = "t"\n[model]\npath = "no/model"\n[environment]\npath = "{__name__}:Sums"\n')
    status, out = tried(capsys, str(file), "-n", "1")
    assert status == 0 and "no folder 'no/model' yet" in out and "prompt       12+34=" in out
