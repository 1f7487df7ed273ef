"""Runs from Python: real processes, a real Redis and real signals; stand-ins for producers and trainer."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

import penstock
from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.command_line import MODULES_PATH, run_coroutine
from penstock.deploy.launch.launcher import Launcher
from penstock.deploy.launch.machine import Machine
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.config import EnvironmentConfig
from waiting import wait_for

STAND_IN = Path(__file__).parent / "launch" / "stand_in.py"
ARITHMETIC = "penstock.producers.environments.arithmetic:Arithmetic"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_checks, "read_machine", Machine)  # whatever this one has


@pytest.fixture
def settings(model_folder: Path) -> dict[str, Any]:
    return {
        "name": "lab",
        "num_updates": 5,
        "model": {"path": model_folder},
        "environment": {"path": Arithmetic, "kwargs": {"width": 2}},
        "producers": {"count": 1},
    }


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the parts of the next run do."""

    def set(**behaviors: str) -> None:
        def command_for(part: str, config: penstock.RunConfig, runs: Path, resume: bool) -> list[str]:
            return [sys.executable, str(STAND_IN), part, str(config.folder(runs)), behaviors.get(part, "run")]

        monkeypatch.setitem(Launcher.__init__.__kwdefaults__, "command_for", command_for)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    set(trainer="finish")
    return set


def updates(run: str) -> list[dict[str, Any]]:
    return penstock.load_updates(run) if Path("runs", run, "run.toml").is_file() else []


def living(folder: Path) -> list[str]:
    """The parts that were started and are still there."""
    events = [line.split()[1] for line in (folder / "events").read_text().splitlines()]
    started = [event.removeprefix("started-") for event in events if event.startswith("started-")]
    assert started
    return [pid for pid in started if Path("/proc", pid).exists()]


@pytest.mark.redis
def test_a_run_gives_its_numbers_and_another_may_follow_it(
    settings: dict[str, Any], behave: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "lab")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    first = penstock.run(settings)
    assert "update 5/5" in capsys.readouterr().out
    assert (first.name, first.folder, first.summary["num_updates"]) == ("lab", Path("runs/lab"), 5)
    assert first.report.is_file() and first.model is None, "the stand-in saves none"
    assert [row["update"] for row in penstock.load_updates("lab")] == [1, 2, 3, 4, 5]
    assert penstock.load_updates(first.folder)[-1]["ess_fraction"] == 0.99
    second = penstock.run(settings, name="again", set={"seed": 7})
    assert second.folder == Path("runs/again") and penstock.load_config("runs/again/run.toml").seed == 7
    assert [run.name for run in penstock.list_runs()] == ["again", "lab"] and living(second.folder) == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    modules = (first.folder / "logs" / "trainer.log").read_text().partition("modules ")[2].partition("\n")[0]
    assert str(tmp_path / "lab") in modules.split(os.pathsep), "its parts find what this program can import"
    with pytest.raises(penstock.ConfigError, match="runs/lab exists already"):
        penstock.run(settings)


@pytest.mark.redis
def test_ctrl_c_stops_a_run_in_order(settings: dict[str, Any], behave: Any) -> None:
    behave()

    def interrupt() -> None:
        wait_for(lambda: updates("lab"), timeout_s=30)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt, match="run lab was stopped in order; resume=True continues it") as stopped:
        penstock.run(settings)
    waiting.join()
    assert isinstance(stopped.value, penstock.RunInterrupted) and stopped.value.number == signal.SIGINT
    assert "trainer checkpoint" in Path("runs/lab/events").read_text() and living(Path("runs/lab")) == []


@pytest.mark.redis
async def test_a_run_in_a_thread_is_stopped_by_an_event_and_resumed_under_a_running_loop(
    settings: dict[str, Any], behave: Any
) -> None:
    behave()
    stop = threading.Event()
    running = asyncio.create_task(asyncio.to_thread(penstock.run, settings, stop=stop))
    while not updates("lab"):
        assert not running.done()
        await asyncio.sleep(0.02)
    stop.set()
    stopped = await running
    assert stopped.model is None and stopped.summary["num_updates"] < 1_000_000
    assert living(stopped.folder) == []
    behave(trainer="finish")
    config = penstock.load_config("runs/lab/run.toml", set={"num_updates": 4})
    assert penstock.run(config, resume=True).summary["num_updates"] == 5
    assert penstock.load_config("runs/lab/run.toml").num_updates == 4


@pytest.mark.redis
def test_callbacks_get_each_row_in_this_process_and_may_stop_the_run(
    settings: dict[str, Any], behave: Any, capsys: Any
) -> None:
    seen: list[Any] = []
    done = penstock.run(settings, on_update=seen.append, on_evaluation=print)
    assert seen == penstock.load_updates("lab") and len(seen) == 5 and done.summary["num_updates"] == 5
    assert seen[0]["reward"] == 0.5 and seen[0]["lag_histogram"] == {0: 30, 1: 10}
    behave()
    capsys.readouterr()
    stopped = penstock.run(settings, name="b", on_update=lambda row: "stop" if row["update"] == 3 else None)
    assert stopped.summary["num_updates"] < 1_000_000 and living(stopped.folder) == []
    assert "trainer checkpoint" in (stopped.folder / "events").read_text(), "it was stopped in order"
    assert "the caller asks for an end: stopping in order" in capsys.readouterr().out
    later: list[int] = []

    def fail(row: dict[str, Any]) -> None:
        later.append(row["update"])
        raise SystemExit("the plot is full")

    with pytest.raises(SystemExit, match="the plot is full") as raised:
        penstock.run(settings, name="b", resume=True, on_update=fail)
    assert raised.value.__notes__ == [
        "raised by a callback of run b, which was stopped in order; resume=True continues it"
    ]
    assert raised.traceback[-1].name == "fail" and living(stopped.folder) == []
    assert later == [1], "the stand-in begins again: neither old rows nor any after the error"


@pytest.mark.redis
def test_an_upload_that_fails_is_a_warning_of_a_complete_run(
    settings: dict[str, Any], behave: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def leave_a_model(row: dict[str, Any]) -> None:  # as the real trainer does
        Path("runs/lab/model").mkdir(exist_ok=True)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = penstock.run(settings | {"checkpoint": {"push_to_hub": "me/sums"}}, on_update=leave_a_model)
    assert result.model is not None
    said = capsys.readouterr().err
    assert (
        "penstock: warning: the model is not on the Hub: me/sums at https://huggingface.co cannot be reached: " in said
    )
    assert "`penstock push runs/lab me/sums` tries again" in said
    with pytest.raises(penstock.ConfigError, match=r"checkpoint.push_to_hub = 'me--/sums': .*; expected USER/NAME"):
        penstock.check(settings | {"checkpoint": {"push_to_hub": "me--/sums"}})


def test_a_callback_that_cannot_be_called_is_refused_before_anything_starts(settings: dict[str, Any]) -> None:
    async def later(row: dict[str, Any]) -> None: ...

    for name, given in (("on_update", later), ("on_evaluation", "print")):
        with pytest.raises(
            penstock.ConfigError, match=rf"^{name} = .*: expected a function \(row: dict\), not a corou"
        ):
            penstock.run(settings, **{name: given})  # type: ignore[arg-type]


@pytest.mark.redis
def test_a_part_that_dies_is_an_error_that_names_it(settings: dict[str, Any], behave: Any) -> None:
    behave(trainer="broken")
    with pytest.raises(penstock.PartDied, match=r"^64 groups have .*; trainer ended with status 1 .*trainer\.log"):
        penstock.run(settings)


def test_settings_are_a_dict_a_file_a_shipped_name_or_a_struct(settings: dict[str, Any], tmp_path: Path) -> None:
    found = penstock.load_config(settings, set={"trainer.betas": (0.9, 0.95), "environment.kwargs.width": 3})
    assert found.environment is not None and found.environment.path == ARITHMETIC
    assert found.environment.kwargs == {"width": 3} and settings["environment"]["kwargs"] == {"width": 2}
    assert found.trainer.betas == (0.9, 0.95) and found.model.path == str(settings["model"]["path"])
    changed = msgspec.structs.replace(found, num_updates=9)
    assert penstock.load_config(changed) == changed and penstock.load_config(changed, name="b").name == "b"
    assert penstock.load_config("demo").name == "demo"
    nested = penstock.load_config(settings | {"environment": EnvironmentConfig(path=ARITHMETIC)})
    assert nested.environment == EnvironmentConfig(path=ARITHMETIC)
    (own := tmp_path / "runs" / "lab" / "run.toml").parent.mkdir(parents=True)
    own.write_text(f'name = "lab"\nmodel.path = "kept"\nenvironment.path = "{ARITHMETIC}"\n')
    assert penstock.load_config(settings, resume=True, set={"seed": 3}).model.path == "kept"
    assert penstock.load_config(changed, resume=True).num_updates == 9, "a struct is taken as it is"


def pays(prompt: Any, completion: str) -> float:
    return 1.0


def test_classes_functions_and_numbers_of_numpy_stand_where_a_run_file_has_tables_and_numbers(
    settings: dict[str, Any],
) -> None:
    import numpy as np
    import torch

    given = settings | {"environment": Arithmetic, "reward": pays, "trainer": {"learning_rate": np.float32(0.25)}}
    given |= {"num_updates": np.int64(7), "sampling": {"temperature": torch.tensor(0.5)}, "seed": Decimal(3)}
    found = penstock.load_config(given, set={"trainer.betas": np.array([0.5, 0.75]), "objective": Rloo})
    assert (found.environment, found.reward.path) == (EnvironmentConfig(path=ARITHMETIC), f"{__name__}:pays")
    assert (found.trainer.learning_rate, found.num_updates, found.sampling.temperature) == (0.25, 7, 0.5)
    assert (found.trainer.betas, found.objective.path, found.seed) == ((0.5, 0.75), f"{__name__}:Rloo", 3)
    several = penstock.load_config({"name": "a", "model": {"path": "m"}, "environments": [Arithmetic]})
    assert several.environments[0].path == ARITHMETIC
    dated = penstock.load_config(given | {"environment": {"path": Arithmetic, "kwargs": {"since": date(2026, 1, 2)}}})
    assert penstock.load_config(dated).environment.kwargs == {"since": date(2026, 1, 2)}, "as TOML may have it"
    struct = msgspec.structs.replace(found, environment=EnvironmentConfig(path=Arithmetic))  # type: ignore[arg-type]
    struct = msgspec.structs.replace(
        struct, trainer=msgspec.structs.replace(found.trainer, learning_rate=np.float16(1))
    )
    again = penstock.load_config(struct)
    assert again.trainer.learning_rate == 1.0 and again.environment == found.environment


def brief(prompt: Any, completion: str) -> float:
    return 1.0 / (1 + len(completion))


def test_rewards_are_functions_with_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    def parts(*rewards: Any, config: Any = settings) -> list[tuple[str, str, float]]:
        found = penstock.load_config(config, rewards=rewards).reward.components
        return [(each.name, each.path, each.weight) for each in found]

    module = __name__
    wanted = [("pays", f"{module}:pays", 1.0), ("brief", f"{module}:brief", 0.1), ("environment", "environment", 2.0)]
    given = (pays, (brief, 0.1), ("environment", 2))
    assert parts(*given) == parts(*given, config=penstock.load_config(settings)) == wanted
    assert parts("a.b:c") == [("c", "a.b:c", 1.0)] and parts() == []
    assert penstock.check(settings, rewards=[pays, "environment"]).reward.components[0].name == "pays"
    for rewards, said in (
        (
            [lambda prompt, completion: 1.0],
            r"^rewards\[0\] = .*<lambda> of .*: the processes of a run cannot import it",
        ),
        ([pays, (brief, "much")], r"reward.components\[1\].weight = 'much': Expected `float`, got `str`"),
        ([pays, pays], r"components have the names \['pays', 'pays'\], expected different ones"),
        (
            [pays, 0.5],
            r"^rewards\[1\] = 0.5: expected a function \(prompt, completion\) -> float, its import path, or one",
        ),
    ):
        with pytest.raises(penstock.ConfigError, match=said):
            penstock.load_config(settings, rewards=rewards)
    own = settings | {"reward": pays}
    with pytest.raises(penstock.ConfigError, match=r"path = '.*:pays' with components: expected one of the two"):
        penstock.load_config(own, rewards=[brief])


class Rloo:
    pass


class Inner:
    class Hidden:
        pass


def test_what_processes_cannot_import_is_refused_by_name(settings: dict[str, Any]) -> None:
    def own_reward(prompt: Any, completion: str) -> float:
        return 1.0

    Cell = type("Cell", (), {"__module__": "__main__"})

    def refused(**changes: Any) -> str:
        with pytest.raises(penstock.ConfigError) as error:
            penstock.load_config(settings | changes)
        return str(error.value)

    cannot = ": the processes of a run cannot import it; expected a class or function at the top level of a module (a "
    cannot += "file such as my_lab.py), or its import path, as 'my_lab:Capitals'"
    said = refused(environment={"path": Cell})
    assert said == f"environment.path = Cell of this notebook or script{cannot}"
    where = "test_what_processes_cannot_import_is_refused_by_name.<locals>.own_reward"
    assert refused(reward={"path": own_reward}) == f"reward.path = {where} of {__name__}{cannot}"
    said = refused(reward={"components": [{"name": "a", "path": Inner.Hidden}]})
    assert said.startswith(f"reward.components[0].path = Inner.Hidden of {__name__}")
    assert refused(objective={"path": lambda inputs: None}).startswith("objective.path = ")
    assert refused(reward=lambda prompt, completion: 1.0).startswith("reward = test_what_processes_cannot_import")
    said = refused(environment=Arithmetic(seed=0))
    assert "an object of class Arithmetic; expected a value of a run file, or the class Arithmetic itself, its" in said
    assert refused(num_updates=b"7").startswith("num_updates = b'7': an object of class bytes; expected a value of a")
    with pytest.raises(penstock.ConfigError, match=r"^set\.reward\.path = .*own_reward of "):
        penstock.load_config(settings, set={"reward.path": own_reward})


def test_unusable_settings_are_an_error_that_names_the_field() -> None:
    given: tuple[tuple[Any, str], ...] = (
        (None, "config = None: expected a RunConfig, a dict, a run file or the name of a shipped one"),
        ({"name": "a", "model": {"paht": "m"}}, r"config: model.paht: unknown field \(did you mean path\?\)"),
        ({"name": "a", "num_updates": "many"}, "config: num_updates = 'many': Expected `int`, got `str`"),
    )
    for config, message in given:
        with pytest.raises(penstock.ConfigError, match=message):
            penstock.run(config)


def test_a_check_starts_nothing_and_gives_every_default(settings: dict[str, Any]) -> None:
    checked = penstock.check(settings)
    assert None not in checked.num_evaluation_prompts.values() and not Path("runs").exists()


def test_a_part_of_a_run_finds_modules_where_the_program_that_started_it_does(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lab_of_parts.py").write_text(
        "from penstock.producers.environments.arithmetic import Arithmetic as Sums\n"
    )
    command = ["run", "demo", "--dry-run", "--set", f"model.path={settings['model']['path']}"]
    command += ["--set", "environment.path=lab_of_parts:Sums"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(command) == 2
    monkeypatch.setenv(MODULES_PATH, f"{os.pathsep}{tmp_path / 'elsewhere'}")
    assert cli.main(command) == 0


async def test_an_environment_is_tried_under_a_running_loop(capsys: Any) -> None:
    assert penstock.try_environment(Arithmetic, 1, set={"environment.kwargs.num_evaluation_prompts": 4})
    shown = capsys.readouterr().out
    assert f"environment  main ({ARITHMETIC})" in shown and "as a completion 1" in shown


@pytest.mark.parametrize("start_s", [0.0, 0.1])
async def test_ctrl_c_cancels_what_runs_beside_a_running_loop(start_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook's cell
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), time.sleep(start_s)))
    told = []

    async def slow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            told.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_coroutine(slow())
    assert told == ["cleaned up"]
