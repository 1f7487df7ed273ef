"""The `penstock` command: what it refuses, in which words, with which status."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.command_line import find_run_file
from penstock.deploy.launch.machine import Machine
from penstock.deploy.running import RunInterrupted
from penstock.schemas.config import RunConfig
from run_lines import ledger_line, update_line, write_lines
from training_groups import tiny_tokenizer

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "deploy" / "runs" / "demo.toml")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(start_checks, "read_machine", Machine)  # whatever this one has


def refused(capsys, *argv: str) -> str:
    """The one line that the command prints when it refuses with status 2."""
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("penstock: ")
    return line


def test_unusable_input_is_one_line_and_status_2(capsys):
    for arguments, message in (
        (["absent.toml"], "absent.toml: no such file"),
        ([DEMO], "model.path = 'runs/models/demo': no such folder"),
        ([DEMO, "--set", "sampling.max_toks=1"], "sampling.max_toks: unknown field (did you mean max_tokens?)"),
        ([DEMO, "--set", "num_updates=many"], "num_updates = 'many': Expected `int`, got `str`"),
        ([DEMO, "--set", "trainer.learning_rate=-1"], "trainer.learning_rate = -1"),
        ([DEMO, "--set", "num_updates"], "expected dotted.path=value"),
        ([DEMO, "--name", "a b"], "run name 'a b': expected letters"),
    ):
        assert message in refused(capsys, "run", *arguments), arguments


def test_a_misspelt_command_or_option_is_told_what_it_is_like(capsys):
    for words, message in (
        ("rnu demo", 'Unknown command "rnu". Did you mean "run"?'),
        ("dead requeu demo", 'Did you mean "requeue"?'),
        ("run demo --dryrun", "Unknown option: --dryrun. Did you mean --dry-run?"),
        ("run demo --nmae=b", "Did you mean --name?"),
        ("run", "RUN_FILE requires an argument"),
        (
            "make-model there --task chess",
            'Invalid value "chess" for --task. Choose from: "addition", "calculator", "pictures".',
        ),
        ("parity demo --groups 0", "--groups"),
    ):
        assert message in refused(capsys, *words.split(" ")), words


def test_a_resumed_run_keeps_the_settings_that_it_was_started_with(capsys, model_folder):
    own = Path("runs") / "demo" / "run.toml"
    started = ["--set", f"model.path={model_folder}", "--set", "trainer.learning_rate=0.125", "--set", "num_updates=7"]
    assert cli.main(["run", DEMO, "--dry-run", *started]) == 0
    own.parent.mkdir(parents=True)
    own.write_text(capsys.readouterr().out)
    assert cli.main(["run", DEMO, "--dry-run", "--resume", "--set", "num_updates=9"]) == 0
    shown = capsys.readouterr()
    resumed = tomllib.loads(shown.out)
    assert resumed == tomllib.loads(own.read_text()) | {"num_updates": 9}
    assert f"penstock: resumed with {own}; {DEMO} is not read again, --set changes a setting" in shown.err


def test_a_run_is_resumed_by_its_name_though_its_run_file_needs_what_set_gave_it(capsys, model_folder, tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text(Path(DEMO).read_text().replace("num_updates = ", 'num_updates = "to be set" # '))
    argv = ["run", str(file), "--name", "b", "--runs", str(tmp_path / "elsewhere"), "--dry-run"]
    assert "num_updates = 'to be set'" in refused(capsys, *argv, "--resume")
    own = tmp_path / "elsewhere" / "b" / "run.toml"
    own.parent.mkdir(parents=True)
    own.write_text(Path(DEMO).read_text().replace("runs/models/demo", str(model_folder)).replace('"demo"', '"b"', 1))
    assert cli.main([*argv, "--resume"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["name"] == "b"
    assert cli.main(argv) == 2


def test_the_command_to_continue_a_run_needs_no_settings(monkeypatch, capsys):
    def stop(config: RunConfig, **_: object) -> None:
        raise RunInterrupted(config.name, signal.SIGTERM)

    monkeypatch.setattr(cli, "run", stop)
    assert cli.main(["run", DEMO, "--name", "b", "--set", "num_updates=7", "--runs", "elsewhere"]) == 143
    told = f"penstock: stopped; to continue: penstock run {DEMO} --name b --runs elsewhere --resume\n"
    assert capsys.readouterr().err == told


def test_dry_run_prints_the_resolved_configuration_and_starts_nothing(capsys, model_folder, tmp_path):
    overrides = ["--set", f"model.path={model_folder}", "--set", "producers.count=3", "--name", "2024"]
    assert cli.main(["run", "demo", "--dry-run", *overrides]) == 0
    shown = capsys.readouterr()
    document = tomllib.loads(shown.out)
    assert document["name"] == "2024"  # a number is a name too
    assert document["producers"]["count"] == 3
    assert document["trainer"]["max_grad_norm"] == 1.0
    assert shown.err == "penstock: all is well with 2024: it may be started without --dry-run\n"
    assert not (tmp_path / "runs").exists()
    # Settings that only the objective knows to be of no use.
    assert cli.main(["run", "demo", "--dry-run", *overrides, "--set", "sampling.top_logprobs=5"]) == 2
    assert "sampling.top_logprobs = 5 with objective.path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_updates", "finished", "complete"), [(7, True, True), (9, True, False), (7, False, False)]
)
def test_a_complete_run_is_not_started_again(capsys, model_folder, tmp_path, num_updates, finished, complete):
    started = ["--set", f"model.path={model_folder}", "--set", f"num_updates={num_updates}"]
    assert cli.main(["run", DEMO, "--dry-run", *started]) == 0
    (folder := tmp_path / "runs" / "demo").mkdir(parents=True)
    (folder / "run.toml").write_text(capsys.readouterr().out)
    ledger = ledger_line(7, released=7, trained=7, skipped=0, dead=0, cancelled=0)
    write_lines(folder / "trainer.json", ledger | {"finished": finished})
    model_folder.joinpath("config.json").unlink()  # the check after this one refuses it
    status = cli.main(["run", DEMO, "--resume"])
    shown = capsys.readouterr()
    if complete:
        said, _, table = shown.out.partition("\n")
        assert status == 0 and said == "run demo is complete, with 7 updates; --set num_updates=N trains on to N"
        assert "report   runs/demo/report.html" in table and not (folder / "logs").exists()
    else:
        assert status == 2 and "complete" not in shown.out and "model.path" in shown.err


def test_an_environment_beside_the_run_file_is_found(capsys, model_folder, tmp_path):
    (tmp_path / "my_lab.py").write_text(
        "from penstock.schemas.prompt import Prompt\n"
        "class Echo:\n"
        "    num_evaluation_prompts = 1\n"
        "    def __init__(self, *, seed): pass\n"
        "    def prompt(self, index): return Prompt(text=str(index))\n"
        "    def evaluation_prompt(self, n): return Prompt(text=str(n))\n"
        "    def reward(self, prompt, completion): return float(completion == prompt.text)\n"
    )
    (tmp_path / "run.toml").write_text(
        f'name = "echo"\n[model]\npath = "{model_folder}"\n[environment]\npath = "my_lab:Echo"\n'
    )
    command = [sys.executable, "-m", "penstock.deploy.cli", "run", "run.toml", "--dry-run"]
    shown = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert tomllib.loads(shown.stdout)["environment"]["path"] == "my_lab:Echo"


def test_a_redis_that_is_down_at_start_is_one_line_and_leaves_no_run_folder(
    capsys, monkeypatch, model_folder, tmp_path
):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert cli.main(["run", DEMO, "--set", f"model.path={model_folder}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: REDIS_URL: no Redis answers")
    assert not (tmp_path / "runs").exists()


def test_a_part_without_a_redis_says_so(capsys, model_folder):
    for part in ("trainer", "producer"):
        said = refused(capsys, part, DEMO, "--set", f"model.path={model_folder}")
        assert said.startswith("penstock: no Redis: REDIS_URL and redis.url are not set"), part


def test_report_is_written_again_for_a_run(capsys, tmp_path):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(Path(DEMO).read_text())
    write_lines(folder / "updates.jsonl", update_line(1))
    assert cli.main(["report", "demo"]) == 0
    assert "\nmodel " not in capsys.readouterr().out, "the run has not come to its end"
    (folder / "model").mkdir()
    assert cli.main(["report", "demo"]) == 0
    assert json.loads((folder / "summary.json").read_text())["num_updates"] == 1
    assert "<html" in (folder / "report.html").read_text()
    shown = capsys.readouterr().out
    assert "runs/demo/report.html" in shown and "\nmodel    runs/demo/model\n" in shown
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()  # as a folder that cannot be written, which for root there is not
    assert cli.main(["report", "demo"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("penstock: no report of runs/demo: [Errno ") and shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_command_about_a_run_that_nobody_knows_is_refused(capsys, tmp_path):
    of_a_run = ("audit x", "dead list x", "dead show x 3", "dead requeue x --all", "producers x", "weights x")
    of_a_run += ("export x out", "parity x")
    for command in (*of_a_run, "report x", "watch x", "inspect x", "replay x", "record export x out.parquet"):
        assert "x: neither a folder nor a run in runs" in refused(capsys, *command.split(" ")), command
    (tmp_path / "runs" / "x").mkdir(parents=True)
    for command in of_a_run:
        assert "x: a folder without run.toml, so no run" in refused(capsys, *command.split(" ")), command
    file = tmp_path / "runs" / "x" / "run.toml"
    file.write_text("name = ")
    assert "runs/x/run.toml: not TOML" in refused(capsys, "audit", "x")
    file.write_text(Path(DEMO).read_text().replace('"demo"', '"x"', 1))
    assert cli.main(["producers", "x"]) == 1
    said = "penstock: runs/x/redis holds no data: this run has had no server of its own\n"
    assert capsys.readouterr().err == said


def test_help_tells_every_command_and_argument_and_the_version_is_the_installed_package_s(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {metadata.version('penstock')}\n"
    named = set()
    for group in (cli.app, cli.app["dead"], cli.app["record"]):
        for name in group:
            command = group[name]
            if not name.startswith("-") and (function := command.default_command) is not None:
                named.add(" ".join((*group.name, name)).removeprefix("penstock "))
                assert command.help or function.__doc__, name
                for argument in command.assemble_argument_collection():
                    name_in_python = argument.field_info.name
                    told = argument.parameter.help or f"{name_in_python}: " in function.__doc__
                    assert told or name_in_python == "options", (name, name_in_python)
    page = (ROOT / "docs" / "commands.md").read_text()
    assert named == set(re.findall(r"^\| `penstock ((?:record |dead )?[a-z-]+)", page, re.M))


def test_a_surprise_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "load_config", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", DEMO])


def test_the_command_starts_without_what_only_some_commands_need_and_a_launcher_without_torch_and_vllm():
    program = (
        "import sys, penstock.deploy.cli\n"
        "print(sorted({'matplotlib', 'numpy', 'redis', 'torch', 'vllm'} & set(sys.modules)))\n"
        "import penstock.deploy.launch.launcher, penstock.deploy.launch.live_view\n"
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert shown.stdout.splitlines() == ["[]", "[]"]


def test_make_model_says_what_a_folder_holds_without_torch_and_what_it_makes_before_it(tmp_path):
    made = {"recipe": {}, "num_parameters": 1}
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "recipe.json").write_text(json.dumps(made))
    program = (
        "import sys; from penstock.deploy import cli\n"
        "print(cli.main(['make-model', 'there']), cli.main(['make-model', 'there', '--seed', '1']))\n"
        "print('torch' in sys.modules)\n"
        "sys.modules['torch'] = None\n"
        "cli.main(['make-model', 'new'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert shown.stdout.splitlines() == [
        "there already holds this model",
        "0 2",
        "False",
        "making the model of new",  # said before the import that fails here
    ]
    assert "import of torch halted" in shown.stderr


def test_variables_left_over_from_another_program_are_named(capsys, model_folder, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    here = ["--set", f"model.path={model_folder}"]
    for variable, value, commands in (
        ("PROMETHEUS_MULTIPROC_DIR", "/no/where", ("run", "trainer", "producer")),
        ("WORLD_SIZE", "4", ("run", "trainer")),
        ("WORLD_SIZE", "many", ("run", "trainer")),
    ):
        with monkeypatch.context() as set_here:
            set_here.setenv(variable, value)
            for command in commands:
                said = refused(capsys, command, DEMO, *here)
                assert f"{variable} = '{value}'" in said and "expected it to be unset" in said, (command, said)


def test_a_run_file_is_found_by_its_path_or_by_the_name_of_one_that_is_shipped(capsys, tmp_path):
    for file in Path(DEMO).parent.glob("*.toml"):
        assert find_run_file(Path(file.stem)).read_text() == file.read_text(), file
    (tmp_path / "demo").write_text("name = ")
    assert "penstock: demo: not TOML" in refused(capsys, "run", "demo"), "a file wins"
    for command in ("run", "producer", "trainer"):
        assert refused(capsys, command, "dmo") == (
            "penstock: dmo: no such file; expected a run file or one of those shipped: calculator, demo-distill, "
            "demo-lora, demo"
        )


def test_parity_probes_a_shipped_run_file_where_no_run_has_its_name(capsys, tmp_path):
    assert "model.path = 'runs/models/demo': no such folder" in refused(capsys, "parity", "demo")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert "demo: a folder without run.toml, so no run" in refused(capsys, "parity", "demo")


def test_a_reader_that_leaves_early_ends_a_command_without_a_traceback(model_folder):
    command = f"{sys.executable} -m penstock.deploy.cli run demo --dry-run --set model.path={model_folder}"
    shown = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (shown.returncode, shown.stderr) == (128 + signal.SIGPIPE, "")


def test_a_dry_run_compares_the_teachers_vocabulary_with_the_models(capsys, model_folder, tmp_path):
    for folder, more in ((model_folder, ()), (tmp_path / "same", ()), (tmp_path / "other", ("<more>",))):
        tiny_tokenizer(folder, *more)
    taught = ["run", "demo-distill", "--dry-run", "--set", f"model.path={model_folder}", "--set"]
    assert cli.main([*taught, f"teacher.model={tmp_path / 'same'}"]) == 0
    capsys.readouterr()
    assert "another vocabulary than that of model.path" in refused(capsys, *taught, f"teacher.model={tmp_path}/other")
    assert "teacher.model = 'nowhere': no such folder" in refused(capsys, *taught, "teacher.model=nowhere")
