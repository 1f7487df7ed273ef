"""The checks before a start name what is wrong with a run."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.deploy.launch.start_checks import (
    check,
    check_objective,
    estimated_evaluation_bytes,
    estimated_group_bytes,
)
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import ConfigError, LoraConfig, RunConfig, config_of
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import (
    Reward,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    encode_group,
    pack_floats,
    pack_ids,
)  # fmt: skip
from wire_examples import FINGERPRINT

MODULE = "penstock.producers.environments.arithmetic"
ARITHMETIC = f"{MODULE}:Arithmetic"
DROP_FLAT = "curriculum.path=penstock.consumers.stream.curricula:drop_flat"


@pytest.fixture
def configured(model_folder, tmp_path):
    """`configured("num_updates=3")`: a sound run, changed."""

    def make(*overrides: str, **tables: object) -> RunConfig:
        document = {
            "name": "r",
            "model": {"path": str(model_folder)},
            "environment": {"path": ARITHMETIC, "kwargs": {"width": 2}},
        }
        document |= tables
        return config_of({name: table for name, table in document.items() if table}, tmp_path / "run.toml", overrides)

    return make


class Finite(Arithmetic):
    num_tasks = 7


class Restless:
    num_evaluation_prompts = 0

    def __init__(self, *, seed: int, attribute: object = 0, fails: bool = False) -> None:
        if fails:
            raise KeyError("rows.json")
        self.num_evaluation_prompts = attribute  # type: ignore[assignment]
        self._num_asked = 0

    def prompt(self, index: int) -> Prompt:
        self._num_asked += 1
        return Prompt(text=f"1+{self._num_asked}=")

    evaluation_prompt = prompt

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 1.0


class PosesText:
    num_evaluation_prompts = 2

    def __init__(self, *, seed: int, held_out: bool = False) -> None:
        self.held_out = held_out

    def prompt(self, index: int) -> Prompt:
        return Prompt(text="1+1=") if self.held_out else "1+1="  # type: ignore[return-value]

    def evaluation_prompt(self, n: int) -> Prompt:
        return {}[n]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 1.0


def test_a_sound_run_passes_without_a_warning_and_evaluates_all_held_out_prompts_unless_told_otherwise(configured):
    checked = check(configured())
    assert checked.warnings == [] and checked.config.num_evaluation_prompts == {"main": 256}
    assert check(configured("evaluation.num_prompts=3")).config.num_evaluation_prompts == {"main": 3}


# fmt: off
REFUSED = [
    ("model.path=/no/where", r"model\.path = '/no/where': no such folder.*penstock make-model /no/where"),
    ("model.path=Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B` fetches one from"),
    ("model.path=models/mine/7b", "`hf download OWNER/NAME --local-dir models/mine/7b` fetches one from the Hugging"),
    ("model.path=.", r"no config\.json in it"),
    (f"environment.path={MODULE}:Nothing", "has no 'Nothing'"),
    ("environment.path=no_such_lab:Environment", "cannot import 'no_such_lab'"),
    ("environment.kwargs.widht=2", "refuses them"),
    ("environment.path=pathlib:Path", "refuses them|lacks"),
    ("reward.path=math:pi", r"reward\.path = 'math:pi': .* expected a function"),
    ("sampling.temperature=0.005", "temperature = 0.005: vLLM cannot sample groups there"),
    ("engine.args.logprobs_mode=raw_logprobs", r"args.logprobs_mode = .*expected engine"),
    ("sampling.top_k=20", r"sampling.top_k = 20, .* CPU build does not report which ids it kept"),
    ("redis.maxmemory_mb=1", r"redis\.maxmemory_mb = 1: the 96 groups .* expected at least twice that"),
    ("evaluation.num_prompts=9999", r"evaluation.num_prompts = 9999: the environment 'main' .* has 256 held-out"),
    (DROP_FLAT, r"environment.num_tasks is not set: curriculum.path = .*drop_flat' chooses"),
    ("model.replay_routes=true", r"replay_routes = true with model\.path = .*: its config.json names no experts"),
    ("lora.rank=2", "no safetensors files there; expected the weights of the base"),
    ("engine.tensor_parallel_size=4", r"engine\.tensor_parallel_size = 4: expected a divisor .*_heads = 6"),
]
# fmt: on


def test_what_cannot_work_is_refused_before_anything_starts(configured, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (model_folder / "config.json").write_text('{"num_attention_heads": 6}')
    check(configured("engine.tensor_parallel_size=3"))
    for override, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{override}: {check(configured(override, 'sampling.max_tokens=4096'))}")
    mixture = '{"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}'
    (model_folder / "config.json").write_text(mixture)
    with pytest.raises(
        ConfigError, match=r"model\.replay_routes = true with trainer\.compile = true: .* one of the two"
    ):
        check(configured("model.replay_routes=true", "trainer.compile=true"))
    poses = {"path": f"{__name__}:PosesText"}
    for kwargs, message in (
        ({}, r"prompt\(1\): TypeError: prompt\(1\) returned '1\+1=', expected a Prompt \(.*.py:\d+\); `penstock try`"),
        (
            {"held_out": True},
            r"evaluation_prompt\(1\): KeyError: 1 \(.*, in evaluation_prompt\); `penstock try`",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check(configured(environment=poses | {"kwargs": kwargs}))


def test_an_error_in_the_user_s_module_names_its_file_and_line(configured, tmp_path, monkeypatch) -> None:
    modules = {
        "lab_syntax": ("class A:\n    def b(self)\n", r"lab_syntax.*SyntaxError: expected ':' \(.*lab_syntax.py:2\)"),
        "lab_file": ("A = 1\nopen('no rows.json')\n", r"FileNotFoundError: .*no rows.json.*lab_file.py:2, in <module>"),
        "lab_exit": ("import sys\nsys.exit('no key')\n", r"SystemExit: no key \(.*lab_exit.py:2, in <module>"),
        "lab_null": ("x = '\0'", r"SyntaxError: source code string cannot contain null bytes \(.*lab_null.py\)"),
        "lab_needs": ("import no_such_part\n", r"No module named 'no_such_part' \(.*lab_needs.py:1, in <module>"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name, (text, message) in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=rf"environment.path = '{name}:A': cannot import .*{message}"):
            check(configured(environment={"path": f"{name}:A"}))
    for path in ("./lab.py:A", "lab.py:A", ".lab:A", "lab:", ":A"):
        with pytest.raises(ConfigError, match=r"no import path; expected 'module:Name', as in 'my_lab:Capitals'"):
            check(configured(environment={"path": path}))
    for kwargs, message in [
        ({"fails": True}, r"Restless: KeyError: 'rows.json' \(.*test_start_checks.py:\d+, in __init__\)"),
        ({"attribute": "20"}, "num_evaluation_prompts = '20', expected a whole number"),
        ({"attribute": 2.0}, "num_evaluation_prompts = 2.0, expected a whole number"),
        ({}, r"prompt\(1\) differs when it is asked twice, 1\+1= and 1\+\d+="),
    ]:
        with pytest.raises(ConfigError, match=message):
            check(configured(environment={"path": f"{__name__}:Restless", "kwargs": kwargs}))


LAB = """
from penstock.schemas.prompt import Prompt
class Meta(type): pass
class A(metaclass=Meta):
    num_evaluation_prompts = 1
    def __init__(self, *, seed): pass
    def prompt(self, index): return Prompt(text="1+1=", answer="2")
    def evaluation_prompt(self, n): return Prompt(text="1+1=", answer="2")
    def reward(self, prompt, completion): return 1.0
"""
UNSOUND_CODE = [
    ("    num_tasks = '9'", r"num_tasks = '9', expected a whole number from 1 \(FILE:4\)"),
    ("    num_tasks = property(lambda self: 1 // 0)", r"reading num_tasks raises ZeroDivisionError.* \(FILE:10, in"),
    ("    num_evaluation_prompts = property(lambda self: open('no'))", r"raises FileNotFoundError.* \(FILE:10, in"),
    ("    num_evaluation_prompts = property(lambda self: self.rows)", r"AttributeError: .*'rows' \(FILE:10, in"),
    ("    def __getattr__(self, name): raise OSError('cut off')", r"raises OSError: cut off \(FILE:10, in"),
    (
        "    async def prompt(self, index): ...",
        r"prompt is an async def, .*; expected Environment.* \(FILE:10\)",
    ),
    ("    evaluation_prompt = 3", r"lacks a method; expected Environment.evaluation_prompt.* \(FILE:4\)"),
    ("    converse = 3", r"lacks a method; expected ConversingEnvironment.converse.* \(FILE:4\)"),
    ("    def converse(self, prompt, conversation): ...", r"converse is no async def, and is awaited; .* \(FILE:10\)$"),
    ("    async def converse(self, prompt, conversation): yield", r"converse is no async def, .* \(FILE:10\)$"),
    (
        "    reward_threads = '4'",
        r"^environment.path = 'lab_\d+:A': reward_threads = '4', expected a whole.* \(FILE:9\)",
    ),
    ("    reward_threads = True", r"reward_threads = True, expected a whole number from 1 \(FILE:9\)"),
    (
        "    reward_threads = property(lambda self: exit(3))",
        r"reading reward_threads raises SystemExit: 3 \(FILE:10, in",
    ),
    ("    def __init__(self, *, seed): raise ValueError", r"lab_\d+:A: ValueError \(FILE:10, in __init__\)$"),
    ("    def __init__(self, *, seed): raise ValueError('a\\n' * 9999)", r"A: a.* \(FILE:10, in __init__\)$"),
    ("    async def __init__(self, *, seed): ...", r"an async def; expected a class, or a function .* \(FILE:10\)"),
    ("    def __new__(cls, *, seed): return None", r"lacks a method; expected Environment.* \(FILE:4\)"),
    ("Meta.__signature__ = property(lambda cls: 1 // 0)", r"its signature cannot be read; .* \(FILE:10, in"),
    ("Meta.__call__ = lambda cls, *, seed: 1 // 0", r"ZeroDivisionError: .* \(FILE:10, in"),
    ("A = 3", "an object of class int; expected a class, or a function that returns one's object"),
    (
        "def __getattr__(name): raise OSError('lazy')\ndel A",
        r"reading A raises OSError: lazy \(FILE:10, in",
    ),
]


def test_an_unsound_environment_is_refused_in_one_line_with_its_place(configured, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for n, (code, message) in enumerate(UNSOUND_CODE):
        (file := tmp_path / f"lab_{n}.py").write_text(f"{LAB}{code}\n")
        with pytest.raises(ConfigError, match=message.replace("FILE", str(file))) as refused:
            pytest.fail(f"{code}: {check(configured(environment={'path': f'lab_{n}:A'}))}")
        assert "\n" not in str(refused.value), code


class Unsteady(Arithmetic):
    """Poses sums soundly, except for the tasks from `bad` on."""

    def __init__(self, *, seed: int, bad: int, does: str, num_tasks: int | None = None) -> None:
        super().__init__(seed=seed, width=2)
        self._bad, self._does, self._num_asked = bad, does, 0
        self.num_tasks = num_tasks

    def prompt(self, index: int) -> Prompt:
        self._num_asked += 1
        if index < self._bad:
            return super().prompt(index)
        if self._does == "differs":
            return Prompt(text=f"{self._num_asked}+1=")
        return {}[index] if self._does == "raises" else {}  # type: ignore[return-value]

    evaluation_prompt = prompt


def test_tasks_are_posed_twice_from_the_first_to_the_last(configured) -> None:
    """The run has 320 groups."""
    for bad, num_tasks, asked in (
        (2, None, 2),
        (3, None, 3),
        (8, None, 8),
        (200, None, 240),
        (320, None, 320),
        (40, 40, 40),
    ):
        for does, message in (
            ("differs", "differs when it is asked twice, "),
            ("raises", rf"KeyError: {asked} \(.*test_start_checks.py:\d+, in prompt\)"),
            ("returns", rf"TypeError: prompt\({asked}\) returned {{}}, expected a Prompt \(.*test_start_checks.py"),
        ):
            kwargs = {"bad": bad, "does": does} | ({"num_tasks": num_tasks} if num_tasks else {})
            plug = {"path": f"{__name__}:Unsteady", "kwargs": kwargs}
            with pytest.raises(ConfigError, match=rf": prompt\({asked}\):? {message}"):
                pytest.fail(f"{kwargs}: {check(configured('num_updates=10', 'groups_per_batch=32', environment=plug))}")
    held_out = {"path": f"{__name__}:Unsteady", "kwargs": {"bad": 200, "does": "raises"}, "weight": 0}
    with pytest.raises(ConfigError, match=r": evaluation_prompt\(256\): KeyError: 256"):
        check(configured(environment=None, environments=[{"path": ARITHMETIC}, held_out | {"name": "other"}]))


def test_an_objective_must_exist_and_not_form_the_correction_beside_one(configured):
    check_objective(configured())
    with pytest.raises(ConfigError, match=r"objective\.path"):
        check_objective(configured("objective.path=penstock.consumers.learning.objectives.grpo:Gpro"))
    kwargs = {"proximal": "loglinear", "total_weight_cap": 5.0}
    objective = {"path": "penstock.consumers.learning.objectives.decoupled_ppo:DecoupledPpo", "kwargs": kwargs}
    with pytest.raises(ConfigError, match="counted twice"):
        check_objective(configured("correction.mode=token_truncate", objective=objective))
    check_objective(configured(objective=objective))
    check_objective(configured("correction.mode=none", objective=objective))


def test_memory_must_hold_twice_the_answers_of_an_evaluation(configured):
    large = {"num_prompts": 64, "num_samples": 16, "temperature": 1.0, "max_tokens": 4096}
    small = configured("redis.maxmemory_mb=16", evaluation=large)
    assert 64 * 16 * 4096 * 8 < estimated_evaluation_bytes(small) < 64 * 16 * 4096 * 16
    with pytest.raises(ConfigError, match=r"wait take up to \d MB and the answers of an evaluation \d\d MB; expected"):
        check(small)
    check(configured("redis.maxmemory_mb=256", evaluation=large))


def test_a_group_that_may_pass_the_entry_cap_is_warned_of(configured):
    (warning,) = check(configured("group_size=64", "sampling.max_tokens=16384")).warnings
    assert "group_size = 64 with sampling.max_tokens = 16384" in warning


def test_weights_and_biases_without_a_key_is_warned_of(configured, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked = configured("metrics.wandb.project=lab")
    (warning,) = check(asked).warnings
    assert warning.startswith("metrics.wandb: no key for api.wandb.ai, neither in WANDB_API_KEY nor in ")
    with monkeypatch.context() as offline:
        offline.setenv("WANDB_MODE", "offline")
        assert check(asked).warnings == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert check(asked).warnings == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.my.lab:8080")
    assert "no key for wandb.my.lab" in check(asked).warnings[0]
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert check(asked).warnings == []


@pytest.mark.parametrize("top_k", [0, 20])
def test_the_estimate_is_not_below_a_full_group(configured, top_k):
    config = configured(f"sampling.top_k={top_k}")
    num_prompt, num_sampled = 64, config.sampling.max_tokens
    rollout = Rollout(
        segments=(
            Segment(
                token_ids=pack_ids(range(num_prompt + num_sampled)),
                behavior_logprobs=pack_floats([-1.0] * num_sampled),
                loss_mask=((num_prompt, num_prompt + num_sampled),),
                version_spans=(VersionSpan(3, num_prompt, num_prompt + num_sampled),),
                sampling_mask=(pack_ids(range(top_k)),) * num_sampled if top_k else None,
            ),
        ),
        reward=Reward(value=1.0, parts={"exact": 1.0}),
    )
    group = RolloutGroup(
        index=1,
        prompt=Prompt(text="1" * num_prompt),
        rollouts=(rollout,) * config.group_size,
        producer_id="p",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(),
    )
    assert len(encode_group(group)) <= estimated_group_bytes(config) <= 2 * len(encode_group(group))


def test_a_curriculum_has_the_number_of_tasks_of_the_environment_or_of_the_run_file(configured):
    check(configured(DROP_FLAT, "environment.num_tasks=300"))
    finite = {"path": f"{__name__}:Finite"}
    assert check(configured(DROP_FLAT, environment=finite)).config.environment.num_tasks == 7
    assert check(configured(environment=finite)).config.environment.num_tasks is None, "uniform has no use for it"
    with pytest.raises(ConfigError, match=r"environment.num_tasks = 8: the environment has 7 tasks; expected at most"):
        check(configured(DROP_FLAT, "environment.num_tasks=8", environment=finite))


def test_an_environment_that_is_only_evaluated_needs_no_training_data(configured, tmp_path):
    (file := tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    first = {"path": ARITHMETIC, "num_tasks": 300}
    held_out = {"path": "penstock.producers.environments.dataset:Dataset", "kwargs": {"evaluation": str(file)}}
    held_out |= {"name": "test", "weight": 0}
    several = configured(DROP_FLAT, environment=None, environments=[first, held_out])
    assert check(several).config.num_evaluation_prompts["test"] == 1
    trained = held_out | {"weight": 1, "num_tasks": 1}
    with pytest.raises(ConfigError, match=r"\[1\].path = .*prompt\(1\): ValueError: Dataset: training is not set, e"):
        check(configured(DROP_FLAT, environment=None, environments=[first, trained]))


def test_each_of_several_environments_is_checked_under_its_own_field(configured):
    sums = {"path": ARITHMETIC, "name": "sums", "evaluation": {"num_prompts": 5}}
    long = {"path": ARITHMETIC, "name": "long", "kwargs": {"width": 3, "num_evaluation_prompts": 9}}
    checked = check(configured(environment=None, environments=[sums, long]))
    assert checked.config.num_evaluation_prompts == {"sums": 5, "long": 9}
    for change, message in (
        (
            {"evaluation": {"num_prompts": 10}},
            r"\[1\].evaluation.num_prompts = 10: the environment 'long' .* has 9 held",
        ),
        ({"weight": 0, "kwargs": {"num_evaluation_prompts": 0}}, r"\[1\].weight = 0: the environment has no held-out"),
        ({"kwargs": {"width": 0}}, r"\[1\]: .*Arithmetic: width is 0, expected 1 to 18"),
    ):
        with pytest.raises(ConfigError, match=rf"environments{message}"):
            check(configured(environment=None, environments=[sums, long | change]))


def test_an_adapter_needs_targets_that_the_base_has(configured, model_folder):
    names = [f"model.layers.1.{name}.weight" for name in LoraConfig().targets]
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, model_folder / "model.safetensors")
    assert check(configured("lora.rank=2")).warnings == []
    with pytest.raises(
        ConfigError, match=r"lora.targets = .* no linear layer qkv_proj; expected some of down_proj, ga"
    ):
        check(configured('lora.targets=["qkv_proj", "q_proj"]'))
