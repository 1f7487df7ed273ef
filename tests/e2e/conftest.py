"""Two runs of the demo shared by the tests of views and files: one observed during training and afterwards, one killed
and resumed."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo_run import DemoRun
from monitored_run import GROUPS_PER_BATCH, PACED, MonitoredRun
from penstock.schemas.config import DEFAULT_OBJECTIVE
from waiting import wait_for

NUM_UPDATES = 40


@pytest.fixture(scope="session")
def live_run(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredRun]:
    """A recorded run of the demo that trains until a test asks for its end, scraped by Prometheus throughout.

    It has a term for a reference model, which some panels need. Its batches are small and its rewards slow, as a
    judge's are: at its own pace it would occupy all processors.
    """
    settings = {"objective.path": DEFAULT_OBJECTIVE, "objective.kwargs.kl_coefficient": 0.001}
    settings |= {"environment.path": "paced:Paced", "groups_per_batch": GROUPS_PER_BATCH}
    settings |= {"model.path": demo_model, "num_updates": 5000, "record": "true", "metrics.port": 0}
    run = MonitoredRun(tmp_path_factory.mktemp("live"), "live", **settings, **{"evaluation.num_prompts": 16})
    (run.project / "paced.py").write_text(PACED)
    try:
        run.begin()
        run.wait_for_update(25)
        yield run
    finally:
        run.close()


@pytest.fixture(scope="session")
def ended_run(live_run: MonitoredRun) -> MonitoredRun:
    """The live run after its end, which its tests precede: its connections to Redis are cut once, then a signal stops
    it."""
    live_run.cut_and_stop()
    return live_run


@pytest.fixture(scope="session")
def resumed_run(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoRun]:
    """A recorded run of the demo with one producer, killed after a checkpoint and resumed from Python to
    its end."""
    settings = {"model.path": demo_model, "num_updates": NUM_UPDATES, "checkpoint.every": 20, "record": "true"}
    settings |= {"metrics.port": 0, "producers.count": 1}
    run = DemoRun(tmp_path_factory.mktemp("resumed"), "resumed", **settings)
    try:
        run.start(fresh=True)
        run.wait_for_update(10)
        trainer, producer = run.metrics("trainer"), run.metrics("producer-0")
        for name in ("penstock_token_lag_steps_bucket", "penstock_ess_fraction", "penstock_rollout_correction_kl"):
            assert name in trainer
        for name in ("penstock_tokens_generated_total", "penstock_weight_pause_seconds_bucket"):
            assert name in producer
        run.fresh_lines = {name: run.log_lines(name) for name in ("trainer", "producer-0")}
        run.wait_for_update(23)  # between two checkpoints
        run.signal(signal.SIGKILL)
        run.wait()
        wait_for(run.living, lambda pids: pids == [], timeout_s=120)
        run.resume_from_python()
        assert run.wait() == 0, run.output()
        assert run.living() == []
        yield run
    finally:
        run.stop()
