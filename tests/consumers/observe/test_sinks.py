"""TensorBoard, Weights & Biases, trackio and MLflow, by what their own packages read back, and sinks that fail."""

import importlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock.consumers.__main__ as entry
from fake_wandb import FakeServer, Settings
from inspected_run import byte_tokenizer
from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.observe.sinks import feeding, in_own_process, tensorboard
from penstock.consumers.observe.sinks.feeding import Sinks, check_sinks
from penstock.consumers.observe.sinks.points import SinkPoint, numbers_of
from penstock.consumers.observe.sinks.weights_and_biases import WeightsAndBiases
from penstock.schemas.config import (
    ConfigError,
    EnvironmentConfig,
    MetricsConfig,
    MlflowConfig,
    ModelConfig,
    RunConfig,
    TrackioConfig,
    WandbConfig,
)
from scripted_learner import KilledError
from waiting import wait_for

WANDB = WandbConfig(project="lab")
TRACKIO = TrackioConfig(project="lab")
MLFLOW = MlflowConfig(experiment="lab")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def errors() -> list[str]:
    return []


def run_config(**metrics: Any) -> RunConfig:
    return RunConfig(
        name="r",
        model=ModelConfig(path="m"),
        environment=EnvironmentConfig(path="a:B"),
        metrics=MetricsConfig(**metrics),
    )


def line(update: int, reward: float) -> dict[str, Any]:
    return {
        "update": update,
        "time_s": 1000.0 + update,
        "reward": reward,
        "kl/lag_2-3": None,
        "num_tokens_trained": 7,
        "phase_s": {"forward": 0.5},
        "skipped_reason": None,
    }


def wait_for_the_next_second() -> None:
    """TensorBoard orders its files by their names, which hold the second: no two trainers of a run start in one."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.02)


def train_killed_and_resumed(bench: Any) -> None:
    """Kills a trainer in its update 6, and resumes the run to its end."""
    first = bench.trainer()
    first.learner.fail_at[6] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    first.close()
    wait_for_the_next_second()
    second = bench.trainer(resume=True)
    assert second.run()
    second.close()


def accumulated(folder: Path) -> Any:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def read_tensorboard(folder: Path, name: str) -> list[tuple[int, float, float]]:
    """(step, value, time) of each point that TensorBoard shows."""
    accumulator = accumulated(folder)
    return [(event.step, event.value, event.wall_time) for event in accumulator.Scalars(name)]


WandbSession = tuple[str, list[tuple[int, dict[str, Any]]]]


def read_wandb(folder: Path) -> list[WandbSession]:
    """(run id, (step, numbers) of each row) of each session, oldest first, once W&B has written the end of each: its
    own process may do that after `finish` has returned."""
    sessions = wait_for(lambda: _sessions(folder), lambda found: all(ended for *_, ended in found))
    return [(run_id, history) for run_id, history, _ in sessions]


def _sessions(folder: Path) -> list[tuple[str, list[tuple[int, dict[str, Any]]], bool]]:
    datastore = importlib.import_module("wandb.sdk.internal.datastore")
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    sessions = []
    for file in sorted(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        store, run_id, history, ended = datastore.DataStore(), "", [], False
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = records.Record()
            record.ParseFromString(data)
            ended = record.WhichOneof("record_type") == "exit"
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            elif record.WhichOneof("record_type") == "history":
                row = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
                }
                numbers = {k: v for k, v in row.items() if not k.startswith("_")}
                history.append((record.history.step.num, numbers))
        store.close()
        sessions.append((run_id, history, ended))
    return sessions


def test_the_numbers_of_a_line_keep_their_names_and_are_nothing_else():
    assert numbers_of(
        {**line(3, 0.5), "queue": True, "name": "x", "rollouts": {"main": {"dead": {"16": {"num": 2}}}}}
    ) == {
        "reward": 0.5,
        "num_tokens_trained": 7.0,
        "phase_s/forward": 0.5,
    }


def test_a_run_resumed_at_wandb_loses_no_evaluation_and_repeats_no_update(monkeypatch, tmp_path):
    server = FakeServer()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=server.init, Settings=Settings, Table=None))
    config = run_config(wandb=WandbConfig(project="lab"))

    def session(start: int, updates: range, evaluations: dict[int, list[int]]) -> None:
        """evaluations: by the update after whose line they come in."""
        run = WeightsAndBiases(config.metrics.wandb, config, tmp_path)
        assert server.asked["resume"] == "allow"
        for update in (start, *updates):
            if update > start:
                run.write(SinkPoint("updates", update, 0.0, {"reward": update / 8}))
            for evaluated in evaluations.get(update, []):
                run.write(SinkPoint("evaluations", evaluated, 0.0, {"reward": 0.5}))
        run.close()

    session(0, range(1, 8), {0: [0], 7: [5]})
    session(4, range(5, 11), {4: [4], 5: [5], 10: [10]})  # W&B has 5 to 7 already
    session(10, range(11, 13), {10: [10], 11: [12], 12: [11]})
    assert server.dropped == []
    updates = [(step, row["reward"] * 8) for step, row in server.rows if "reward" in row]
    assert updates == [(update, update) for update in range(1, 13)], "each once, at its own step"
    evaluated = [row["evaluation/update"] for _, row in server.rows if "evaluation/update" in row]
    assert evaluated == [0, 5, 4, 5, 10, 10, 12, 11]


def test_wandbs_process_ends_by_itself_after_a_killed_trainer_while_the_server_is_away(tmp_path):
    (tmp_path / "wandb.py").write_text("from fake_wandb import *\n")
    program = (
        "import multiprocessing, os, signal, sys\n"
        "from pathlib import Path\n"
        "from functools import partial\n"
        "from penstock.consumers.observe.sinks import in_own_process\n"
        "from penstock.consumers.observe.sinks.weights_and_biases import WeightsAndBiases\n"
        "from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, WandbConfig\n"
        "if __name__ == '__main__':\n"
        "    in_own_process.FINISH_S = 0.5\n"
        "    config = RunConfig(name='r', model=ModelConfig(path='m'), environment=EnvironmentConfig(path='a:B'))\n"
        "    sink = partial(WeightsAndBiases, WandbConfig(project='lab'), config, Path(sys.argv[1]))\n"
        "    in_own_process.InOwnProcess('wandb', sink)\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "trainer.py"
    script.write_text(program)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "tests" / "doubles"), str(ROOT)]),
        "FAKE_WANDB_AWAY": "1",
    }
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as killed:
        pid = int(killed.stdout.readline())
        assert killed.wait(60) == -signal.SIGKILL
        try:
            killed.communicate(timeout=90)  # the pipe is W&B's process's too: it ends when that has ended
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)
            raise


def test_a_batch_that_made_no_update_is_not_written_twice(tmp_path, monkeypatch, errors):
    written: list[SinkPoint] = []
    fake = SimpleNamespace(write=written.append, close=lambda: None)
    monkeypatch.setattr(tensorboard, "TensorBoard", lambda folder, start: fake)
    opened = Sinks(run_config(tensorboard=True), tmp_path, 4, errors.append)
    for update in (4, 5, 5, 6):
        opened.update(line(update, 0.5))
    opened.close()
    assert [point.update for point in written] == [5, 6]


def test_a_sink_whose_package_is_missing_is_refused_with_the_extra(monkeypatch):
    for found in (None, SimpleNamespace(origin=None)):  # not there, and a folder of that name
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        sinks = {"tensorboard": True, "wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}
        for package, metrics in ((name, {name: given}) for name, given in sinks.items()):
            message = rf"metrics\.{package} is set: .* pip install 'penstock\[{package}\]'"
            with pytest.raises(ConfigError, match=message):
                check_sinks(MetricsConfig(**metrics))
    check_sinks(MetricsConfig())


def failing(where: str) -> Callable[..., Any]:
    def open_sink(*_: Any) -> Any:
        def fail(*_: Any) -> None:
            raise OSError("no room")

        if where == "open":
            fail()
        idle: Callable[..., None] = lambda *_: None  # noqa: E731
        return SimpleNamespace(write=fail if where == "write" else idle, close=fail if where == "close" else idle)

    return open_sink


@pytest.mark.parametrize(("where", "count"), [("open", 4), ("write", 3), ("close", 1)])
def test_a_sink_that_fails_is_said_once_and_counted(where, count, tmp_path, monkeypatch, caplog, errors):
    monkeypatch.setattr(tensorboard, "TensorBoard", failing(where))
    opened = Sinks(run_config(tensorboard=True), tmp_path, 0, errors.append)
    with caplog.at_level(logging.WARNING):
        for update in (1, 2, 3):
            opened.update(line(update, 0.5))
        opened.close()
    assert errors == ["tensorboard"] * count
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("metrics.tensorboard: ") and "no room" in message


def test_a_sink_that_cannot_be_opened_at_first_is_opened_later_and_what_it_missed_is_counted(
    tmp_path, monkeypatch, caplog, errors
):
    written: list[int] = []
    asked: list[int | None] = []
    is_away, wait_s = threading.Event(), threading.Event()
    is_away.set()

    def open_sink(folder: Path, start: int | None) -> Any:
        asked.append(start)
        if is_away.is_set():
            raise OSError("the server is away")
        return SimpleNamespace(write=lambda point: written.append(point.update), close=lambda: None)

    monkeypatch.setattr(tensorboard, "TensorBoard", open_sink)
    monkeypatch.setattr(feeding, "RETRY_S", 0.05)
    opened = Sinks(run_config(tensorboard=True), tmp_path, 4, errors.append)
    wait_for(lambda: errors)
    opened.update(line(5, 0.5))
    wait_for(lambda: len(errors) >= 2)
    is_away.clear()
    update = 5
    while not written:
        update += 1
        opened.update(line(update, 0.5))
        assert not wait_s.wait(0.02) and update < 2000
    opened.close()
    num_failed = sum(1 for _ in asked) - 1
    assert written[0] > 5 and written == list(range(written[0], update + 1))
    assert set(asked) == {4}, "it was never open before"
    assert len(errors) == num_failed + len(range(5, written[0])), "each failure and each point that is not there"
    assert len(caplog.records) == 1 and "cannot be opened: OSError: the server is away" in caplog.text


def test_a_sink_that_hangs_holds_up_neither_training_nor_its_end_for_long(tmp_path, monkeypatch, caplog, errors):
    release = threading.Event()
    hung = SimpleNamespace(write=lambda point: release.wait(60), close=lambda: None)
    monkeypatch.setattr(tensorboard, "TensorBoard", lambda *_: hung)
    monkeypatch.setattr(feeding, "MAX_WAITING", 5)
    monkeypatch.setattr(feeding, "CLOSE_S", 0.2)
    opened = Sinks(run_config(tensorboard=True), tmp_path, 0, errors.append)
    for update in range(1, 21):
        opened.update(line(update, 0.5))
    opened.close()
    opened.close()
    release.set()
    assert 15 <= len(errors) <= 16, "all but those that wait and the one being written, and the last wait"
    assert len(caplog.records) == 1 and "does not keep up" in caplog.text


@pytest.mark.redis
def test_a_trainer_killed_and_resumed_leaves_each_update_once_and_offline_what_it_repeats_in_both_sessions(
    bench, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    bench.overrides = ["metrics.tensorboard=true", "metrics.wandb.project=lab"]
    bench.producer()
    train_killed_and_resumed(bench)
    updates = {row["update"]: (row["reward"], row["time_s"]) for row in bench.lines("updates.jsonl")}
    points = read_tensorboard(bench.folder / "tensorboard" / "updates", "reward")
    assert [step for step, *_ in points] == list(range(1, 13))
    assert [pytest.approx(updates[step], rel=1e-6) for step, *_ in points] == [tuple(point) for _, *point in points]
    steps = [step for step, *_ in read_tensorboard(bench.folder / "tensorboard" / "evaluations", "reward")]
    assert steps == sorted(set(steps)) and {0, 5, 10, 12} <= set(steps)
    sessions = read_wandb(bench.folder)
    assert len({run_id for run_id, _ in sessions}) == 1 and len(sessions) == 2
    steps = [[step for step, row in history if "reward" in row] for _, history in sessions]
    assert steps == [[1, 2, 3, 4, 5, 6], list(range(5, 13))], "the checkpoint is of update 4"
    assert bench.metrics.registry.get_sample_value("penstock_sink_errors_total", {"sink": "wandb"}) == 0


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local stores of trackio and MLflow, and nothing of W&B's on a server."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # MLflow's files go into `mlruns` there
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(feeding, "CLOSE_S", 240.0)  # on a busy machine they take long to import
    monkeypatch.setattr(in_own_process, "FINISH_S", 240.0)
    return tmp_path


READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
import trackio
from mlflow import MlflowClient
from mlflow.artifacts import load_dict
client = MlflowClient()
experiment = client.get_experiment_by_name("lab").experiment_id
(run,) = client.search_runs([experiment])
history = {name: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, name)]
           for name in run.data.metrics}
tables = [load_dict(f"{run.info.artifact_uri}/{file.path}")
          for file in client.list_artifacts(run.info.run_id, "completions")]
from trackio.sqlite_storage import SQLiteStorage
(name,) = [each.name for each in trackio.Api().runs("lab")]
print(json.dumps({"metrics": history, "params": run.data.params, "status": run.info.status, "tables": tables,
                  "trackio": SQLiteStorage.get_logs("lab", name)}))
"""


@pytest.mark.redis
def test_trackio_and_mlflow_have_each_update_once_after_a_kill_and_completions_are_text(
    bench: Any, stores: Path
) -> None:
    """Both are read in another process: trackio patches this one."""
    bench.overrides = ["metrics.trackio.project=lab", "metrics.mlflow.experiment=lab", "metrics.tensorboard=true"]
    bench.overrides += ["metrics.wandb.project=lab", "metrics.completions_every=6", f"model.path={stores / 'model'}"]
    byte_tokenizer(stores / "model")
    bench.producer()
    train_killed_and_resumed(bench)
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {row["update"]: row for row in bench.lines("updates.jsonl")}
    assert [step for step, *_ in found["metrics"]["reward"]] == list(range(1, 13)) and found["status"] == "FINISHED"
    assert found["metrics"]["reward"][8] == [9, rows[9]["reward"], round(rows[9]["time_s"] * 1000)]
    assert {0, 5, 10, 12} <= {step for step, *_ in found["metrics"]["evaluation/reward"]}
    assert found["params"]["trainer.learning_rate"] == "1e-05" and found["params"]["groups_per_batch"] == "4"
    updates = [row for row in found["trackio"] if "reward" in row]
    assert [row["step"] for row in updates] == list(range(1, 13))
    assert updates[8]["num_tokens_trained"] == rows[9]["num_tokens_trained"]
    assert {0, 5, 10, 12} <= {row["step"] for row in found["trackio"] if "evaluation/reward" in row}
    assert [len(table["data"]) for table in found["tables"]] == [4, 4]
    row = dict(zip(found["tables"][1]["columns"], found["tables"][1]["data"][0], strict=True))
    assert (row["update"], row["environment"]) == (12, "main") and row["reward"] in (0.0, 1.0)
    assert [row["step"] for row in updates if "completions" in row] == [6, 12]
    text = accumulated(bench.folder / "tensorboard" / "updates").Tensors("completions/text_summary")
    assert [event.step for event in text] == [6, 6, 12], "TensorBoard purges numbers alone"
    assert text[2].tensor_proto.string_val[0].decode().startswith("| update | environment | prompt | completion | rew")
    counted = bench.metrics.registry.get_sample_value
    assert [counted("penstock_sink_errors_total", {"sink": name}) for name in ("trackio", "mlflow", "wandb")] == [0] * 3


@pytest.mark.parametrize(("sink", "variable"), [("trackio", "TRACKIO_DIR"), ("mlflow", "MLFLOW_TRACKING_URI")])
def test_a_store_that_cannot_be_written_is_said_once(
    sink: str, variable: str, stores: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, errors: list[str]
) -> None:
    (stores / "file").write_text("no folder")
    monkeypatch.setenv(variable, f"{'sqlite:///' if sink == 'mlflow' else ''}{stores}/file/x")
    opened = Sinks(run_config(**{sink: {"trackio": TRACKIO, "mlflow": MLFLOW}[sink]}), stores, 0, errors.append)
    opened.update(line(1, 0.5))
    opened.close()
    assert errors and set(errors) == {sink}
    (message,) = [record.getMessage() for record in caplog.records]
    said = {"trackio": "TrackioError: trackio failed to flush metric logs", "mlflow": "it cannot be opened: "}[sink]
    assert message.startswith(f"metrics.{sink}: ") and said in message


@pytest.mark.redis
def test_a_trainer_without_the_sinks_package_takes_nothing_over(bench, redis_client, monkeypatch, caplog):
    monkeypatch.setenv("REDIS_URL", bench.url)
    bench.trainer()
    commit = redis_client.hgetall(bench.keys.commit)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bench.overrides = ["metrics.tensorboard=true"]
    for how in ("resume", "standby"):
        assert entry.main(bench.config, runs=bench.runs, **{how: True}) == 2
    assert "metrics.tensorboard is set: the package tensorboard is not installed" in caplog.text
    assert redis_client.hgetall(bench.keys.commit) == commit
    assert Checkpoints(bench.folder / "checkpoints", 2, Path("none")).newest_epoch() == 0
