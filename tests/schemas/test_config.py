"""A run file is checked once; what is wrong with it is said with path, value and expectation."""

import functools
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from penstock.schemas.config import (
    DEFAULT_OBJECTIVE,
    NAMES_IN_TRL,
    ConfigError,
    EndpointConfig,
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


def test_a_run_has_no_endpoint_unless_it_says_so(run_file):
    assert load_config(run_file).endpoint is None
    run_file.write_text(MINIMAL + "[endpoint]\n")
    assert load_config(run_file).endpoint == EndpointConfig()
    assert EndpointConfig().host == "127.0.0.1"


def test_settings_of_the_default_objective_need_no_path(run_file):
    objective = load_config(run_file, ["objective.kwargs.clip_low=0.1"]).objective
    assert (objective.path, objective.kwargs) == (DEFAULT_OBJECTIVE, {"clip_low": 0.1})
    run_file.write_text(run_file.read_text() + "\n[objective.kwargs]\nclip_low = 0.1\n")
    assert load_config(run_file).objective == objective


def test_the_credit_is_the_batches_that_fit_within_the_lag_bound(run_file):
    steps = ["trainer.num_epochs=2", "trainer.num_minibatches=2", "groups_per_batch=10"]
    assert load_config(run_file, [*steps, "max_lag=4"]).credit == 20
    assert load_config(run_file, [*steps, "max_lag=11"]).credit == 30
    assert load_config(run_file, [*steps, "max_lag=0"]).credit == 10
    synchronous = load_config(run_file, [*steps, "mode=synchronous", "max_lag=4"])
    assert (synchronous.lag_bound, synchronous.credit) == (0, 10)


WITHOUT_ENVIRONMENT = MINIMAL.partition("[environment]")[0]


def refusal(file: Path, *overrides: str) -> str:
    """What a run file with these overrides is refused for."""
    try:
        load_config(file, overrides)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_environments_that_cannot_be_told_apart_or_weighted_are_refused(run_file):
    for tables, message in [
        ("", "environment, environments: neither is there; expected"),
        ("[[environments]]\npath='a:B'\n" * 2, "have the names ['main', 'main'], expected different ones"),
        (
            "[[environments]]\nname='a'\npath='a:B'\nweight=0.0\n[[environments]]\nname='b'\npath='c:D'\nweight=0\n",
            "have the weights {'a': 0.0, 'b': 0.0}, expected a finite sum above 0",
        ),
        ("[[environments]]\nname='a'\npath='a:B'\nweight=-1\n", "environments[0].weight = -1: Expected `float` >= 0.0"),
        ("[[environments]]\nname='a'\npath='a'\n", "environments[0].path = 'a': expected package.module:Name"),
    ]:
        run_file.write_text(WITHOUT_ENVIRONMENT + tables)
        assert message in refusal(run_file), tables


def test_each_environment_is_limited_and_evaluated_in_its_own_way_or_the_runs(run_file):
    first = "[[environments]]\nname='a'\npath='a:B'\nweight=0\nmax_tokens=700\n"
    first += "[environments.evaluation]\nnum_samples=8\nnum_prompts=3\n"
    run_file.write_text(WITHOUT_ENVIRONMENT + first + "[[environments]]\nname='b'\npath='a:B'\n")
    shared = ["evaluation.temperature=0.6", "evaluation.top_k=5", "evaluation.num_prompts=9"]
    config = load_config(run_file, shared)
    assert config.num_evaluation_prompts == {"a": 3, "b": 9}
    assert config.max_tokens == 700, "the largest group that Redis may have to hold"
    assert config.held_out == {
        "a": HeldOut(num_prompts=3, num_samples=8, temperature=0.6, top_k=5, max_tokens=700, pass_at=(8,)),
        "b": HeldOut(num_prompts=9, num_samples=1, temperature=0.6, top_k=5, max_tokens=256),
    }
    held_out = load_config(run_file, [*shared, "evaluation.max_tokens=9", "evaluation.pass_at=[1, 4]"]).held_out
    assert [(how.max_tokens, how.pass_at) for how in held_out.values()] == [(9, (1, 4)), (9, (1,))]


SAMPLED = ("evaluation.num_samples=8", "evaluation.temperature=1.0")


def test_evaluations_that_cannot_be_are_refused_by_the_field_that_asks_for_them(run_file):
    greedy = "with evaluation.temperature = 0.0: greedy answers"
    for overrides, message in [
        (["evaluation.num_samples=8"], f"evaluation.num_samples = 8 {greedy}"),
        (
            ["environment.evaluation.num_samples=2"],
            "environment.evaluation.num_samples = 2 with evaluation.temperature",
        ),
        (["evaluation.top_p=0.9"], f"evaluation.top_p = 0.9 {greedy}"),
        (["evaluation.top_k=5"], f"evaluation.top_k = 5 {greedy}"),
        ([*SAMPLED, "evaluation.pass_at=[1, 9]"], "evaluation.pass_at = (1, 9) with num_samples = 8: pass@k needs k"),
        (
            [SAMPLED[1], "evaluation.num_samples=999"],
            "evaluation.num_samples = 999: expected at most producers.groups_in",
        ),
        (["checkpoint.best=pass@4"], "'pass@4': expected a pass@k of evaluation.pass_at, which has none"),
        ([*SAMPLED, "checkpoint.best=pass@4"], "'pass@4': expected a pass@k of evaluation.pass_at, which has pass@8"),
        (["checkpoint.best=environments/sums/reward"], "'environments/sums/reward': expected an environment of main"),
        (["checkpoint.best=accuracy"], "checkpoint.best = 'accuracy'"),
        ([SAMPLED[1], "sampling.top_k=8"], "evaluation.top_k = 0 with sampling.top_k = 8: every token is recorded"),
    ]:
        assert message in refusal(run_file, *overrides), overrides
    for best in ("reward", "reward/exact", "pass@8", "pass@1", "environments/main/pass@8"):
        chosen = load_config(run_file, [*SAMPLED, "evaluation.pass_at=[1, 8]", f"checkpoint.best={best}"])
        assert chosen.checkpoint.best == best


def test_a_figure_that_no_component_of_the_reward_gives_is_refused_with_those_there_are(run_file):
    components = ["reward.components=[{name='exact', path='environment', weight=1.0}]", *SAMPLED]
    for override, name in [
        ("evaluation.solved.figure=reward/exat", "evaluation.solved.figure = 'reward/exat'"),
        ("evaluation.goal={figure='reward/exat', value=1}", "evaluation.goal.figure = 'reward/exat'"),
        ("checkpoint.best=environments/main/reward/exat", "checkpoint.best = 'environments/main/reward/exat'"),
    ]:
        for figure in ("reward", "reward/exact", "reward/exact/digits"):
            load_config(run_file, [*components, override.replace("reward/exat", figure)])
        said = f"{name}: no component of the reward has this name; expected reward or reward/exact"
        assert said in refusal(run_file, *components, override)
        load_config(run_file, [*components, override, "endpoint={}"])  # agents name parts as they like


def test_the_credit_leaves_room_for_groups_that_batches_skip(run_file):
    config = load_config(run_file, ["batch.fill=with_variance"])
    assert (config.credit, config.max_skipped, config.most_open) == (96, 128, 480)
    assert load_config(run_file, ["batch={fill='with_variance', max_skipped=16}"]).most_open == 144
    assert load_config(run_file, ["batch.fill=with_variance", "mode=synchronous"]).most_open == 32
    assert load_config(run_file).most_open == 96


TWO = WITHOUT_ENVIRONMENT + "".join(
    f"[[environments]]\nname='{name}'\npath='pkg.mod:Env'\n" for name in ("math", "sums")
)


def test_overrides_reach_a_table_of_an_array_by_its_place_or_its_name(run_file):
    run_file.write_text(TWO + "[trainer]\nbetas = [0.8, 0.9]\n")
    changes = {"weight": 2.5, "kwargs.width": 3, "evaluation.num_prompts": 4}
    for second in ("1", "sums"):
        config = load_config(run_file, [f"environments.{second}.{name}={value}" for name, value in changes.items()])
        first, changed = config.environments
        assert first == load_config(run_file).environments[0]
        assert (changed.weight, changed.kwargs, changed.evaluation.num_prompts) == (2.5, {"width": 3}, 4)
        document = msgspec.to_builtins(config)  # has its arrays as tuples
        assert config_of(document, run_file, {f"environments.{second}.weight": 7}).environments[1].weight == 7
    for override, message in [
        ("environments.2.weight=1", "environments has no '2', expected one of 0, 1, math, sums"),
        ("environments.mth.weight=1", "environments has no 'mth', expected one of 0, 1, math, sums"),
        ("environments.weight=1", "environments is an array of tables; expected environments.PLACE.FIELD"),
        ("environments.0.name.x=1", "name is a value, not a table"),
        ("trainer.betas.0=0.5", "betas is a value, not a table"),
    ]:
        assert message in refusal(run_file, override), override
    adapter = ("model.dtype=bfloat16", "model.rounding=dithered", "lora={}")
    assert "model.rounding = 'dithered' with [lora]" in refusal(run_file, *adapter)


def test_overrides_take_toml_values_and_bare_words(run_file):
    config = load_config(run_file, ["trainer.learning_rate=3e-4", "name=other", "environment.kwargs.width=3"])
    assert (config.trainer.learning_rate, config.name, config.environment.kwargs) == (3e-4, "other", {"width": 3})


def test_a_wrong_value_is_named_with_its_path_and_what_was_expected(run_file):
    """Limits that stand beside a field, as the page of the configuration shows them, have one row for each kind."""
    cannot = "the trainer cannot reproduce the logprobs"
    for override, message in [
        ("trainer.learning_rate=fast", "trainer.learning_rate = 'fast': Expected `float`, got `str`"),
        ("trainer.learning_rate=-1.0", "trainer.learning_rate = -1.0: Expected `float` > 0"),
        ("trainer.betas=[0.9,1.5]", "trainer.betas[1] = 1.5: Expected `float` < 1.0"),
        ("lora.targets=[]", "lora.targets = []: Expected `array` of length >= 1"),
        ("environment.name='a b'", "environment.name = 'a b': Expected `str` matching"),
        ("mode=serial", "mode = 'serial': expected one of 'asynchronous', 'synchronous'"),
        ("environment={kwargs={x=1}}", "environment.path: missing field"),
        ("trainer.lr=1.0", "trainer.lr: unknown field, expected one of learning_rate, "),
        ("endpoint.api_key=secret", "endpoint.api_key: unknown field"),
        ("trainr.betas=1", "trainr: unknown field (did you mean trainer?), expected one of name, "),
        ("learning_rate=1", "learning_rate: unknown field (did you mean trainer.learning_rate?), expected one of"),
        ("max_steps=9", "max_steps: unknown field (did you mean num_updates?), expected one of name, "),
        ("trainer.beta=0.04", "trainer.beta: unknown field (did you mean objective.kwargs.kl_coefficient?)"),
        ("trainer.project=1", "trainer.project: unknown field (did you mean metrics.wandb.project?), expected"),
        ("lora.dropout=0.1", "lora.dropout: unknown field: the trainer has to reproduce the policy"),
        ("model.rounding=dithered", "model.rounding = 'dithered' with model.dtype = 'float32'"),
        ("environments=[{path='a:B'}]", "environment, environments: both are there; expected [environment], or"),
        ("environment.weight=0.0", "environments have the weights {'main': 0.0}, expected a finite sum above 0"),
        ("environment.num_tasks=9", "uniform', which poses tasks without end; expected"),
        ("batch.max_skipped=9", "max_skipped = 9 with fill = 'any': expected fill = 'with_variance'"),
        ("reward={kwargs={x=1}}", "kwargs = {'x': 1} with path = 'environment': expected them in environment.kwargs"),
        ("reward.path=rloo", "reward.path = 'rloo': expected package.module:Name"),
        ("reward.components=[{name='a', path='b'}]", "reward.components[0].path = 'b': expected package.module:Name"),
        ("reward.components=[{name='a', path='b:c', weight=0.0}]", "components have the weights {'a': 0.0}, expected"),
        *((f"sampling.{name}=2", f"sampling.{name} = 2: {cannot}")
          for name in ("min_p", "repetition_penalty", "presence_penalty", "min_tokens")),
        ("sampling.logit_bias={5=1.0}", f"sampling.logit_bias = {{'5': 1.0}}: {cannot}"),
        ("engine.args.logits_processors=['a:B']", "engine.args.logits_processors = ['a:B']: the trainer cannot"),
        ("trainer.num_minibatches=33", "num_minibatches = 33: expected at most groups_per_batch = 32"),
        ("trainer.num_epochs=3", "max_lag = 2 with 3 optimizer steps per batch"),
        ("advantage.truncated=penalize", "truncated_reward = None with truncated = 'penalize': expected a number"),
        ("advantage.truncated_reward=-1.0", "truncated_reward = -1.0 with truncated = 'train': expected it to be"),
        ("trainer.decay_steps=9", "decay_steps = 9 with decay = 'constant': expected decay = 'linear' or"),
        ("trainer={decay='linear', decay_steps=101}", "at most the run's 100 optimizer steps"),
        ("sampling.top_p=0.9", "sampling.top_k = 0, sampling.top_p = 0.9: "),
        ("sampling={top_k=-5}", "sampling.top_k = -5, "),
        ("sampling.top_p=0.0", "sampling.top_p = 0.0: expected more than 0, and at most 1"),
        ("sampling.temperature=nan", "sampling.temperature = nan: expected 0 or more, and finite"),
        ("teacher={}", "teacher = {}: model, url: neither is there; expected one of the two"),
        ("teacher={model='m', url='http://h/v1'}", "model, url: both are there; expected one of the two"),
        *((f"teacher.url='{url}'", f"url = '{url}': expected http://host:port/v1, without a user or a")
          for url in ("http://u:k@h/v1", "localhost:8000")),
        ("name=a/b", "run name 'a/b': expected letters, digits"),
        ("seed", "override 'seed': expected dotted.path=value"),
        ("name.first=1", "name is a value, not a table"),
    ]:  # fmt: skip
        assert message in refusal(run_file, override), override


def test_a_teacher_goes_with_what_it_leaves_to_do_and_is_refused_with_what_it_does_not(run_file):
    config = load_config(run_file, ["teacher.model=m", "group_size=1", "advantage.truncated=mask", "sampling.top_k=5"])
    assert config.teacher.alone and config.teacher_url is None
    beside = ["teacher.model=m", "teacher.alone=false", "advantage.kl_coefficient=0.1", "sampling.temperature=0.7"]
    assert not load_config(run_file, beside).teacher.alone
    server, alone = "teacher={url='http://h:1/v1'}", "with teacher.alone = true"
    for overrides, message in [
        (["batch.fill=with_variance"], "batch.fill = 'with_variance' with [teacher]: groups whose rewards are equal"),
        (["advantage.kl_coefficient=0.1"], f"advantage.kl_coefficient = 0.1 {alone}: no reward"),
        (["advantage.path=a:B"], f"advantage.path = 'a:B' {alone}"),
        (["advantage={truncated='penalize', truncated_reward=0.0}"], f"advantage.truncated_reward = 0.0 {alone}"),
        ([server, "sampling.temperature=0.7"], "teacher.url = 'http://h:1/v1' with sampling.temperature = 0.7, "),
        ([server, "sampling.top_k=5"], "sampling.top_k = 5, sampling.top_p = 1.0: a server's"),
    ]:
        assert message in refusal(run_file, "teacher.model=m", *overrides), overrides


def test_groups_of_one_are_refused_where_their_variance_decides(run_file):
    drop_flat = "penstock.consumers.stream.curricula:drop_flat"
    for override in ("batch.fill=with_variance", f"curriculum.path={drop_flat}"):
        assert "with group_size = 1: no group has reward variance" in refusal(run_file, "group_size=1", override)
    assert load_config(run_file, ["group_size=1"]).group_size == 1


RAW = ("engine.logprobs_mode=raw_logprobs", "sampling.temperature=0.7")
LOW = ("model.dtype=bfloat16", "engine.head_dtype=model")


def test_settings_that_fail_parity_are_refused_unless_there_is_no_gate_and_others_all_the_same(run_file):
    for overrides, message in [
        (RAW, "raw logprobs are not those of the sampled distribution"),
        (LOW, "engine.head_dtype = 'model' with model.dtype = 'bfloat16'"),
    ]:
        load_config(run_file, overrides[:1])
        for gate in ("refuse", "warn"):
            said = refusal(run_file, *overrides, f"parity.gate={gate}")
            assert message in said and "or parity.gate = 'off'" in said
    config = load_config(run_file, [*RAW, *LOW, "parity.gate=off"])
    assert (config.engine.logprobs_mode, config.engine.head_dtype) == ("raw_logprobs", "model")
    truncated = ["parity.gate=off", "sampling.top_k=20", "sampling.top_p=0.9"]
    assert load_config(run_file, truncated).sampling.is_truncated
    assert "logprobs_mode = 'raw_logprobs' with sampling.top_k = 20: " in refusal(run_file, *truncated, RAW[0])


def test_a_file_that_is_not_there_or_not_whole_or_not_toml_is_named(run_file, tmp_path):
    assert "absent.toml: no such file" in refusal(tmp_path / "absent.toml")
    for written, said in (
        (b"name = 'x'\n[environment]\npath='a:b'\n", "model: missing field"),
        (b"name = ", "not TOML"),
        ("name = 'Grüße'".encode("latin-1"), "not UTF-8, which TOML"),
    ):
        run_file.write_bytes(written)
        assert said in refusal(run_file)


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


def test_a_plug_that_does_not_fit_is_refused_with_what_was_expected(lab):
    for a_plug, protocol, message in [
        (plug(wrong=1), GreeterProtocol, r"environment.kwargs = \{'wrong': 1\}: lab:Greeter refuses them"),
        (plug(greeting=""), GreeterProtocol, "environment: lab:Greeter: greeting = ''"),
        (plug(greeting="x"), LouderProtocol, r"expected LouderProtocol.greet\(self, name: str, volume: int\) -> str"),
        (plug("lab:Nobody"), GreeterProtocol, "module 'lab' has no 'Nobody'"),
        (plug("no_such_module:X"), GreeterProtocol, "cannot import 'no_such_module'"),
    ]:
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
    assert len(fields_of(RunConfig)) <= 159, sorted(fields_of(RunConfig))
