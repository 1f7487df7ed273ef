"""The checks before a start name what is wrong with a run."""

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.deploy.launch import start_checks
from penstock.deploy.launch.machine import Machine
from penstock.deploy.launch.start_checks import (
    check,
    check_objective,
    estimated_evaluation_bytes,
    estimated_group_bytes,
    place_parts,
)
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import (
    ConfigError,
    CorrectionConfig,
    CurriculumPlug,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    HeldOutConfig,
    LoraConfig,
    MetricsConfig,
    ModelConfig,
    Plug,
    RedisConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    WandbConfig,
)
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
)
from wire_examples import FINGERPRINT

ARITHMETIC = "penstock.producers.environments.arithmetic:Arithmetic"


@pytest.fixture
def config(model_folder) -> RunConfig:
    return RunConfig(
        name="r",
        model=ModelConfig(path=str(model_folder)),
        environment=EnvironmentConfig(path=ARITHMETIC, kwargs={"width": 2}),
    )


def changed(config: RunConfig, **fields: object) -> RunConfig:
    return msgspec.structs.replace(config, **fields)


def test_a_sound_run_passes_without_a_warning(config):
    assert check(config).warnings == []


def test_a_model_folder_that_does_not_exist_is_named(config):
    with pytest.raises(ConfigError, match=r"model\.path = '/no/where': no such folder.*penstock make-model /no/where"):
        check(changed(config, model=ModelConfig(path="/no/where")))


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B"),
        ("models/mine/7b", "hf download OWNER/NAME --local-dir models/mine/7b"),
    ],
)
def test_a_model_that_is_not_here_comes_with_the_command_that_fetches_it_there(config, path, command):
    with pytest.raises(ConfigError, match=f"`{command}` fetches one from the Hugging Face Hub"):
        check(changed(config, model=ModelConfig(path=path)))


def test_cuda_without_a_device_is_refused_before_anything_starts(config, monkeypatch):
    monkeypatch.setattr(start_checks, "read_machine", Machine)
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda': torch finds no CUDA device"):
        place_parts(changed(config, trainer=TrainerConfig(device="cuda")))


def test_weights_and_biases_without_a_key_is_warned_of(config, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    asked = changed(config, metrics=MetricsConfig(wandb=WandbConfig(project="lab")))
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


def test_a_folder_without_a_model_is_named(config, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        check(changed(config, model=ModelConfig(path=str(tmp_path))))


@pytest.mark.parametrize(
    ("plug", "message"),
    [
        (EnvironmentConfig(path="penstock.producers.environments.arithmetic:Nothing"), "has no 'Nothing'"),
        (EnvironmentConfig(path="no_such_lab:Environment"), "cannot import 'no_such_lab'"),
        (
            EnvironmentConfig(path=ARITHMETIC, kwargs={"widht": 2}),
            "refuses them",
        ),
        (EnvironmentConfig(path="pathlib:Path"), "refuses them|lacks"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(config, plug, message):
    with pytest.raises(ConfigError, match=message):
        check(changed(config, environment=plug))


def test_a_reward_must_be_a_function(config):
    with pytest.raises(ConfigError, match=r"reward\.path = 'math:pi': .* expected a function"):
        check(changed(config, reward=RewardConfig(path="math:pi")))


def test_an_objective_must_exist(config):
    check_objective(config)
    with pytest.raises(ConfigError, match=r"objective\.path"):
        check_objective(changed(config, objective=Plug(path="penstock.consumers.learning.objectives.grpo:Gpro")))


def test_memory_must_hold_twice_the_credit(config):
    small = changed(config, redis=RedisConfig(maxmemory_mb=1), sampling=SamplingConfig(max_tokens=4096))
    with pytest.raises(ConfigError, match=r"redis\.maxmemory_mb = 1: the 96 groups .* expected at least twice that"):
        check(small)


def test_memory_must_hold_twice_the_answers_of_an_evaluation(config):
    large = EvaluationConfig(num_prompts=64, num_samples=16, temperature=1.0, max_tokens=4096)
    small = changed(config, redis=RedisConfig(maxmemory_mb=16), evaluation=large)
    assert 64 * 16 * 4096 * 8 < estimated_evaluation_bytes(small) < 64 * 16 * 4096 * 16
    with pytest.raises(ConfigError, match=r"wait take up to \d MB and the answers of an evaluation \d\d MB; expected"):
        check(small)
    check(changed(small, redis=RedisConfig(maxmemory_mb=256)))


def test_a_group_that_may_pass_the_entry_cap_is_warned_of(config):
    (warning,) = check(changed(config, group_size=64, sampling=SamplingConfig(max_tokens=16384))).warnings
    assert "group_size = 64 with sampling.max_tokens = 16384" in warning


@pytest.mark.parametrize("top_k", [0, 20])
def test_the_estimate_is_not_below_a_full_group(config, top_k):
    config = changed(config, sampling=SamplingConfig(top_k=top_k))
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


def test_an_evaluation_takes_all_held_out_prompts_unless_told_otherwise(config):
    available = config.environment.kwargs.get("num_evaluation_prompts", 256)
    assert check(config).config.num_evaluation_prompts == {"main": available}
    fewer = changed(config, evaluation=EvaluationConfig(num_prompts=3))
    assert check(fewer).config.num_evaluation_prompts == {"main": 3}
    with pytest.raises(
        ConfigError, match=f"evaluation.num_prompts = 9999: the environment 'main' .* has {available} held-out"
    ):
        check(changed(config, evaluation=EvaluationConfig(num_prompts=9999)))


def test_a_curriculum_has_the_number_of_tasks_of_the_environment_or_of_the_run_file(config):
    curriculum = CurriculumPlug(path="penstock.consumers.stream.curricula:drop_flat")
    unknown = changed(config, curriculum=curriculum)
    with pytest.raises(ConfigError, match=r"environment.num_tasks is not set: curriculum.path = .*drop_flat' chooses"):
        check(unknown)
    told = msgspec.structs.replace(config.environment, num_tasks=300)
    check(changed(unknown, environment=told))
    finite = EnvironmentConfig(path=f"{__name__}:Finite")
    assert check(changed(unknown, environment=finite)).config.environment.num_tasks == 7
    assert check(changed(config, environment=finite)).config.environment.num_tasks is None, "uniform has no use for it"
    too_many = msgspec.structs.replace(finite, num_tasks=8)
    with pytest.raises(ConfigError, match=r"environment.num_tasks = 8: the environment has 7 tasks; expected at most"):
        check(changed(unknown, environment=too_many))


def test_an_environment_that_is_only_evaluated_needs_no_training_data(config, tmp_path):
    (file := tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    held_out = EnvironmentConfig(
        path="penstock.producers.environments.dataset:Dataset",
        name="test",
        kwargs={"evaluation": str(file)},
        weight=0,
    )
    first = msgspec.structs.replace(config.environment, num_tasks=300)
    several = changed(
        config,
        environment=None,
        environments=(first, held_out),
        curriculum=CurriculumPlug(path="penstock.consumers.stream.curricula:drop_flat"),
    )
    assert check(several).config.num_evaluation_prompts["test"] == 1
    trained = msgspec.structs.replace(held_out, weight=1, num_tasks=1)
    with pytest.raises(ConfigError, match=r"\[1\].path = .*prompt\(1\): ValueError: Dataset: training is not set, exp"):
        check(changed(several, environments=(first, trained)))


class Finite(Arithmetic):
    num_tasks = 7


def test_each_of_several_environments_is_checked_under_its_own_field(config):
    first = EnvironmentConfig(path=ARITHMETIC, name="sums", evaluation=HeldOutConfig(num_prompts=5))
    second = EnvironmentConfig(path=ARITHMETIC, name="long", kwargs={"width": 3, "num_evaluation_prompts": 9})
    several = changed(config, environment=None, environments=(first, second))
    assert check(several).config.num_evaluation_prompts == {"sums": 5, "long": 9}
    greedy = msgspec.structs.replace(second, evaluation=HeldOutConfig(num_prompts=10))
    with pytest.raises(
        ConfigError, match=r"environments\[1\].evaluation.num_prompts = 10: the environment 'long' .* has 9 held-out"
    ):
        check(changed(several, environments=(first, greedy)))
    idle = msgspec.structs.replace(second, weight=0, kwargs={"width": 3, "num_evaluation_prompts": 0})
    with pytest.raises(
        ConfigError, match=r"environments\[1\].weight = 0: the environment has no held-out prompts, so it"
    ):
        check(changed(several, environments=(first, idle)))
    wrong = msgspec.structs.replace(second, kwargs={"width": 0})
    with pytest.raises(ConfigError, match=r"environments\[1\]: .*Arithmetic: width is 0, expected 1 to 18"):
        check(changed(several, environments=(first, wrong)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sampling": SamplingConfig(temperature=0.005)},
            r"temperature = 0.005: vLLM cannot sample groups there",
        ),
        (
            {"engine": EngineConfig(args={"logprobs_mode": "raw_logprobs"})},
            r"args.logprobs_mode = .*expected engine",
        ),
        (
            {"sampling": SamplingConfig(top_k=20)},
            r"sampling.top_k = 20, .* CPU build does not report which ids it kept",
        ),
    ],
)
def test_what_the_engine_would_refuse_is_said_before_it_starts(config, fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(changed(config, **fields))


def test_a_tensor_parallel_size_that_does_not_divide_the_model_is_refused(config, model_folder) -> None:
    (model_folder / "config.json").write_text('{"num_attention_heads": 6}')
    check(changed(config, engine=EngineConfig(tensor_parallel_size=3)))
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size = 4: expected a divisor .*_heads = 6"):
        check(changed(config, engine=EngineConfig(tensor_parallel_size=4)))


def test_an_objective_that_forms_the_correction_itself_is_refused_beside_one(config) -> None:
    kwargs = {"proximal": "loglinear", "total_weight_cap": 5.0}
    objective = Plug(path="penstock.consumers.learning.objectives.decoupled_ppo:DecoupledPpo", kwargs=kwargs)
    with pytest.raises(ConfigError, match="counted twice"):
        check_objective(changed(config, objective=objective))
    check_objective(changed(config, objective=objective, correction=CorrectionConfig(mode="none")))


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


def test_an_error_in_the_user_s_module_names_its_file_and_line(config, tmp_path, monkeypatch) -> None:
    modules = {
        "lab_syntax": ("class A:\n    def b(self)\n", r"lab_syntax.*SyntaxError: expected ':' .*lab_syntax.py, line 2"),
        "lab_file": ("A = 1\nopen('no rows.json')\n", r"FileNotFoundError: .*no rows.json.*lab_file.py:2, in <module>"),
        "lab_exit": ("import sys\nsys.exit('no key')\n", r"SystemExit: no key \(.*lab_exit.py:2, in <module>"),
        "lab_needs": ("import no_such_part\n", r"No module named 'no_such_part' \(.*lab_needs.py:1, in <module>"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name, (text, message) in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=rf"environment.path = '{name}:A': cannot import .*{message}"):
            check(changed(config, environment=EnvironmentConfig(path=f"{name}:A")))
    for kwargs, message in [
        ({"fails": True}, r"Restless: KeyError: 'rows.json' \(.*test_start_checks.py:\d+, in __init__\)"),
        ({"attribute": "20"}, "num_evaluation_prompts = '20', expected a whole number"),
        ({"attribute": 2.0}, "num_evaluation_prompts = 2.0, expected a whole number"),
        ({}, r"prompt\(1\) differs when it is asked twice, 1\+1= and 1\+2="),
    ]:
        with pytest.raises(ConfigError, match=message):
            check(changed(config, environment=EnvironmentConfig(path=f"{__name__}:Restless", kwargs=kwargs)))


class PosesText:
    num_evaluation_prompts = 2

    def __init__(self, *, seed: int, held_out: object = Prompt(text="1+1=")) -> None:
        self.held_out = held_out

    def prompt(self, index: int) -> Prompt:
        return Prompt(text="1+1=") if self.held_out is None else "1+1="  # type: ignore[return-value]

    def evaluation_prompt(self, n: int) -> Prompt:
        return {}[n]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"prompt\(1\): TypeError: prompt\(1\) returned '1\+1=', expected a Prompt; `penstock try` shows where"),
        ({"held_out": None}, r"evaluation_prompt\(1\): KeyError: 1; `penstock try` shows where"),
    ],
)
def test_a_prompt_that_raises_or_is_none_is_refused_before_anything_boots(config, kwargs, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(changed(config, environment=EnvironmentConfig(path=f"{__name__}:PosesText", kwargs=kwargs)))


def test_an_adapter_needs_the_base_s_weights_and_targets_that_it_has(config, model_folder):
    with pytest.raises(ConfigError, match=r"no safetensors files there; expected the weights of the base"):
        check(changed(config, lora=LoraConfig()))
    names = [f"model.layers.1.{name}.weight" for name in LoraConfig().targets]
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, model_folder / "model.safetensors")
    adapted = changed(config, lora=LoraConfig())
    assert check(adapted).warnings == []
    wrong = changed(adapted, lora=LoraConfig(targets=("qkv_proj", "q_proj")))
    with pytest.raises(
        ConfigError, match=r"lora.targets = .* no linear layer qkv_proj; expected some of down_proj, ga"
    ):
        check(wrong)
