"""`penstock evaluate`: which model, which prompts, how they are answered, what is printed, what is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
import probed_engine
from letters_environment import Letters
from penstock.deploy import cli
from penstock.deploy.evaluate import evaluation
from penstock.deploy.evaluate.evaluation import Evaluated, answer_held_out, evaluate
from penstock.deploy.launch.start_checks import check_environments
from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments
from penstock.schemas.config import HeldOutConfig, RunConfig, load_config
from scripted_engine import ScriptedEngine

RUN_FILE = """
name = "letters"
group_size = 4
[model]
path = "none"
[sampling]
max_tokens = 6
[evaluation]
num_samples = 4
temperature = 0.7
pass_at = [1, 2]
solved = { value = 0.5 }
[[environments]]
name = "letters"
path = "letters_environment:Letters"
[[environments]]
name = "greedy"
path = "letters_environment:Letters"
weight = 0
[environments.evaluation]
num_prompts = 1
num_samples = 1
"""
A, B, END = 2, 3, 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    probed_engine.model(tied=True, seed=3).save_pretrained(folder)
    probed_engine.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    def load(*overrides: str) -> RunConfig:
        (tmp_path / "run.toml").write_text(RUN_FILE)
        return load_config(tmp_path / "run.toml", overrides)

    return load


def scripted(**settings: Any) -> tuple[ScriptedEngine, Any]:
    """An engine of whose answers every other is solved, and what starts it."""

    def answers(prompt: list[int], sibling: int) -> list[int]:
        return [A, A, END] if sibling % 2 == 0 else [B, B, B, B, B, B]

    engine = ScriptedEngine(**{"script": answers, "finish_reasons": {1: "length", 3: "length"}} | settings)

    async def start(config: RunConfig, *, seed: int) -> ScriptedEngine:
        os.write(1, b"engine noise\n")  # as a process of its own does
        engine.model = config.model.path
        return engine

    return engine, start


def test_every_set_is_answered_as_it_asks_also_one_that_is_not_trained_on(model, config):
    engine, start = scripted()
    found = evaluate(model, config(), start_engine=start)
    letters, greedy = found.sets
    assert (letters.name, letters.num_prompts, letters.num_samples, letters.num_failed) == ("letters", 2, 4, 0)
    figures = {"reward": 0.5, "reward_se": 0.0, "pass@1": 0.5, "pass@1_se": 0.0, "pass@2_se": 0.0, "num_samples": 8}
    assert letters.figures == pytest.approx(
        {**figures, "pass@2": 5 / 6, "completion_tokens": 4.5, "truncated_frac": 0.5}
    )
    assert (greedy.name, greedy.num_prompts, greedy.num_samples) == ("greedy", 1, 1)
    assert greedy.figures == {
        "reward": 1.0,
        "pass@1": 1.0,
        "completion_tokens": 3.0,
        "truncated_frac": 0.0,
        "num_samples": 1,
    }
    assert sorted((each.temperature, each.max_tokens) for each in engine.samplings) == [(0.7, 6)] * 3
    assert (found.model, engine.model, engine.closed) == (str(model), str(model), True)


def test_as_many_are_in_flight_as_a_producer_has_room_for(model, config):
    engine, start = scripted(token_s=0.001)
    overrides = ["producers.groups_in_flight=2", "environments=[{path='letters_environment:Letters'}]"]
    evaluate(model, config("evaluation.num_samples=8", *overrides), start_engine=start)
    assert engine.most_active == 1


def test_progress_a_set_without_prompts_and_a_figure_that_no_answer_has_are_told(model, config):
    said: list[str] = []
    misspelt = config("evaluation.num_prompts=0", "evaluation.solved={figure='reward/exat'}")
    found = evaluate(model, misspelt, start_engine=scripted()[1], say=said.append)
    assert [each.name for each in found.sets] == ["greedy"]
    assert said[0] == "letters has no held-out prompts, or none are requested: it is left out"
    assert said[1].startswith("booting the engine on ") and "1 of 1 held-out prompts answered" in said
    assert not [key for each in found.sets for key in each.figures if key.startswith("pass@")]
    assert said[-1].startswith("evaluation.solved.figure = 'reward/exat' of greedy: held-out answers have no such")


class OneFails(Letters):
    def evaluation_prompt(self, n: int):
        if n == 2:
            raise LookupError("no task 2")
        return super().evaluation_prompt(n)


@pytest.fixture
def in_place_of_vllm(tmp_path, monkeypatch) -> Callable[..., None]:
    """Has evaluations boot a scripted engine, and leave their logs in `tmp_path`."""

    def put(**settings: Any) -> None:
        monkeypatch.setattr(evaluation.evaluate, "__kwdefaults__", {
            **(evaluation.evaluate.__kwdefaults__ or {}), "start_engine": scripted(**settings)[1],
        })  # fmt: skip
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    return put


@pytest.fixture
def command(config, in_place_of_vllm, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """`penstock evaluate` with a scripted engine; returns the status, stdout and stderr."""

    def run(*words: str, environment: type = Letters, **settings: Any) -> tuple[int, str, str]:
        config()
        monkeypatch.setattr("letters_environment.Letters", environment)
        in_place_of_vllm(**settings)
        for name in ("REDIS_URL", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        status = cli.main(["evaluate", *words, "--runs", str(tmp_path / "runs")])
        shown = capfd.readouterr()
        return status, shown.out, shown.err

    return run


def test_the_command_prints_a_column_for_each_set(command, model, tmp_path):
    status, out, err = command(str(model), str(tmp_path / "run.toml"))
    rows = [" ".join(line.split()) for line in out.splitlines() if line.strip()]
    assert rows[0] == "set letters greedy"
    assert rows[2:] == [
        "prompts 2 1",
        "samples 4 1",
        "avg@k 0.500 ± 0.000 1.000",
        "pass@1 0.500 ± 0.000 1.000",
        "pass@2 0.833 ± 0.000 -",
        "length 4.5 3.0",
        "truncated 50.0% 0.0%",
    ]
    assert max(map(len, out.splitlines())) < 80
    assert status == 0 and "3 of 3 held-out prompts answered" in err
    assert not list(tmp_path.glob("*.log")), "nothing is left behind"
    _, out, _ = command(str(model), str(tmp_path / "run.toml"), "--show", "1")
    assert "letters, held-out prompt 1: reward 1\n" in out and "letters, held-out prompt 2" not in out
    assert "answer   aa\n" in out.partition("letters, held-out")[2]
    words = ("--json", "--set", "evaluation.num_samples=2")
    status, out, _ = command(str(model), str(tmp_path / "run.toml"), *words)
    document = json.loads(out)
    assert status == 0 and [each["num_samples"] for each in document["sets"]] == [2, 1]
    assert document["sets"][0]["figures"]["pass@2"] == 1.0


def test_prompts_that_fail_count_as_0_and_are_told_with_their_reasons(command, model, tmp_path):
    status, out, err = command(str(model), str(tmp_path / "run.toml"), environment=OneFails)
    assert status == 1
    assert "0.250 ± 0.250" in out
    assert "1 of 3 prompts failed, each counts as 0: prompt: LookupError: no task 2" in err


def test_from_python_progress_is_told_the_engines_output_is_not_and_threads_are_limited(
    in_place_of_vllm, model, config, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    in_place_of_vllm()
    found = penstock.evaluate(model, config(), set={"producers.num_threads": 3})
    out, err = capfd.readouterr()
    assert isinstance(found, penstock.Evaluated) and isinstance(found.sets[0], penstock.SetResult)
    assert "3 of 3 held-out prompts answered" in err and "engine noise" not in out + err
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert not found.failures and not list(tmp_path.glob("*.log"))
    in_place_of_vllm(die_after=1)
    with pytest.raises(penstock.EngineError, match=r"has died \(.*penstock-evaluate-.*log holds what the engine"):
        penstock.evaluate(model, config())


def test_what_cannot_be_evaluated_is_refused(command, model, tmp_path):
    for name in ("adapter", "best", "empty", "bare"):
        (tmp_path / name).mkdir()
    for file in ("adapter/adapter_config.json", "best/adapter_config.json", "best/best.json"):
        (tmp_path / file).write_text("{}")
    for name in ("adapter", "bare"):
        (tmp_path / name / "config.json").write_text("{}")
    alone = "environments=[{path='letters_environment:Letters'}]"
    for given, overrides, message in (
        ("none/such", [], "none/such: neither a folder nor a run in"),
        (model, ["evaluation.num_prompts=0", alone],
         "environments[0].path = 'letters_environment:Letters': no held-out prompts; expected some"),
        (model, ["evaluation.pass_at=[9]"], "evaluation.pass_at = (9,) with num_samples = 4"),
        (model, ["evaluation.num_prompts=3"], "3: the environment 'letters' (environments[0]) has 2 held-out"),
        (tmp_path / "adapter", [], "expected a whole model (`penstock export RUN FOLDER --merged`)"),
        (tmp_path / "best", [], "expected a whole model (`penstock export RUN FOLDER --checkpoint best --merged`)"),
        (tmp_path / "bare", [], "a model without safetensors weights"),
        (tmp_path / "empty", [], "no run"),
    ):  # fmt: skip
        sets = [word for override in overrides for word in ("--set", override)]
        status, out, err = command(str(given), str(tmp_path / "run.toml"), *sets)
        assert (status, out) == (2, "") and message in err, message


def test_of_a_run_the_newest_checkpoint_is_evaluated_in_the_type_of_its_engines(model, config, tmp_path):
    from safetensors.torch import load_file

    from penstock.consumers.checkpoints.checkpoints import Checkpoints
    from penstock.consumers.checkpoints.state import CheckpointState
    from penstock.consumers.learning.learner.learner import Learner
    from penstock.deploy.launch.run_folder import save_run_file

    own = config(f"model.path={model}", "model.dtype=bfloat16")
    save_run_file(own, tmp_path / "runs" / "letters")
    checkpoints = Checkpoints(tmp_path / "runs" / "letters" / "checkpoints", 9, model)
    checkpoints.claim_epoch(0)
    learner = Learner(own)
    for version in (3, 5):
        for parameter in learner.model.parameters():
            parameter.data.fill_(version)
        checkpoints.begin(learner, CheckpointState(policy_version=version)).result()
    engine, _ = scripted()
    weights = {}

    async def start(config: RunConfig, *, seed: int) -> ScriptedEngine:
        weights.update(load_file(Path(config.model.path) / "model.safetensors"))
        return engine

    found = evaluate("letters", config(), runs=tmp_path / "runs", start_engine=start)
    assert found.model == "letters" and len(found.sets) == 2
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert {float(tensor.max()) for tensor in weights.values()} == {5.0}
    assert not list((tmp_path / "runs" / "letters").glob("evaluated-*"))


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="session")
async def test_a_real_engine_answers_all_sets(tied_engine, model, config):
    from penstock.producers.rollout.episode import load_tokenizer

    checked, environments = check_environments(config(f"model.path={model}", "mode=synchronous"))
    tokenizer = load_tokenizer(checked)
    found: list[Evaluated] = [
        await answer_held_out(checked, environments, tied_engine.engine, tokenizer) for _ in range(2)
    ]
    letters, greedy = found[0].sets
    assert found[0].failures == {} and (letters.num_prompts, greedy.num_prompts) == (2, 1)
    assert 0 < letters.figures["completion_tokens"] <= 6 and letters.figures["num_samples"] == 8
    assert found[1].sets == found[0].sets, "each request has its seed"


class Talker(Letters):
    """Two turns; every fourth conversation fails."""

    num_held = 0

    async def converse(self, prompt, conversation) -> float:
        messages = [{"role": "user", "content": prompt.text}]
        messages.append(await conversation.chat(messages))
        self.num_held += 1
        if self.num_held == 4:
            raise LookupError("no such tool")
        messages.append({"role": "user", "content": "ab"})
        return float("a" in (await conversation.chat(messages))["content"])


async def test_conversations_about_held_out_prompts_are_held_without_a_run(config):
    checked = config("endpoint.port=0", "sampling.max_tokens=32", "environments=[{path='letters_environment:Letters'}]")
    tokenizer = probed_engine.tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    environments = RunEnvironments([RunEnvironment.of(checked, checked.environments[0], Talker(seed=1))])
    checked = msgspec.structs.replace(
        checked,
        environments=(msgspec.structs.replace(checked.environments[0], evaluation=HeldOutConfig(num_prompts=2)),),
    )
    engine, _ = scripted()
    (found,) = (await answer_held_out(checked, environments, engine, tokenizer)).sets
    assert (found.num_prompts, found.num_samples, found.figures["num_samples"]) == (2, 4, 8)
    assert found.figures["reward"] == 7 / 8, "the one that failed counts as 0"
    assert {each.temperature for each in engine.samplings} == {0.7} and len(engine.samplings) == 8 + 7
