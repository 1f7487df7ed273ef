import fcntl
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch

from bench.ablation.distances import MEASURES, distance
from bench.ablation.environment import BLOCK_TOKENS, PrefixedArithmetic
from bench.ablation.experiment import PLANS, Ablation
from bench.ablation.figures import figure_files
from bench.ablation.objective import CLIP_RATE, GspoWithClipRate
from bench.ablation.page import NOT_RUN, render
from bench.ablation.plan import AblationCell, AblationPlan, load_plan
from bench.ablation.results import CURVES, AblationResult
from bench.ablation.runner import remove_run, run_cell
from bench.experiments.command import main
from bench.experiments.experiment import CellFailedError, read_result, write_result
from bench.experiments.page import markers
from forked_programs import start_run
from objective_cases import packed_inputs
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.deploy.demo.make_model import ModelRecipe, build_tokenizer, make_model
from penstock.deploy.report.telemetry import read_telemetry
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import ConfigError, load_config

FILE, PREFIX_FILE = PLANS.values()
ALL_FILES = pytest.mark.parametrize("file", [FILE, PREFIX_FILE], ids=lambda file: file.stem)
NUM_UPDATES = 40
SHORT = """
name = "short"
run_file = "run.toml"
results = "results"
page = "page.md"
reference = "base"
compared = ["other"]
set = ["num_updates=3"]

[[arms]]
name = "base"
label = "the reference"
seeds = [1, 2, 3]

[[arms]]
name = "other"
label = "another"
set = ["trainer.learning_rate=2e-5"]
environment = { FROM_THE_PLAN = "1" }

[[arms]]
name = "gpu"
label = "on a GPU"
gpu_only = true
gpu_set = ["engine.async_scheduling=true"]
"""
RUN = """
name = "workload"
[model]
path = "nothing-here"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""


RUN_A_CELL = """
import sys
from pathlib import Path
from bench.ablation.plan import AblationCell, load_plan
from bench.ablation.runner import run_cell
from bench.experiments.experiment import write_result

file = Path(sys.argv[1])
cell = AblationCell(arm="other", seed=1)
found = run_cell(load_plan(file), cell, file.parent / "runs", gpu=False, on_update=lambda n: print("update", n))
write_result(found, file.parent)
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "page.md").write_text("before\n{}\n{}\nafter\n".format(*markers("short")))
    file = tmp_path / "plan.toml"
    file.write_text(SHORT)
    return file


@pytest.fixture
def plan(plan_file: Path) -> AblationPlan:
    return load_plan(plan_file)


def result(plan: AblationPlan, cell: AblationCell, *, shift: float = 0.0, gpu: bool = False) -> AblationResult:
    """A finished cell whose curves lie `shift` above those of the seed."""
    noise = np.random.default_rng(cell.seed).normal(0, 0.01, NUM_UPDATES)
    curve = [float(value) for value in 1 + shift + 0.02 * cell.seed + noise]
    return AblationResult(
        cell=cell,
        date="2026-01-02T03:04:05+00:00",
        packages={"torch": "9"},
        processor="abacus",
        settings=plan.settings(cell, gpu=gpu),
        curves=dict.fromkeys((*CURVES, "token_lag"), curve),
        engine_lag={"producer-0": [None] + [1] * (NUM_UPDATES - 1), "producer-1": [2] * NUM_UPDATES},
        accuracy=[(0, 0.1), (20, 0.5), (40, 0.9)],
        tokens_by_lag={0: 5, 1: 7},
        num_steps_skipped=0,
        wall_s=1.5,
    )


def all_results(plan: AblationPlan, shift: float = 0.0) -> list[AblationResult]:
    return [result(plan, cell, shift=shift if cell.arm == "other" else 0.0) for cell in plan.cells(gpu=False)]


# The plan


def test_the_ablations_arms_are_those_of_servicenows_report():
    plan = load_plan(FILE)
    configs = {cell: plan.config(cell, gpu=False) for cell in plan.cells(gpu=False)}
    engines = {cell.arm: config.engine for cell, config in configs.items()}
    assert [cell.seed for cell in plan.cells(gpu=False) if cell.arm in ("reference", "initial")] == [1, 1, 2, 3, 2, 3]
    reference = engines["reference"]
    assert (reference.logprobs_mode, reference.head_dtype) == ("processed_logprobs", "float32")
    assert (reference.prefix_caching, reference.async_scheduling, reference.update) == (False, False, "in_flight")
    initial = engines["initial"]
    assert (initial.logprobs_mode, initial.head_dtype, initial.prefix_caching) == ("raw_logprobs", "model", True)
    # Each next arm takes back one thing of the initial set-up, and the last is the reference.
    assert engines["processed"] == msgspec.structs.replace(initial, logprobs_mode="processed_logprobs")
    assert engines["run-time-defaults"] == msgspec.structs.replace(engines["processed"], prefix_caching=False)
    assert engines["fp32-head"] == msgspec.structs.replace(engines["run-time-defaults"], head_dtype="float32")
    assert engines["fp32-head"] == reference
    assert engines["drained"] == msgspec.structs.replace(reference, update="drained")
    for config in configs.values():
        assert config.model.dtype == "bfloat16"
        assert config.sampling.temperature != 1.0
        assert config.correction.bypass
        assert config.parity.gate == "off"


def test_a_gpu_runs_what_the_cpu_build_refuses():
    plan = load_plan(FILE)
    on_gpu = {cell.arm: cell for cell in plan.cells(gpu=True)}
    assert "batch-invariant" not in {cell.arm for cell in plan.cells(gpu=False)}
    assert plan.arm("batch-invariant").environment == {"VLLM_BATCH_INVARIANT": "1"}
    assert plan.config(on_gpu["initial"], gpu=True).engine.async_scheduling
    assert not plan.config(on_gpu["initial"], gpu=False).engine.async_scheduling
    assert plan.config(on_gpu["batch-invariant"], gpu=True).engine.head_dtype == "float32"


def test_the_arms_behind_a_shared_prefix_differ_in_its_caching_alone():
    plan = load_plan(PREFIX_FILE)
    configs = {cell.arm: plan.config(cell, gpu=False) for cell in plan.cells(gpu=False)}
    off, salted, unsalted = (configs[name].engine for name in ("off", "salted", "unsalted"))
    assert (off.prefix_caching, salted.prefix_caching, unsalted.prefix_caching) == (False, True, True)
    assert (salted.cache_salt, unsalted.cache_salt) == ("version", "none")
    assert msgspec.structs.replace(unsalted, cache_salt="version") == salted
    assert msgspec.structs.replace(salted, prefix_caching=False) == off
    assert len({msgspec.json.encode(config.environment) for config in configs.values()}) == 1


def test_the_shared_prefix_fills_a_block_of_the_cache():
    plan = load_plan(PREFIX_FILE)
    config = plan.config(AblationCell(arm="off", seed=1), gpu=False)
    environment = PrefixedArithmetic(seed=1, **config.environment.kwargs)
    plain = Arithmetic(seed=1, **config.environment.kwargs)
    tokenizer = build_tokenizer(1024)
    for prompt, problem in (
        (environment.prompt(5), plain.prompt(5)),
        (environment.evaluation_prompt(5), plain.evaluation_prompt(5)),
    ):
        ids = tokenizer(prompt.text).input_ids
        assert tokenizer.decode(ids[:BLOCK_TOKENS]) == "What is the sum of these numbers"
        assert tokenizer.pad_token_id not in ids, "its embedding is zero: keys and values of no weights' own"
        assert ids[BLOCK_TOKENS:] == tokenizer(problem.text).input_ids
        assert environment.reward(prompt, problem.answer).value == 1.0
    assert config.engine.args["block_size"] == BLOCK_TOKENS


def test_an_unsalted_cache_is_refused_unless_the_gate_is_off(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(RUN + '[engine]\nprefix_caching = true\ncache_salt = "none"\n')
    with pytest.raises(ConfigError, match=r"engine\.cache_salt = 'none'.*expected 'version'"):
        load_config(file)
    assert load_config(file, ["parity.gate=off"]).engine.cache_salt == "none"
    assert load_config(file, ["engine.prefix_caching=false"]).engine.cache_salt == "none"


def test_every_arm_is_run_once_before_any_is_run_again(plan: AblationPlan):
    assert [cell.name for cell in plan.cells(gpu=False)] == ["base-seed1", "other-seed1", "base-seed2", "base-seed3"]


def test_cells_of_one_seed_see_the_same_data(plan: AblationPlan):
    base, other = (plan.config(AblationCell(arm=arm, seed=2), gpu=False) for arm in ("base", "other"))
    assert base.seed == other.seed == 2
    assert base.environment == other.environment
    assert other.trainer.learning_rate == 2e-5 != base.trainer.learning_rate


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ('reference = "base"', 'reference = "nobody"', "reference = 'nobody': expected one of base, other, gpu"),
        ('reference = "base"', 'reference = "gpu"', "reference = 'gpu': expected an arm that runs everywhere"),
        ('compared = ["other"]', 'compared = ["nobody"]', "compared = 'nobody': expected one of base, other, gpu"),
        ('name = "gpu"', 'name = "other"', "'other' is there twice"),
        ('name = "gpu"', 'name = "../up"', "arms"),
        ("gpu_only = true", "gpu_only = true\nbudget = 3", "budget"),
        ("seeds = [1, 2, 3]", "seeds = []", "seeds"),
        ('name = "short"', "name = short", "not TOML"),
    ],
)
def test_an_ablation_that_cannot_be_run_is_refused(plan_file: Path, before: str, after: str, complaint: str):
    assert SHORT.count(before) == 1
    plan_file.write_text(SHORT.replace(before, after))
    with pytest.raises(ConfigError) as refused:
        load_plan(plan_file)
    assert complaint in str(refused.value)


def test_an_ablation_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load_plan(tmp_path / "none.toml")


# The clip rate


def test_the_clip_rate_counts_rows_outside_the_range_on_either_side():
    inputs = packed_inputs(3, lengths=(2, 2, 2, 2), drift=0.0)
    #                        inside  above      below        above, and a token of its own below
    gaps = torch.tensor([0.0, 0.0, 0.3, 0.1, -0.3, -0.1, 0.9, -0.5], dtype=torch.float64)
    inputs = replace(inputs, current_logprobs=(inputs.proximal_logprobs + gaps).requires_grad_())
    metrics = GspoWithClipRate(clip_low=0.1, clip_high=0.1)(inputs).metrics
    assert metrics[CLIP_RATE].item() == 6
    mask = torch.ones(8, dtype=torch.bool)
    mask[7] = False
    metrics = GspoWithClipRate(clip_low=0.1, clip_high=0.1)(replace(inputs, loss_mask=mask)).metrics
    assert metrics[CLIP_RATE].item() == 5


def test_the_objective_of_the_ablation_is_gspo():
    inputs = packed_inputs(4, kept=0.8)
    found = {}
    for objective in (Gspo(), GspoWithClipRate()):
        current = inputs.current_logprobs.detach().clone().requires_grad_()
        outputs = objective(replace(inputs, current_logprobs=current))
        outputs.loss.backward()
        found[type(objective)] = outputs.loss.detach(), current.grad, outputs.metrics
    (loss, grad, metrics), (own_loss, own_grad, own_metrics) = found.values()
    assert loss == own_loss
    assert torch.equal(grad, own_grad)
    assert metrics == {name: value for name, value in own_metrics.items() if name != CLIP_RATE}
    assert own_metrics[CLIP_RATE] > 0


# What a run leaves behind


def write_run(folder: Path) -> None:
    (folder / "producers").mkdir(parents=True)
    line = (
        '{{"update": {0}, "policy_version": {0}, "time_s": {0}.5, "reward": 0.{0}, "ratio_mean": 1.002, '
        '"rollout_correction/training_log_ppl": 0.25, "lag_histogram": {{"0": 3, "1": 1}}, "num_tokens_trained": 4, '
        '"num_tokens_masked_lag": 0, "num_groups_trained": 2, "num_groups_skipped": 0}}\n'
    )
    (folder / "updates.jsonl").write_text("".join(line.format(number) for number in (1, 2, 3)))
    (folder / "evaluations.jsonl").write_text(
        '{"policy_version": 3, "update": 3, "reward": 0.5, "reward/exact": 0.75, "num_prompts": 4, "time_s": 4}\n'
    )
    load = '{{"event": "weights", "time_s": {}, "policy_version": {}, "pause_s": 0.01}}\n'
    loads = {"producer-0": ((0.1, 0), (1.7, 1), (2.6, 2)), "producer-1": ((2.0, 1), (3.6, 3))}
    for producer, times in loads.items():
        (folder / "producers" / f"{producer}.jsonl").write_text("".join(load.format(*load_) for load_ in times))


def test_an_engines_lag_is_the_announced_version_minus_the_one_it_holds(tmp_path: Path, plan: AblationPlan):
    write_run(tmp_path / "run")
    found = AblationResult.of_run(AblationCell(arm="base", seed=1), {}, read_telemetry(tmp_path / "run"))
    # At 1.5, 2.5 and 3.5 s versions 1, 2 and 3 have been announced.
    assert found.engine_lag == {"producer-0": [1, 1, 1], "producer-1": [None, 1, 2]}
    assert found.mean_engine_lag == pytest.approx(6 / 5)
    assert found.tokens_by_lag == {0: 9, 1: 3}
    assert found.curves["reward"] == [0.1, 0.2, 0.3]
    assert found.curves["token_lag"] == [0.25] * 3
    assert found.curves["kl_new_old"] == [None] * 3
    assert found.ratio_deviation == pytest.approx([20.0] * 3)
    assert found.current_logprobs == pytest.approx([-0.25] * 3)
    assert found.accuracy == [(3, 0.75)]


# Distances


def test_an_arm_that_trains_as_the_reference_is_no_farther_away_than_its_seeds(plan: AblationPlan):
    results = [
        *all_results(plan),
        result(plan, AblationCell(arm="other", seed=2)),
        result(plan, AblationCell(arm="other", seed=3)),
    ]
    for measure in MEASURES:
        found = distance(results, "other", "base", measure.curve)
        assert sorted(found.of_seeds) == pytest.approx(found.of_reference)
        assert found.ratio == pytest.approx(1.0)
        assert not found.stands_out


def test_the_distance_is_the_gap_to_the_mean_of_the_other_seeds(plan: AblationPlan):
    results = all_results(plan, shift=0.5)
    found = distance(results, "other", "base", lambda r: r.curve("reward"))
    # Seeds 2 and 3 are .03 above seed 1 on average; noise of .01 in the smoothed curves averages out.
    assert found.of_seeds[0] == pytest.approx(0.47, abs=0.01)
    assert found.of_reference == pytest.approx((0.0, 0.03, 0.03), abs=0.012)
    assert found.ratio == pytest.approx(found.of_seeds[0] / fmean(found.of_reference))
    assert not found.stands_out, "one seed may be far away by chance"
    second = result(plan, AblationCell(arm="other", seed=2), shift=0.5)
    assert distance([*results, second], "other", "base", lambda r: r.curve("reward")).stands_out


def test_where_the_reference_does_not_move_at_all_any_distance_stands_out(plan: AblationPlan):
    still = [
        msgspec.structs.replace(each, curves=dict.fromkeys(each.curves, [0.0] * NUM_UPDATES))
        if each.cell.arm == "base"
        else each
        for each in [*all_results(plan), result(plan, AblationCell(arm="other", seed=2))]
    ]
    found = distance(still, "other", "base", lambda r: r.curve("reward"))
    assert found.ratio == math.inf and found.stands_out
    assert "> 1,000x" in render(plan, still)
    same = [msgspec.structs.replace(each, curves=dict.fromkeys(each.curves, [0.0] * NUM_UPDATES)) for each in still]
    found = distance(same, "other", "base", lambda r: r.curve("reward"))
    assert found.ratio == 1.0 and not found.stands_out


def test_without_a_second_seed_of_the_reference_nothing_stands_out(plan: AblationPlan):
    results = [
        result(plan, AblationCell(arm="base", seed=1)),
        result(plan, AblationCell(arm="other", seed=1), shift=0.5),
    ]
    found = distance(results, "other", "base", lambda r: r.curve("reward"))
    assert found.of_seeds == pytest.approx((0.5,))
    assert found.of_reference == ()
    assert not found.stands_out


# Running cells


def test_a_cell_whose_run_fails_says_why(plan: AblationPlan, tmp_path: Path):
    with pytest.raises(CellFailedError) as failure:
        run_cell(plan, AblationCell(arm="other", seed=1), tmp_path / "runs", gpu=False)
    assert "cell other-seed1: `penstock run` ended with status 2" in str(failure.value)
    assert "model.path = 'nothing-here': no such folder" in str(failure.value)


def test_a_cell_that_is_running_is_left_alone(tmp_path: Path):
    folder = tmp_path / "base-seed1"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another"):
            remove_run(folder)
    assert folder.exists()
    remove_run(folder)
    assert not folder.exists()


def test_a_folder_that_is_no_runs_is_never_removed(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no folder of a run"):
        remove_run(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_finished_cell_of_other_settings_is_not_finished(plan: AblationPlan, plan_file: Path):
    for each in all_results(plan):
        write_result(each, plan.results)
    plan_file.write_text(SHORT.replace("2e-5", "3e-5"))
    changed = Ablation.load(plan_file, Path("runs"))
    finished = {cell.name: changed.is_finished(cell, gpu=False) for cell in changed.cells(gpu=False)}
    assert finished == {"base-seed1": True, "other-seed1": False, "base-seed2": True, "base-seed3": True}


@pytest.mark.parametrize(
    ("addition", "is_finished"),
    [
        ("goal = { value = 0.5 }\n[checkpoint]\nevery = 7\n[correction]\nthreshold = 3.0\n", True),
        ("[sampling]\ntemperature = 0.5\n", False),
    ],
)
def test_only_what_a_cell_depends_on_makes_its_result_stale(plan_file: Path, addition: str, is_finished: bool):
    plan_file.write_text(SHORT.replace("num_updates=3", "correction={mode='none'}"))
    run_file = plan_file.parent / "run.toml"
    run_file.write_text(f"{RUN}[evaluation]\nevery = 5\n")
    plan = load_plan(plan_file)
    for each in all_results(plan):
        write_result(each, plan.results)
    run_file.write_text(run_file.read_text() + addition)
    cells = plan.cells(gpu=False)
    assert {Ablation(plan, Path("runs")).is_finished(cell, gpu=False) for cell in cells} == {is_finished}


@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cell_is_a_real_run_with_the_arms_settings(tmp_path: Path, plan_file: Path):
    model = tmp_path / "model"
    # A random model is rewarded for hardly anything else; without variance no update would train.
    (tmp_path / "by_parity.py").write_text(
        "def score(prompt, completion):\n    return float(sum(map(ord, completion)) % 2)\n"
    )
    make_model(model, ModelRecipe(train=False, hidden_size=64, num_heads=2, num_kv_heads=1), progress=lambda _: None)
    (plan_file.parent / "run.toml").write_text(RUN.replace("nothing-here", str(model)))
    common = (
        "num_updates=3", "groups_per_batch=4", "group_size=4", "producers.count=1", 'model.dtype="bfloat16"',
        'objective.path="bench.ablation.objective:GspoWithClipRate"', 'correction={mode="none", bypass=true}',
        "environment.kwargs={width=1, num_evaluation_prompts=4}", 'reward={path="by_parity:score"}',
        "sampling.temperature=0.8",
        "sampling.max_tokens=4", 'parity.gate="off"', "max_lag=1", "engine.kv_cache_gib=0.25",
    )  # fmt: skip
    plan_file.write_text(
        SHORT.replace('set = ["num_updates=3"]', f"set = {list(common)!r}").replace(
            '"trainer.learning_rate=2e-5"',
            '\'engine={logprobs_mode="raw_logprobs", head_dtype="model", update="drained", '
            "args={enforce_eager=true}}'",
        )
    )
    folders = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = start_run(
        RUN_A_CELL, [str(plan_file)], os.environ | {"PYTHONPATH": os.pathsep.join(folders)}, tmp_path / "output"
    )
    assert process.wait(390) == 0, (tmp_path / "output").read_text()
    found = read_result(AblationCell(arm="other", seed=1), tmp_path, AblationResult)
    assert found is not None
    assert len(found.curves["reward"]) == 3
    assert (tmp_path / "output").read_text().splitlines()[-1] == "update 3"
    assert set(found.engine_lag) == {"producer-0"}
    run = read_telemetry(tmp_path / "runs" / "other-seed1")
    [started] = [event for event in run.producers["producer-0"] if hasattr(event, "fingerprint")]
    assert started.fingerprint.logprobs_mode == "raw_logprobs"
    assert started.fingerprint.head_dtype == "bfloat16"
    assert started.fingerprint.other["engine.update"] == '"drained"'
    assert "engine.cache_salt" not in started.fingerprint.other
    # A flat distribution made sharper by T = 0.8: the engine's raw logprobs are not the trainer's.
    assert found.overall("mismatch_lag0") > 0.02
    assert found.ratio_deviation.mean() != pytest.approx(0, abs=50)


# The page and its figures


def test_figures_and_page_show_every_arm_and_say_what_was_not_run(plan_file: Path, plan: AblationPlan):
    for each in all_results(plan):
        write_result(each, plan.results)
    assert main([str(plan_file), "--present"]) == 0
    page = plan.page.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    [gpu_row] = [line for line in page.splitlines() if line.startswith("| on a GPU") and "| 0 |" in line]
    assert gpu_row.count(NOT_RUN) == len(MEASURES)
    texts = {}
    for name, file in figure_files(plan).items():
        texts[name] = " ".join(ElementTree.fromstring(file.read_text()).itertext())
    for name in ("clamp_log_ratio_new_old_indicator", "kl_new_old", "entropy", "reward"):
        assert name in texts["metrics"]
    assert all(name in texts["lag"] for name in ("the reference", "another", "producer-0", "producer-1"))
    assert "on a GPU" not in texts["final-reward"]
    assert "the reference (3 seeds)" in texts["final-reward"]


def test_cells_of_two_devices_are_not_compared(plan: AblationPlan, plan_file: Path, capsys: pytest.CaptureFixture[str]):
    for each in all_results(plan):
        write_result(each, plan.results)
    write_result(result(plan, AblationCell(arm="other", seed=1), gpu=True), plan.results)
    assert main([str(plan_file), "--present"]) == 2
    assert "cells of a cpu and of a gpu cannot be compared" in capsys.readouterr().err


def test_a_file_that_is_no_ablation_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(plan_file.parent / "run.toml")]) == 2
    assert "unknown field, expected one of name, run_file, results" in capsys.readouterr().err


def test_a_run_file_that_is_not_there_is_named(plan_file: Path, capsys: pytest.CaptureFixture[str]):
    plan_file.write_text(SHORT.replace("run.toml", "gone.toml"))
    assert main([str(plan_file)]) == 2
    assert "run_file = 'gone.toml': no such file in" in capsys.readouterr().err


def test_what_stands_out_is_bold_and_named(plan: AblationPlan):
    text = render(plan, [*all_results(plan, shift=0.5), result(plan, AblationCell(arm="other", seed=2), shift=0.5)])
    [row] = [line for line in text.splitlines() if line.startswith("| another | 2 |")]
    assert row.count("**") == 2 * len(MEASURES)
    assert "- *another* lies beyond the reference's seeds in `clamp_log_ratio_new_old_indicator`" in text
    text = render(plan, all_results(plan))
    [row] = [line for line in text.splitlines() if line.startswith("| another | 1 |")]
    assert "**" not in row
    assert "- *another* cannot be told from another seed of the reference." in text


# What is checked in


@ALL_FILES
def test_the_checked_in_results_are_of_the_ablations_settings(file: Path):
    plan = load_plan(file)
    for cell in plan.cells(gpu=False):
        found = read_result(cell, plan.results, AblationResult)
        assert found is not None, f"{cell.name} has no result"
        device = found.settings["device"]
        assert found.settings == plan.settings(cell, gpu=device == "gpu"), cell.name
        assert found.num_steps_skipped == 0


@ALL_FILES
def test_the_pages_tables_are_those_of_the_checked_in_results(file: Path):
    plan = load_plan(file)
    assert render(plan, Ablation(plan, Path("runs")).finished()) in plan.page.read_text()


def test_the_pages_figures_are_there():
    plan = load_plan(FILE)
    text = plan.page.read_text()
    assert {f"]({file.name})" in text for file in figure_files(plan).values()} == {True}
    for name in re.findall(r"\]\((ablation[a-z-]*\.svg)\)", text):
        assert (plan.page.parent / name).is_file()
