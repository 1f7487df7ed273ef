import re
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.experiments.experiment import write_result
from bench.experiments.page import markers
from bench.study.cells import METHODS, NUM_UPDATES, RUN_FILE, StudyCell, StudyResult, grid
from bench.study.experiment import PAGE, Study
from bench.study.figures import draw_curves
from bench.study.loop import StudyPolicies, StudyRecorder, run_cell
from bench.study.page import beaten, render
from bench.study.pictures import LOG_RATIOS, SCHEDULES, trust_curve, weight_curve
from bench.study.sampler import StudySampler
from penstock.consumers.learning.interfaces import Objective, check_objective
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.packing import pack
from penstock.deploy.demo.make_model import ModelRecipe, make_model
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import ConfigError, CorrectionConfig, RunConfig, load_config
from penstock.schemas.process.plugins import construct
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, unpack_floats, unpack_ids
from training_groups import proximal_logprobs

STUDY = Study(Path("runs"))
RANDOM = ModelRecipe(train=False, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1)
CELL = StudyCell(pace="fast", lag=2, method="truncate-power", seed=1)
SNIPPETS = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
REFUSED = "# refused: "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model where the study looks for that of seed 1: it writes digits, and often wrong ones."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "demo", RANDOM, progress=lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(folder / "demo")
    model = AutoModelForCausalLM.from_pretrained(folder / "demo")
    environment = Arithmetic(seed=0, width=1, num_evaluation_prompts=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(40):
        prompts = [environment.prompt(1 + 16 * step + n) for n in range(16)]
        token_ids = tokenizer(
            [f"{prompt.text}{prompt.answer}<eos>" for prompt in prompts], return_tensors="pt"
        ).input_ids
        logits = model(input_ids=token_ids[:, :-1]).logits[:, -3:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, -3:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "demo")
    return folder


@pytest.fixture
def sampler(models: Path) -> StudySampler:
    return StudySampler(str(models / "demo"), stop_token(models))


def stop_token(models: Path) -> int:
    return AutoTokenizer.from_pretrained(models / "demo").eos_token_id


def config(models: Path, cell: StudyCell = CELL, num_updates: int = 5) -> RunConfig:
    """The cell's, but small."""
    whole = cell.config(models, num_updates)
    environment = msgspec.structs.replace(whole.environment, kwargs={"width": 1, "num_evaluation_prompts": 4})
    return msgspec.structs.replace(whole, environment=environment, groups_per_batch=8, group_size=8)


def recorder(models: Path, sampler: StudySampler) -> StudyRecorder:
    settings = config(models)
    environment = Arithmetic(seed=1, **settings.environment.kwargs)
    return StudyRecorder(settings, environment, AutoTokenizer.from_pretrained(models / "demo"), sampler)


def segments(groups: list[RolloutGroup]):
    return [segment for group in groups for rollout in group.rollouts for segment in rollout.segments]


# The engine and the records


def test_the_samplers_logprobs_are_the_trainers_on_equal_weights(models: Path, sampler: StudySampler):
    groups = recorder(models, sampler).groups(range(1, 9), version=0, seed=3)
    learner = Learner(config(models))
    batch = pack(groups, lambda version: 0, config(models))
    found = torch.cat(proximal_logprobs(learner, batch))
    recorded = torch.cat([microbatch.behavior_logprobs for microbatch in batch.microbatches])
    assert len(found) > 20
    assert torch.allclose(found, recorded, rtol=0, atol=2e-5)


def test_tokens_are_drawn_in_proportion_to_their_probability(sampler: StudySampler):
    settings = SamplingSettings(max_tokens=1)
    [completions] = sampler.sample([[5, 6, 7]], 20000, settings, seed=0)
    token_ids = torch.tensor([completion.token_ids[0] for completion in completions])
    logits = sampler.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    expected = torch.softmax(logits.detach(), -1)
    observed = torch.bincount(token_ids, minlength=len(expected)) / len(token_ids)
    # Six standard deviations of the largest share.
    assert (observed - expected).abs().max() < 6 * (0.25 / len(token_ids)) ** 0.5
    assert (observed - expected).abs().sum() < 0.1


def test_a_colder_sampler_records_the_colder_distribution(sampler: StudySampler):
    def spread(temperature: float) -> float:
        [completions] = sampler.sample([[5, 6, 7]], 500, SamplingSettings(max_tokens=1, temperature=temperature), 0)
        return len({completion.token_ids[0] for completion in completions})

    assert spread(0.05) < spread(1.0)
    [[cold]] = sampler.sample([[5, 6, 7]], 1, SamplingSettings(max_tokens=1, temperature=0.5), 0)
    logits = sampler.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
    expected = torch.log_softmax(logits / 0.5, -1)[cold.token_ids[0]].item()
    assert cold.behavior_logprobs[0] == pytest.approx(expected, abs=1e-6)  # as exact as logits from 8 to 16 are


def test_greedy_takes_the_likeliest_token_and_ends_at_the_stop_token(models: Path):
    greedy = SamplingSettings(max_tokens=6, temperature=0.0)
    endless = StudySampler(str(models / "demo"), stop_token_id=-1)
    [[whole]] = endless.sample([[5, 6, 7]], 1, greedy, seed=0)
    logits = endless.model(input_ids=torch.tensor([[5, 6, 7, *whole.token_ids[:-1]]])).logits[0, 2:].detach()
    assert whole.token_ids == logits.argmax(-1).tolist()
    assert whole.behavior_logprobs == pytest.approx(torch.log_softmax(logits, -1).max(-1).values.tolist(), abs=1e-5)
    assert whole.finish_reason == "length"

    stop = whole.token_ids[2]
    [[stopped]] = StudySampler(str(models / "demo"), stop).sample([[5, 6, 7]], 1, greedy, seed=1)
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert len(stopped.behavior_logprobs) == len(stopped.token_ids)
    assert stopped.finish_reason == "stop"


def test_prompts_of_different_lengths_are_refused(sampler: StudySampler):
    with pytest.raises(ValueError, match=r"prompts have \[2, 3\] tokens"):
        sampler.sample([[5, 6], [5, 6, 7]], 1, SamplingSettings(), 0)


def test_a_truncated_distribution_is_refused(sampler: StudySampler):
    with pytest.raises(ValueError, match=r"top_k 5, top_p 1.0: expected 0 and 1.0"):
        sampler.sample([[5, 6]], 1, SamplingSettings(top_k=5), 0)


def test_every_record_says_which_policy_sampled_each_of_its_tokens(models: Path, sampler: StudySampler):
    for segment in segments(recorder(models, sampler).groups([1, 2], version=7, seed=3)):
        [(start, end)] = segment.loss_mask
        assert [(span.version, span.start, span.end) for span in segment.version_spans] == [(7, start, end)]
        assert end == len(unpack_ids(segment.token_ids))
        assert max(unpack_floats(segment.behavior_logprobs)) < 0


def test_rewards_are_the_environments_own(models: Path, sampler: StudySampler):
    tokenizer = AutoTokenizer.from_pretrained(models / "demo")
    environment = Arithmetic(seed=1, **config(models).environment.kwargs)
    for group in recorder(models, sampler).groups([1, 2, 3], version=0, seed=3):
        assert group.prompt == environment.prompt(group.index)
        for rollout in group.rollouts:
            [segment] = rollout.segments
            ids = unpack_ids(segment.token_ids)[segment.loss_mask[0][0] :]
            assert rollout.reward == environment.reward(
                group.prompt, tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            )


# The loop


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_the_sampling_policy_is_exactly_so_many_steps_old(lag: int):
    policies = StudyPolicies({"w": torch.tensor(0)}, lag)
    for step in range(1, 10):
        version, weights = policies.sampling
        assert version == weights["w"].item() == max(0, step - 1 - lag)
        policies.publish(step, {"w": torch.tensor(step)})
        assert policies.current[0] == step


def test_a_cell_trains_at_its_forced_lag(models: Path):
    result = run_cell(CELL, config(models, num_updates=6))
    assert result.skipped == {}
    assert result.curves["lag"] == [0, 1, 2, 2, 2, 2]
    assert [update for update, _ in result.accuracy] == [0, 6]
    assert result.curves["ess_fraction"][0] == pytest.approx(1, abs=1e-6)
    # Ten times the demo's learning rate: two steps are seen.
    assert result.curves["ess_fraction"][-1] < 1 - 1e-6
    assert all(len(values) == 6 for values in result.curves.values())


def test_the_learner_is_told_the_lag_that_was_forced(models: Path, monkeypatch: pytest.MonkeyPatch):
    histograms = []
    step = Learner.step

    def spy(self, batch):
        histograms.append(set(batch.lag_histogram))
        return step(self, batch)

    monkeypatch.setattr(Learner, "step", spy)
    run_cell(CELL, config(models, num_updates=5))
    assert histograms == [{0}, {1}, {2}, {2}, {2}]


def test_a_cell_run_twice_gives_the_same_bits(models: Path):
    first, second = (run_cell(CELL, config(models)) for _ in range(2))
    assert first.curves == second.curves
    assert first.accuracy == second.accuracy


def test_cells_of_one_seed_start_from_the_same_data_and_part_with_their_policies(models: Path):
    other = msgspec.structs.replace(CELL, method="none")
    first, second = run_cell(CELL, config(models)), run_cell(other, config(models, other))
    assert first.curves["reward"][:3] == second.curves["reward"][:3]
    assert first.curves["grad_norm"] != second.curves["grad_norm"]


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_every_method_of_the_study_trains(models: Path, method: str):
    cell = msgspec.structs.replace(CELL, method=method)
    result = run_cell(cell, config(models, cell, num_updates=4))
    assert result.skipped == {}
    assert result.curves["grad_norm"][-1] > 0


def test_the_grid_has_every_method_at_every_lag_and_three_seeds_where_they_are_compared():
    cells = grid()
    assert len(set(cells)) == len(cells) == len({cell.name for cell in cells})
    for pace in ("demo", "fast"):
        for lag in (1, 4, 16):
            found = {cell.method for cell in cells if (cell.pace, cell.lag, cell.seed) == (pace, lag, 1)}
            assert found == {method.name for method in METHODS}
    for method in METHODS:
        seeds = {cell.seed for cell in cells if (cell.pace, cell.lag, cell.method) == ("fast", 16, method.name)}
        assert seeds == {1, 2, 3}


def test_cells_differ_in_what_they_compare_alone(models: Path):
    """The same data budget: groups, siblings and updates."""
    budgets = {
        (c.num_updates, c.groups_per_batch, c.group_size, c.max_lag >= cell.lag)
        for cell in grid()
        for c in [cell.config(models)]
    }
    assert budgets == {(NUM_UPDATES, 32, 8, True)}


def test_a_study_of_other_settings_is_not_finished(models: Path, tmp_path: Path):
    short, longer = (Study(models.parent, results=tmp_path, num_updates=number) for number in (2, 3))
    [cell] = [cell for cell in short.cells(gpu=False) if cell.name == "fast-lag16-gspo-seed2"]
    settings = short.settings(cell, gpu=False)
    write_result(msgspec.structs.replace(run_cell(CELL, config(models)), cell=cell, settings=settings), tmp_path)
    assert short.is_finished(cell, gpu=False)
    assert not longer.is_finished(cell, gpu=False)
    assert [result.cell for result in short.finished()] == [cell]


# The page and its pictures


def checked_in() -> list[StudyResult]:
    found = STUDY.finished()
    assert len(found) == len(grid()), "run `make study`: some cells have no result of their settings"
    return found


def test_the_pages_tables_are_those_of_the_checked_in_results():
    begin, end = markers("study")
    assert PAGE.read_text().partition(begin)[2].partition(end)[0].strip() == render(checked_in()).strip()


def test_the_checked_in_results_are_of_the_studys_length_and_lag():
    for result in checked_in():
        assert len(result.curves["reward"]) == NUM_UPDATES
        assert max(result.curves["lag"]) == result.cell.lag


def test_a_method_is_above_another_only_where_every_seed_says_so():
    def results(**accuracies: list[float]) -> dict[StudyCell, StudyResult]:
        cells = [msgspec.structs.replace(CELL, lag=16, method=m.name, seed=s) for m in METHODS for s in (1, 2, 3)]
        found = {}
        for cell in cells:
            value = accuracies.get(cell.method.replace("-", "_"), [0.5] * 3)[cell.seed - 1]
            curve = [(0, 0.0), (10, value)]
            found[cell] = StudyResult(
                cell=cell, date="", packages={}, settings={}, curves={}, accuracy=curve, skipped={}
            )
        return found

    found = results(none=[0.1, 0.2, 0.3], gspo=[0.9, 0.9, 0.4])
    assert beaten(found, "truncate-const") == ["1"]
    assert beaten(found, "gspo") == ["1"]
    assert beaten(found, "none") == []


def test_what_the_page_concludes_is_what_every_seed_says():
    """The sentences of "In short", and one on speed: a new run of the study that says otherwise fails here."""
    found = {result.cell: result for result in checked_in()}
    numbers = {method.name: str(n) for n, method in enumerate(METHODS, 1)}
    above = {method.name: set(beaten(found, method.name)) for method in METHODS}
    weights = {numbers[name] for name in ("truncate-const", "truncate-power", "mask-power")}
    assert all(numbers["none"] in above[method.name] for method in METHODS[1:])
    assert weights <= above["gspo-wide"] & above["grpo-bypass"]
    assert numbers["truncate-power"] in above["truncate-const"]
    assert numbers["gspo"] in above["gspo-wide"]

    def at_the_end(method: str) -> float:
        cells = [msgspec.structs.replace(CELL, lag=16, method=method, seed=seed) for seed in (1, 2, 3)]
        return fmean(found[cell].last_accuracy for cell in cells)

    assert at_the_end("gspo") > at_the_end("gspo-wide")


def test_the_pages_pictures_and_links_are_there():
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text())
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://") or (PAGE.parent / target).exists(), target
        if target.endswith(".svg"):
            assert ElementTree.parse(PAGE.parent / target).getroot().tag.endswith("svg")


def test_the_studys_figures_show_every_method_and_every_lag(tmp_path: Path):
    files = {file.name: file.read_text() for file in draw_curves(checked_in(), tmp_path)}
    assert set(files) == {"corrections-learning-demo.svg", "corrections-learning-fast.svg", "corrections-ess.svg"}
    for pace in ("demo", "fast"):
        for text in [*(method.label for method in METHODS), "lag 1<", "lag 4<", "lag 16", "held-out accuracy"]:
            assert text in files[f"corrections-learning-{pace}.svg"], text
    assert "lag 16, 3 seeds" in files["corrections-learning-fast.svg"]


def test_the_drawn_trust_is_that_of_the_formulas():
    by_label = {label: trust_curve(schedule, np.arange(17)) for label, schedule, _ in SCHEDULES}
    assert by_label["const"].tolist() == [2.0] * 17
    assert by_label["power, lag_power 0.5"][3] == pytest.approx(1.5)
    assert by_label["exponential, lag_decay 0.8"][2] == pytest.approx(1.64)
    assert np.isnan(by_label["max_lag, max_lag 8"]).tolist() == [False] * 9 + [True] * 8


def test_the_drawn_weights_are_those_of_the_correction():
    mask = CorrectionConfig("token_mask", schedule="power", lower=0.5)
    weights, ratio = weight_curve(mask, LOG_RATIOS, 16), np.exp(LOG_RATIOS)
    tau = 1 + 17**-0.5
    kept = (ratio <= tau) & (ratio >= 1 / tau)
    assert np.allclose(weights, np.where(kept, ratio, 0))
    assert 0 < kept.mean() < 1


def snippet_config(snippet: str, tmp_path: Path) -> RunConfig:
    """The demo's run file with the snippet's tables in place of its own."""
    document = tomllib.loads(RUN_FILE.read_text()) | tomllib.loads(snippet)
    file = tmp_path / "run.toml"
    file.write_bytes(tomli_w.dumps(document).encode())
    found = load_config(file)
    check_objective(found, construct(found.objective, "objective", Objective))
    return found


@pytest.mark.parametrize("snippet", [text for text in SNIPPETS if not text.startswith(REFUSED)])
def test_every_setting_on_the_page_loads(snippet: str, tmp_path: Path):
    assert is_within(tomllib.loads(snippet), msgspec.to_builtins(snippet_config(snippet, tmp_path)))


def is_within(table: dict[str, Any], whole: dict[str, Any]) -> bool:
    return all(
        is_within(value, whole[name]) if isinstance(value, dict) else whole[name] == value
        for name, value in table.items()
    )


@pytest.mark.parametrize("snippet", [text for text in SNIPPETS if text.startswith(REFUSED)])
def test_every_setting_that_the_page_calls_refused_is_refused_for_that_reason(snippet: str, tmp_path: Path):
    expected = snippet.splitlines()[0].removeprefix(REFUSED)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        snippet_config(snippet, tmp_path)


def test_the_page_has_settings_of_both_kinds():
    assert sum(text.startswith(REFUSED) for text in SNIPPETS) >= 3
    assert sum(not text.startswith(REFUSED) for text in SNIPPETS) >= 6
