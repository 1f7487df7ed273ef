"""The gate before the first optimizer step, and the alert that watches from then on."""

import itertools
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from parity_bench import ParityBench, groups_of, prompts, with_logprobs
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.gate import MAX_BATCHES, Alert, Gate, ParityRefusedError
from penstock.consumers.parity.loaded import LoadedChecks
from penstock.consumers.parity.tolerance import TOLERANCES, Yardstick
from penstock.schemas.config import ModelConfig, ParityConfig, RunConfig
from penstock.schemas.policy import make_version
from penstock.schemas.rollout import RolloutGroup, SamplingSettings
from rank_processes import on_ranks
from rank_work import check_gate
from training_groups import configuration

WARM = SamplingSettings(max_tokens=16)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def sound(bench: ParityBench) -> list[RolloutGroup]:
    """Groups of version 0."""
    return groups_of(bench.engine().generate(prompts(4, 5), 4, 10), WARM)


@pytest.fixture(scope="module")
def model(bench: ParityBench) -> PackedModel:
    return PackedModel(str(bench.folder), "float32", torch.device("cpu"))


def config_of(bench: ParityBench, gate: str = "refuse") -> RunConfig:
    return configuration(bench.folder, model=ModelConfig(path=str(bench.folder)), parity=ParityConfig(gate=gate))


def in_bfloat16(bench: ParityBench) -> RunConfig:
    return configuration(bench.folder, model=ModelConfig(path=str(bench.folder), dtype="bfloat16"))


def in_base_2(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    return with_logprobs(groups, lambda siblings: [[value / math.log(2) for value in own] for own in siblings])


def labelled(groups: Sequence[RolloutGroup], version: int) -> list[RolloutGroup]:
    def segment_of(segment):
        spans = tuple(msgspec.structs.replace(span, version=version) for span in segment.version_spans)
        return msgspec.structs.replace(segment, version_spans=spans)

    def rollout_of(rollout):
        return msgspec.structs.replace(rollout, segments=tuple(segment_of(each) for each in rollout.segments))

    return [msgspec.structs.replace(g, rollouts=tuple(rollout_of(each) for each in g.rollouts)) for g in groups]


def report_in(folder: Path) -> dict:
    return json.loads((folder / "parity.json").read_text())


AT_0 = LagTable(0, {}, {})


def open_gate(config: RunConfig, folder: Path, **calls) -> Gate:
    return Gate(config, folder, LoadedChecks(config), **calls)


def test_a_sound_batch_opens_the_gate_and_leaves_a_report(bench, model, sound, tmp_path):
    assert not open_gate(config_of(bench, "off"), tmp_path).is_pending
    gate = open_gate(config_of(bench), tmp_path)
    assert gate.is_pending
    gate.check(sound, model, 0, AT_0)
    assert not gate.is_pending
    report = report_in(tmp_path)
    assert (report["verdict"]["status"], report["gate"]) == ("parity", "refuse")
    assert report["num_tokens"] == 4 * 4 * 10


def test_a_mismatch_is_refused_with_what_is_wrong_and_the_model_is_left_as_it_is(bench, model, sound, tmp_path):
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    modes = [module.training for module in model.module.modules()]
    with pytest.raises(ParityRefusedError, match=r'parity.gate = "refuse"\): these are logarithms to base 2'):
        open_gate(config_of(bench), tmp_path).check(in_base_2(sound), model, 0, AT_0)
    assert report_in(tmp_path)["verdict"]["cause"] == "log2"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert [module.training for module in model.module.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_warning_lets_the_run_go_on(bench, model, sound, tmp_path, caplog):
    gate = open_gate(config_of(bench, "warn"), tmp_path)
    gate.check(in_base_2(sound), model, 0, AT_0)
    assert not gate.is_pending
    assert "engine and trainer disagree, trained all the same" in caplog.text and "base 2" in caplog.text
    assert report_in(tmp_path)["gate"] == "warn"


def one_off(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups with one rollout of the first far off."""
    first = with_logprobs(groups[:1], lambda siblings: [[b - 1.0 for b in siblings[0]], *siblings[1:]])
    return [*first, *groups[1:]]


def test_an_undecided_batch_is_trained_and_the_next_ones_add_their_evidence(bench, model, sound, tmp_path, caplog):
    """One rollout of 16 shows nothing, four of 64 do."""
    gate = open_gate(config_of(bench), tmp_path)
    for _ in range(3):
        gate.check(one_off(sound), model, 0, AT_0)
        assert gate.is_pending
    assert re.search(
        r"could not tell: .* has a mean 6\.\de-02, 1\.0e-05 is allowed, but over 160 tokens of 16 ro", caplog.text
    )
    with pytest.raises(ParityRefusedError, match=r"no hypothesis explains it: .*1\.0e-0\d is allowed"):
        for _ in range(MAX_BATCHES):
            gate.check(one_off(sound), model, 0, AT_0)
    assert report_in(tmp_path)["verdict"]["cause"] == "unexplained"


def test_a_gate_that_stays_undecided_lets_the_run_go_on_with_a_warning(bench, model, sound, tmp_path, caplog):
    gate = open_gate(config_of(bench), tmp_path)
    for batch in range(MAX_BATCHES):
        assert gate.is_pending
        gate.check(sound if batch else one_off(sound), model, 0, AT_0)
    assert not gate.is_pending and report_in(tmp_path)["verdict"]["cause"] == "undecided"
    assert f"parity: still undecided after {MAX_BATCHES} batches, the run goes on: could not tell" in caplog.text


def test_the_yardstick_is_measured_on_the_first_rows_whoever_sampled_them(bench, model, sound, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    measured = []
    gate = open_gate(config_of(bench), tmp_path, on_measured=measured.append)
    gate.check(labelled(sound, 1), model, 2, LagTable(2, {}, {}))
    gate.check(labelled(sound, 2), model, 2, LagTable(2, {}, {}))
    assert [each.mean for each in measured] == [1e-5], "a small model's is far below the least tolerance"
    assert caplog.text.count("parity: engine and trainer are compared on the first 4 groups") == 1
    yardstick = report_in(tmp_path)["yardstick"]
    assert 0 < yardstick["transformers"] < 1e-6 and 0 < yardstick["packed"] < 1e-6
    assert yardstick["num_tokens"] == 4 * 4 * 10


def test_the_gate_waits_for_tokens_of_the_trainer_s_present_weights(bench, model, sound, tmp_path, caplog):
    """Older ones say nothing of the present weights: the model in memory is the only one that it has."""
    caplog.set_level(logging.INFO)
    gate = open_gate(config_of(bench), tmp_path)
    at_2 = LagTable(2, {}, {})
    for _ in range(3):
        gate.check(in_base_2(labelled(sound, 1)), model, 2, at_2)
    assert gate.is_pending and caplog.text.count("no rollouts of the newest policy in this batch") == 1
    gate.check([*in_base_2(labelled(sound[:3], 1)), *labelled(sound[3:], 2)], model, 2, at_2)
    assert not gate.is_pending and report_in(tmp_path)["num_groups"] == 1


def test_after_a_resume_the_checkpoint_s_policy_stands_for_the_same_weights_and_unknown_ones_are_left_aside(
    bench, model, sound, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    gate, resumed = open_gate(config_of(bench), tmp_path), make_version(1, 0)
    gate.check(labelled(sound, 7), model, resumed, LagTable(resumed, {1: 7}, {0: 9}))
    assert not gate.is_pending and report_in(tmp_path)["versions"] == [resumed]
    gate, too_few = open_gate(config_of(bench), tmp_path), groups_of(bench.engine().generate(prompts(1, 5), 2, 3), WARM)
    gate.check(in_base_2(too_few), model, 0, AT_0)
    assert gate.is_pending and "could not tell" in caplog.text
    gate = open_gate(config_of(bench), tmp_path)
    gate.check([*labelled(in_base_2(sound[:1]), -1), *labelled(in_base_2(sound[1:2]), 5), *sound[2:]], model, 0, AT_0)
    assert not gate.is_pending and report_in(tmp_path)["num_groups"] == 2


def test_records_that_cannot_be_compared_are_refused_or_warned_of_while_the_gate_waits(
    bench, model, sound, tmp_path, caplog
):
    wordless = with_logprobs(sound, lambda siblings: [[0.0] * len(own) for own in siblings])
    with pytest.raises(ParityRefusedError, match="parity cannot be checked: every behavior_logprob is 0"):
        open_gate(config_of(bench), tmp_path).check(wordless, model, 0, AT_0)
    report = report_in(tmp_path)
    assert (report["verdict"]["status"], report["gate"], report["num_rollouts"]) == ("unclear", "refuse", 16)
    assert "every behavior_logprob is 0" in report["verdict"]["sentence"]
    gate = open_gate(config_of(bench, "warn"), tmp_path)
    for _ in range(2):
        gate.check(wordless, model, 0, AT_0)
    assert gate.is_pending
    assert caplog.text.count("parity: could not tell: every behavior_logprob is 0") == 1
    gate.check(sound, model, 0, AT_0)
    assert not gate.is_pending


def test_the_alert_warns_once_each_time_the_gap_leaves_its_band(bench, caplog):
    caplog.set_level(logging.INFO)
    alert = Alert(config_of(bench))
    states = [alert.is_raised]
    for value in (1e-6, math.nan, 2e-3, 3e-3, math.nan, *[1e-6] * 8, 5e-3):
        alert.watch({"mismatch_lag0": value})
        states.append(alert.is_raised)
    alert.watch({"reward": 1.0})
    assert alert.is_raised and [state for state, _ in itertools.groupby(states)] == [False, True, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "mean |engine - trainer| at lag 0 is 1.0e-03 nats, 1.0e-05 is allowed" in caplog.records[0].getMessage()


def test_the_alert_s_band_is_the_mean_that_is_allowed(bench):
    alert = Alert(config_of(bench))
    for value in (*[1e-6] * 7, 5e-5):  # a small batch that is a little off
        alert.watch({"mismatch_lag0": value})
        assert not alert.is_raised
    alert = Alert(in_bfloat16(bench))
    assert alert.band == TOLERANCES["bfloat16"].mean
    alert.judge_by(Yardstick(transformers=4e-2, packed=3e-2, num_tokens=99).tolerance("bfloat16"))
    for value, is_raised in ((7e-2, False), (0.1, True)):
        alert.watch({"mismatch_lag0": value})
        assert alert.is_raised == is_raised


@pytest.mark.xdist_group("ranks")
def test_two_ranks_measure_what_one_process_measures_and_refuse_what_it_refuses(bench, sound, tmp_path):
    batches = {"sound": sound, "wrong": in_base_2(sound)}
    folders = {size: tmp_path / str(size) for size in (1, 2)}
    said = {}
    for size, folder in folders.items():
        for name in batches:
            (folder / name).mkdir(parents=True)
        said[size] = on_ranks(size, check_gate, config_of(bench), batches, folder, folder=folder / "work")[0]
    assert said[1] == said[2]
    assert said[2]["sound"] == "" and "these are logarithms to base 2" in said[2]["wrong"]
    for name in batches:
        one, two = (report_in(folder / name) for folder in folders.values())
        assert one["verdict"]["status"] == two["verdict"]["status"]
        assert one["num_tokens"] == two["num_tokens"]
        for mine, theirs in zip(one["hypotheses"], two["hypotheses"], strict=True):
            assert mine["name"] == theirs["name"]
            assert theirs["gap"] == pytest.approx(mine["gap"], rel=1e-5, abs=1e-5)
