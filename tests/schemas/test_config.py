"""A run file is checked once; what is wrong with it is said with path, value and expectation."""

import functools
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from penstock.schemas.config import (
    DEFAULT_OBJECTIVE,
    NAMES_IN_TRL,
    ConfigError,
    EnvironmentConfig,
    HeldOut,
    ModelConfig,
    Plug,
    RunConfig,
    config_of,
    load_config,
)
from penstock.schemas.process.plugins import construct, resolve

MINIMAL = """
name = "run-1"
[model]
path = "some/model"
[environment]
path = "pkg.mod:Env"
"""


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL)
    return file


def test_a_minimal_file_gets_every_default(run_file):
    config = load_config(run_file)
    assert config.engine.logprobs_mode == "processed_logprobs"
    assert config.engine.prefix_caching is False
    assert config.credit == (config.max_lag + 1) * config.groups_per_batch


def test_settings_of_the_default_objective_need_no_path(run_file):
    objective = load_config(run_file, ["objective.kwargs.clip_low=0.1"]).objective
    assert (objective.path, objective.kwargs) == (DEFAULT_OBJECTIVE, {"clip_low": 0.1})
    run_file.write_text(run_file.read_text() + "\n[objective.kwargs]\nclip_low = 0.1\n")
    assert load_config(run_file).objective == objective


def test_synchronous_mode_is_a_lag_bound_of_zero(run_file):
    config = load_config(run_file, ["mode=synchronous", "max_lag=4", "groups_per_batch=10"])
    assert (config.lag_bound, config.credit) == (0, 10)


def test_the_credit_is_the_batches_that_fit_within_the_lag_bound(run_file):
    steps = ["trainer.num_epochs=2", "trainer.num_minibatches=2", "groups_per_batch=10"]
    assert load_config(run_file, [*steps, "max_lag=4"]).credit == 20
    assert load_config(run_file, [*steps, "max_lag=11"]).credit == 30
    assert load_config(run_file, [*steps, "mode=synchronous"]).credit == 10
    assert load_config(run_file, [*steps, "max_lag=0"]).credit == 10


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("", "environment, environments: neither is there; expected"),
        ("[[environments]]\npath='a:B'\n" * 2, "have the names ['main', 'main'], expected different ones"),
        (
            "[[environments]]\nname='a'\npath='a:B'\nweight=0.0\n[[environments]]\nname='b'\npath='c:D'\nweight=0\n",
            "have the weights {'a': 0.0, 'b': 0.0}, expected a finite sum above 0",
        ),
        ("[[environments]]\nname='a'\npath='a:B'\nweight=-1\n", "environments[0].weight = -1: Expected `float` >= 0.0"),
        ("[[environments]]\nname='a'\npath='a'\n", "environments[0].path = 'a': expected package.module:Name"),
    ],
)
def test_environments_that_cannot_be_told_apart_or_weighted_are_refused(tmp_path, tables, message):
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL.partition("[environment]")[0] + tables)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(file)


def test_limits_of_an_environment_are_its_own_or_the_runs(tmp_path):
    file = tmp_path / "run.toml"
    tables = "[[environments]]\nname='a'\npath='a:B'\nmax_tokens=900\n[environments.evaluation]\nnum_prompts=3\n"
    file.write_text(MINIMAL.partition("[environment]")[0] + tables + "[[environments]]\nname='b'\npath='a:B'\n")
    config = load_config(file, ["evaluation.num_prompts=8"])
    assert config.num_evaluation_prompts == {"a": 3, "b": 8}
    assert config.max_tokens == 900, "the largest group that Redis may have to hold"


def test_each_environment_is_evaluated_in_its_own_way_or_the_runs(tmp_path):
    file = tmp_path / "run.toml"
    tables = "[[environments]]\nname='a'\npath='a:B'\nweight=0\nmax_tokens=7\n[environments.evaluation]\n"
    tables += "num_samples=8\n"
    file.write_text(MINIMAL.partition("[environment]")[0] + tables + "[[environments]]\nname='b'\npath='a:B'\n")
    shared = ["evaluation.temperature=0.6", "evaluation.top_k=5"]
    held_out = load_config(file, shared).held_out
    assert held_out["a"] == HeldOut(num_samples=8, temperature=0.6, top_k=5, max_tokens=7, pass_at=(8,))
    assert held_out["b"] == HeldOut(num_samples=1, temperature=0.6, top_k=5, max_tokens=256)
    held_out = load_config(file, [*shared, "evaluation.max_tokens=9", "evaluation.pass_at=[1, 4]"]).held_out
    assert [(how.max_tokens, how.pass_at) for how in held_out.values()] == [(9, (1, 4)), (9, (1,))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.num_samples=8"], "evaluation.num_samples = 8 with evaluation.temperature = 0.0: greedy answers"),
        (
            ["evaluation.num_samples=4", "evaluation.temperature=1.0", "evaluation.pass_at=[1, 8]"],
            "evaluation.pass_at = (1, 8) with num_samples = 4: pass@k needs k answers; expected at most 4",
        ),
        (
            ["environment.evaluation.num_samples=2"],
            "environment.evaluation.num_samples = 2 with evaluation.temperature",
        ),
        (["evaluation.pass_at=[0]"], "evaluation.pass_at[0] = 0"),
        (
            ["evaluation.num_samples=999", "evaluation.temperature=1.0"],
            "evaluation.num_samples = 999: expected at most producers.groups_in_flight * group_size = 256",
        ),
        (["evaluation.top_p=0.0"], "evaluation.top_p = 0.0"),
        (["evaluation.top_p=0.9"], "evaluation.top_p = 0.9 with evaluation.temperature = 0.0: greedy answers take"),
        (["evaluation.top_k=5"], "evaluation.top_k = 5 with evaluation.temperature = 0.0: greedy answers take"),
        (
            ["checkpoint.best=pass@4"],
            "checkpoint.best = 'pass@4': expected a pass@k of evaluation.pass_at, which has none",
        ),
        (
            ["checkpoint.best=pass@4", "evaluation.num_samples=8", "evaluation.temperature=1.0"],
            "checkpoint.best = 'pass@4': expected a pass@k of evaluation.pass_at, which has pass@8",
        ),
        (["checkpoint.best=environments/sums/reward"], "'environments/sums/reward': expected an environment of main"),
        (["checkpoint.best=accuracy"], "checkpoint.best = 'accuracy'"),
        (
            ["sampling.top_k=8", "evaluation.temperature=1.0"],
            "evaluation.top_k = 0 with sampling.top_k = 8: every token is recorded with the ids",
        ),
    ],
)
def test_evaluations_that_cannot_be_are_refused_by_the_field_that_asks_for_them(run_file, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(run_file, overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.solved.figure=reward/exat", "evaluation.solved.figure = 'reward/exat'"),
        ("evaluation.goal={figure='reward/exat', value=1}", "evaluation.goal.figure = 'reward/exat'"),
        ("checkpoint.best=environments/main/reward/exat", "checkpoint.best = 'environments/main/reward/exat'"),
    ],
)
def test_a_figure_that_no_component_of_the_reward_gives_is_refused_with_those_there_are(run_file, override, message):
    own = ["reward.components=[{name='exact', path='environment', weight=1.0}]"]
    own += ["evaluation.num_samples=2", "evaluation.temperature=1.0"]
    for figure in ("reward", "reward/exact", "reward/exact/digits"):
        load_config(run_file, [*own, override.replace("reward/exat", figure)])
    expected = f"{message}: no component of the reward has this name; expected reward or reward/exact"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(run_file, [*own, override])
    load_config(run_file, [*own, override, "endpoint={}"])  # agents name parts as they like


@pytest.mark.parametrize("best", ["reward", "reward/exact", "pass@8", "pass@1", "environments/main/pass@8"])
def test_any_figure_of_an_evaluation_may_choose_the_best(run_file, best):
    sampled = ["evaluation.num_samples=8", "evaluation.temperature=1.0", "evaluation.pass_at=[1, 8]"]
    assert load_config(run_file, [*sampled, f"checkpoint.best={best}"]).checkpoint.best == best


def test_the_credit_leaves_room_for_groups_that_batches_skip(run_file):
    config = load_config(run_file, ["batch.fill=with_variance"])
    assert (config.credit, config.max_skipped, config.most_open) == (96, 128, 480)
    assert load_config(run_file, ["batch={fill='with_variance', max_skipped=16}"]).most_open == 144
    assert load_config(run_file, ["batch.fill=with_variance", "mode=synchronous"]).most_open == 32
    assert load_config(run_file).most_open == 96


TWO = """
name = "run-1"
model.path = "some/model"
[[environments]]
name = "math"
path = "pkg.mod:Env"
[[environments]]
name = "sums"
path = "pkg.mod:Env"
"""


@pytest.mark.parametrize("second", ["1", "sums"])
def test_overrides_reach_a_table_of_an_array_by_its_place_or_its_name(run_file, second):
    run_file.write_text(TWO)
    changes = {"weight": 2.5, "kwargs.width": 3, "evaluation.num_prompts": 4}
    config = load_config(run_file, [f"environments.{second}.{name}={value}" for name, value in changes.items()])
    first, changed = config.environments
    assert first == load_config(run_file).environments[0]
    assert (changed.weight, changed.kwargs, changed.evaluation.num_prompts) == (2.5, {"width": 3}, 4)
    own = msgspec.to_builtins(config)  # has its arrays as tuples
    assert config_of(own, run_file, {f"environments.{second}.weight": 7}).environments[1].weight == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environments.2.weight=1", "environments has no '2', expected one of 0, 1, math, sums$"),
        ("environments.mth.weight=1", "environments has no 'mth', expected one of 0, 1, math, sums$"),
        ("environments.weight=1", "environments is an array of tables; expected environments.PLACE.FIELD"),
        ("environments.0.name.x=1", "name is a value, not a table"),
        ("trainer.betas.0=0.5", "betas is a value, not a table"),
    ],
)
def test_an_override_that_meets_no_table_of_an_array_is_refused(run_file, override, message):
    run_file.write_text(TWO + "[trainer]\nbetas = [0.8, 0.9]\n")
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, [override])


def test_overrides_take_toml_values_and_bare_words(run_file):
    config = load_config(run_file, ["trainer.learning_rate=3e-4", "name=other", "environment.kwargs.width=3"])
    assert config.trainer.learning_rate == 3e-4
    assert config.name == "other"
    assert config.environment.kwargs == {"width": 3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate=fast", r"trainer.learning_rate = 'fast': Expected `float`, got `str`"),
        ("trainer.learning_rate=-1.0", r"trainer.learning_rate = -1.0: Expected `float` > 0"),
        ("trainer.lr=1.0", r"trainer.lr: unknown field, expected one of learning_rate, "),
        ("trainr.betas=1", r"trainr: unknown field \(did you mean trainer\?\), expected one of name, "),
        ("learning_rate=1", r"learning_rate: unknown field \(did you mean trainer.learning_rate\?\), expected one of"),
        ("max_steps=9", r"max_steps: unknown field \(did you mean num_updates\?\), expected one of name, "),
        ("num_generations=9", r"num_generations: unknown field \(did you mean group_size\?\)"),
        ("trainer.per_device_train_batch_size=9", r"\(did you mean trainer.tokens_per_microbatch\?\)"),
        ("trainer.beta=0.04", r"trainer.beta: unknown field \(did you mean objective.kwargs.kl_coefficient\?\)"),
        ("epsilon=0.2", r"epsilon: unknown field \(did you mean objective.kwargs.clip_low\?\)"),
        ("max_completion_length=9", r"max_completion_length: unknown field \(did you mean sampling.max_tokens\?\)"),
        ("trainer.project=1", r"trainer.project: unknown field \(did you mean metrics.wandb.project\?\), expected"),
        ("environment={kwargs={x=1}}", r"environment.path: missing field"),
        ("environments=[{path='a:B'}]", r"environment, environments: both are there; expected \[environment\], or"),
        ("environment.name='a b'", r"environment.name = 'a b': Expected `str` matching"),
        ("environment.weight=0.0", r"environments have the weights {'main': 0.0}, expected a finite sum above 0"),
        (
            "environment.num_tasks=9",
            r"environment.num_tasks = 9 with curriculum.path = '.*uniform', which poses tasks without end; expected",
        ),
        ("environment.max_tokens=0", r"environment.max_tokens = 0: Expected `int` >= 1"),
        ("batch.fill=variance", r"batch.fill = 'variance': expected one of 'any', 'with_variance'"),
        ("batch.max_skipped=9", r"max_skipped = 9 with fill = 'any': expected fill = 'with_variance'"),
        ("batch={fill='with_variance', max_skipped=0}", r"batch.max_skipped = 0: Expected `int` >= 1"),
        ("reward={kwargs={x=1}}", r"kwargs = {'x': 1} with path = 'environment': expected them in environment.kwargs"),
        ("reward.path=rloo", r"reward.path = 'rloo': expected package.module:Name"),
        (
            "reward.components=[{name='a', path='b'}]",
            r"reward.components\[0\].path = 'b': expected package.module:Name",
        ),
        (
            "reward.components=[{name='a/b', path='c:d'}]",
            r"reward.components\[0\].name = 'a/b': Expected `str` matching",
        ),
        (
            "reward.components=[{name='a', path='b:c', weight=0.0}]",
            r"components have the weights {'a': 0.0}, expected finite numbers, not all of them 0",
        ),
        ("reward_weights=[1.0]", r"unknown field \(did you mean reward.components\?\)"),
        ("shade=1", r"shade: unknown field, expected one of name, "),
        ("checkpoint={every=3, shade=1}", r"checkpoint.shade: unknown field, expected one of every, keep"),
        ("sampling.min_p=0.1", r"sampling.min_p = 0.1: the trainer cannot reproduce the logprobs"),
        ("sampling.repetition_penalty=1.1", r"sampling.repetition_penalty = 1.1: the trainer cannot reproduce"),
        ("sampling.presence_penalty=0.1", r"sampling.presence_penalty = 0.1: the trainer cannot reproduce"),
        ("sampling.min_tokens=3", r"sampling.min_tokens = 3: the trainer cannot reproduce"),
        ("sampling.logit_bias={5=1.0}", r"sampling.logit_bias = {'5': 1.0}: the trainer cannot reproduce"),
        ("sampling.beams=3", r"sampling.beams: unknown field"),
        ("engine.args.logits_processors=['a:B']", r"engine.args.logits_processors = \['a:B'\]: the trainer cannot"),
        ("trainer.num_minibatches=33", r"num_minibatches = 33: expected at most groups_per_batch = 32"),
        ("trainer.num_epochs=3", r"max_lag = 2 with 3 optimizer steps per batch .*expected at least 3, or mode ="),
        ("advantage.path=rloo", r"advantage.path = 'rloo': expected package.module:Name"),
        ("advantage.kl_coefficient=-0.1", r"advantage.kl_coefficient = -0.1: Expected `float` >= 0"),
        ("advantage.truncated=drop", r"advantage.truncated = 'drop': expected one of 'train', 'mask', 'penalize'"),
        ("advantage.truncated=penalize", r"truncated_reward = None with truncated = 'penalize': expected a number"),
        (
            "advantage.truncated_reward=-1.0",
            r"truncated_reward = -1.0 with truncated = 'train': expected it to be",
        ),
        ("lora.rank=0", r"lora.rank = 0: Expected `int` >= 1"),
        ("lora.rank=1024", r"lora.rank = 1024: Expected `int` <= 512"),
        ("lora.alpha=0", r"lora.alpha = 0: Expected `float` > 0.0"),
        ("lora.targets=[]", r"lora.targets = \[\]: Expected `array` of length >= 1"),
        ("lora.dropout=0.1", r"lora.dropout: unknown field: the trainer has to reproduce the policy"),
        ("trainer.decay=wsd", r"trainer.decay = 'wsd': expected one of 'constant', 'linear', 'cosine'"),
        ("trainer.decay_steps=9", r"trainer.*decay_steps = 9 with decay = 'constant': expected decay = 'linear' or"),
        ("trainer={decay='linear', decay_steps=101}", r"decay_steps = 101 .*at most the run's 100 optimizer steps"),
        ("sampling.top_p=0.9", r"sampling.top_k = 0, sampling.top_p = 0.9: .* expected top_k = 1 or more.* and a GPU"),
        ("sampling={top_k=-5}", r"sampling.top_k = -5, .* expected top_k = 1 or more"),
        ("sampling.top_p=0.0", r"sampling.top_p = 0.0: expected more than 0, and at most 1"),
        ("sampling.temperature=-1.0", r"sampling.temperature = -1.0: expected 0 or more"),
        ("sampling.temperature=nan", r"sampling.temperature = nan: expected 0 or more, and finite"),
        ("group_size=0", r"group_size = 0: Expected `int` >= 1"),
        ("teacher={}", r"teacher = {}: model, url: neither is there; expected one of the two"),
        ("teacher={model='m', url='http://h/v1'}", r"model, url: both are there; expected one of the two"),
        (
            "teacher.url='http://u:k@h/v1'",
            r"url = 'http://u:k@h/v1': expected http://host:port/v1, without a user or a",
        ),
        (
            "teacher.url='localhost:8000'",
            r"teacher = .*: url = 'localhost:8000': expected http://host:port/v1, without",
        ),
        ("teacher={model='m', coefficient=0.0}", r"teacher.coefficient = 0.0: Expected `float` > 0.0"),
        ("trainer.betas=[0.9,1.5]", r"trainer.betas\[1\] = 1.5: Expected `float` < 1.0"),
        ("trainer.betas=[1.0,0.95]", r"trainer.betas\[0\] = 1.0: Expected `float` < 1.0"),
        ("parity.gate=maybe", r"parity.gate = 'maybe': expected one of 'refuse', 'warn', 'off'"),
        ("mode=serial", r"mode = 'serial': expected one of 'asynchronous', 'synchronous'"),
        ("name=a/b", r"run name 'a/b': expected letters, digits"),
        ("environment.path=nonsense", r"environment.path = 'nonsense': expected package.module:Name"),
        ("correction.threshold=0.5", r"correction.threshold = 0.5: Expected `float` >= 1"),
        ("seed", r"override 'seed': expected dotted.path=value"),
        ("name.first=1", r"name is a value, not a table"),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_was_expected(run_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["batch.fill=with_variance"],
            r"batch.fill = 'with_variance' with \[teacher\]: groups whose rewards are equal",
        ),
        (["advantage.kl_coefficient=0.1"], r"advantage.kl_coefficient = 0.1 with teacher.alone = true: no reward"),
        (["advantage.path=a:B"], r"advantage.path = 'a:B' with teacher.alone = true"),
        (
            ["advantage.truncated=penalize", "advantage.truncated_reward=0.0"],
            r"advantage.truncated_reward = 0.0 with teacher.alone = true",
        ),
        (
            ["teacher={url='http://h:1/v1'}", "sampling.temperature=0.7"],
            r"teacher.url = 'http://h:1/v1' with sampling.temperature = 0.7, .* 1.0, 0 and 1.0, or teacher.model",
        ),
        (
            ["teacher={url='http://h:1/v1'}", "sampling.top_k=5"],
            r"sampling.top_k = 5, sampling.top_p = 1.0: a server's",
        ),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(run_file, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, ["teacher.model=m", *overrides])


def test_a_teacher_goes_with_what_it_leaves_to_do(run_file):
    config = load_config(run_file, ["teacher.model=m", "group_size=1", "advantage.truncated=mask", "sampling.top_k=5"])
    assert config.teacher.alone and config.teacher_url is None
    beside = ["teacher.model=m", "teacher.alone=false", "advantage.kl_coefficient=0.1", "sampling.temperature=0.7"]
    assert not load_config(run_file, beside).teacher.alone


def test_groups_of_one_are_refused_where_their_variance_decides(run_file):
    drop_flat = "penstock.consumers.stream.curricula:drop_flat"
    for override in ("batch.fill=with_variance", f"curriculum.path={drop_flat}"):
        with pytest.raises(ConfigError, match=r"with group_size = 1: no group has reward variance"):
            load_config(run_file, ["group_size=1", override])
    assert load_config(run_file, ["group_size=1"]).group_size == 1


def test_raw_logprobs_with_a_temperature_are_refused(run_file):
    with pytest.raises(ConfigError, match="raw logprobs are not those of the sampled distribution"):
        load_config(run_file, ["engine.logprobs_mode=raw_logprobs", "sampling.temperature=0.7"])


def test_a_head_of_one_precision_only_is_refused(run_file):
    load_config(run_file, ["model.dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r"engine\.head_dtype = 'model' with model.dtype = 'bfloat16'"):
        load_config(run_file, ["model.dtype=bfloat16", "engine.head_dtype=model"])


FAULTS = (
    "engine.logprobs_mode=raw_logprobs",
    "sampling.temperature=0.7",
    "model.dtype=bfloat16",
    "engine.head_dtype=model",
)
"""Settings under which engine and trainer cannot agree."""


def test_without_the_gate_settings_that_fail_parity_are_let_through(run_file):
    for gate in ("refuse", "warn"):
        with pytest.raises(ConfigError, match=r"or parity\.gate = 'off'"):
            load_config(run_file, [*FAULTS, f"parity.gate={gate}"])
    config = load_config(run_file, [*FAULTS, "parity.gate=off"])
    assert (config.engine.logprobs_mode, config.engine.head_dtype) == ("raw_logprobs", "model")


def test_without_the_gate_other_refusals_stand(run_file):
    kept = ["parity.gate=off", "sampling.top_k=20", "sampling.top_p=0.9"]
    assert load_config(run_file, kept).sampling.is_truncated
    with pytest.raises(ConfigError, match=r"logprobs_mode = 'raw_logprobs' with sampling.top_k = 20: .* 'processed"):
        load_config(run_file, [*kept, "engine.logprobs_mode=raw_logprobs"])


def test_a_missing_required_field_is_named(run_file):
    run_file.write_text("name = 'x'\n[environment]\npath='a:b'\n")
    with pytest.raises(ConfigError, match="model: missing field"):
        load_config(run_file)


def test_a_file_that_is_not_there_or_not_toml_is_named(run_file, tmp_path):
    with pytest.raises(ConfigError, match=r"absent.toml: no such file"):
        load_config(tmp_path / "absent.toml")
    for written, said in ((b"name = ", "not TOML"), ("name = 'Grüße'".encode("latin-1"), "not UTF-8, which TOML")):
        run_file.write_bytes(written)
        with pytest.raises(ConfigError, match=said):
            load_config(run_file)


def test_a_run_file_is_read_as_utf_8_with_or_without_a_mark_in_any_locale(tmp_path):
    asked = MINIMAL + "[environment.kwargs]\nsystem = 'Réponds, bitte größer'\n"
    (tmp_path / "marked.toml").write_text(asked, encoding="utf-8-sig")
    (tmp_path / "plain.toml").write_text(asked, encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from penstock.schemas.config import load_config\n"
        "for file in sys.argv[2:]: print(ascii(load_config(Path(file), sys.argv[1:2]).environment.kwargs))"
    )
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, "environment.kwargs.user=Ä", "marked.toml", "plain.toml"]
    shown = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    seen = ascii({"system": "Réponds, bitte größer", "user": "Ä"})
    assert shown.stdout.splitlines() == [seen, seen], shown.stderr


class Greeter:
    def __init__(self, greeting: str, seed: int) -> None:
        if not greeting:
            raise ValueError("greeting = '': expected text")
        self.greeting = greeting

    def greet(self, name: str) -> str:
        return self.greeting + name


class GreeterProtocol:
    def greet(self, name: str) -> str: ...


class LouderProtocol:
    def greet(self, name: str, volume: int) -> str: ...


def plug(path: str = "lab:Greeter", **kwargs) -> Plug:
    return Plug(path=path, kwargs=kwargs)


@pytest.fixture
def lab(monkeypatch):
    """An importable module `lab` that holds `Greeter`."""
    module = types.ModuleType("lab")
    module.Greeter = Greeter
    monkeypatch.setitem(sys.modules, "lab", module)


def test_a_plug_is_built_with_its_arguments_and_the_context(lab):
    built = construct(plug(greeting="hi "), "environment", GreeterProtocol, seed=1)
    assert built.greet("you") == "hi you"


def test_fields_by_their_names_elsewhere_lead_to_fields_that_are_there():
    config = RunConfig(name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"))
    objective = set(inspect.signature(resolve(Plug(path=DEFAULT_OBJECTIVE), "objective")).parameters)
    for path in NAMES_IN_TRL.values():
        *sections, field = path.removeprefix("objective.kwargs.").split(".")
        section = functools.reduce(getattr, sections, config)
        assert (field in objective) if "kwargs" in path else hasattr(section, field), path


@pytest.mark.parametrize(
    ("a_plug", "protocol", "message"),
    [
        (plug(wrong=1), GreeterProtocol, r"environment.kwargs = \{'wrong': 1\}: lab:Greeter refuses them"),
        (plug(greeting=""), GreeterProtocol, "environment: lab:Greeter: greeting = ''"),
        (plug(greeting="x"), LouderProtocol, r"expected LouderProtocol.greet\(self, name: str, volume: int\) -> str"),
        (plug("lab:Nobody"), GreeterProtocol, "module 'lab' has no 'Nobody'"),
        (plug("no_such_module:X"), GreeterProtocol, "cannot import 'no_such_module'"),
    ],
)
def test_a_plug_that_does_not_fit_is_refused_with_what_was_expected(lab, a_plug, protocol, message):
    with pytest.raises(ConfigError, match=message):
        construct(a_plug, "environment", protocol, seed=1)


def fields_of(table: type[msgspec.Struct]) -> set[str]:
    """The fields of a table and of the tables in it that hold values, each by its class and name.

    A table that stands in two places, as `[environment]` and `[[environments]]`, counts once, and so does a field that
    several tables share; `path` of `[objective]` and `path` of `[environment]` are two.
    """
    found = set()
    for name, kind in get_type_hints(table).items():
        tables = [each for each in (kind, *_parts(kind)) if isinstance(each, type) and issubclass(each, msgspec.Struct)]
        found |= {f"{table.__name__}.{name}"} if not tables else set().union(*map(fields_of, tables))
    return found


def _parts(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _parts(part)


def test_the_run_file_has_few_fields():
    """Who adds one removes one; a default that is right for everyone is a constant."""
    assert len(fields_of(RunConfig)) <= 143, sorted(fields_of(RunConfig))
