"""The gate in a trainer that really computes: a producer that invents its logprobs trains nobody."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.consumers.__main__ as entry
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.parity.gate import Gate
from penstock.consumers.parity.tolerance import Tolerance
from penstock.schemas.keys import Commit
from penstock.schemas.policy import make_version
from trainer_bench import TrainerBench
from training_groups import tiny_model

pytestmark = pytest.mark.redis


@pytest.fixture
def invented(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerBench]:
    """A run with a real learner, and a producer that reports the same logprobs whatever the model."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    tiny_model(tmp_path / "model")
    bench = TrainerBench(redis_url, tmp_path)
    bench.overrides = [f"model.path={tmp_path / 'model'}", "trainer.device=cpu", "num_updates=2"]
    yield bench
    bench.close()


def train(bench: TrainerBench, gate: str, *, resume: bool = False) -> int:
    bench.overrides.append(f"parity.gate={gate}")
    producer = bench.producer()
    try:
        return entry.main(bench.config, runs=bench.runs, resume=resume)
    finally:
        producer.stop.set()


def test_a_mismatch_ends_the_trainer_with_status_1_and_nothing_trained_also_when_it_is_resumed(
    invented, redis_client, caplog
):
    for resume in (False, True):  # the engine's rollouts are still on the stream, sampled by the trainer's weights
        assert train(invented, "refuse", resume=resume) == 1
        assert "the parity gate refuses to train" in caplog.records[-1].getMessage()
        report = json.loads((invented.folder / "parity.json").read_text())
        assert (report["verdict"]["status"], report["gate"]) == ("mismatch", "refuse")
        assert invented.lines("updates.jsonl") == []
        commit = redis_client.hgetall(invented.keys.commit)
        assert Commit.CHECKPOINT not in commit and Commit.FINISHED not in commit
        assert int(commit[Commit.VERSION]) == make_version(int(resume), 0)
        (invented.folder / "parity.json").unlink()


def test_a_warning_trains_and_raises_the_alert(invented, caplog, monkeypatch):
    metrics = TrainerMetrics()
    monkeypatch.setattr(entry, "TrainerMetrics", lambda **labels: metrics)
    assert train(invented, "warn") == 0
    assert "engine and trainer disagree, trained all the same" in caplog.text
    assert caplog.text.count("parity alert:") == 1
    assert metrics.registry.get_sample_value("penstock_trainer_parity_alert") == 1
    assert len(invented.lines("updates.jsonl")) == 2


def test_alert_and_producers_are_judged_by_the_tolerance_that_the_first_batch_gave(invented, monkeypatch):
    def sound(gate, groups, model, version, lag_of):
        gate.is_pending = False
        gate._on_measured(Tolerance(mean=3e-5, p99=1.0, max=1.0))

    monkeypatch.setattr(Gate, "check", sound)
    invented.overrides.append("parity.gate=refuse")
    trainer = invented.trainer()
    assert trainer.run_log.alert.band == trainer.producers.band == 1e-5
    producer = invented.producer()
    try:
        assert trainer.run()
    finally:
        producer.stop.set()
    assert trainer.run_log.alert.band == trainer.producers.band == 3e-5
    assert {line["mismatch_lag0_band"] for line in invented.lines("updates.jsonl")} == {3e-5}


def test_a_gate_that_is_off_trains_without_a_word_before(invented, caplog):
    assert train(invented, "off") == 0
    assert not (invented.folder / "parity.json").exists()
    assert len(invented.lines("updates.jsonl")) == 2
