"""`penstock parity` on runs and rollout files: the verdict is its exit status, and what is missing is named."""

import json
import math
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from parity_bench import ParityBench, with_logprobs
from parity_run import NAME, ParityRun, make_bench, sampled_groups
from penstock.consumers.parity.report import ParityReport
from penstock.deploy import cli
from penstock.deploy.parity import display
from penstock.deploy.parity.rollout_file import RolloutFileHeader, read_rollout_file, write_rollout_file
from penstock.schemas.rollout import RolloutGroup
from real_server import installed_servers
from training_groups import tiny_model
from weight_writer import WrittenLog

pytestmark = pytest.mark.redis


@pytest.fixture(scope="session")
def server_binary() -> Path:
    """One server will do: what is asked of it here, others are asked by every reader of a stream."""
    return next(iter(installed_servers().values()))


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where pictures would be drawn; test_parity_report.py draws some."""
    folders: list[Path] = []

    def note(report: ParityReport, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(folder)
        return [folder / "parity.svg", folder / "parity.png"]

    monkeypatch.setattr(display, "write_pictures", note)
    return folders


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return make_bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def groups(bench: ParityBench) -> list[RolloutGroup]:
    return sampled_groups(bench)


@pytest.fixture
def run(tmp_path: Path, bench: ParityBench, redis_url: str, redis_client, monkeypatch) -> ParityRun:
    monkeypatch.setenv("REDIS_URL", redis_url)
    return ParityRun(tmp_path / "runs", bench, redis_client)


def parity(run: ParityRun, *arguments: str) -> int:
    return cli.main(["parity", NAME, "--runs", str(run.runs), *arguments])


def report_of(run: ParityRun) -> dict:
    return json.loads((run.folder / "parity.json").read_text())


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr beside progress."""
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: "))
    return line


def test_the_verdict_is_the_exit_status_and_the_report_lies_where_asked(run, groups, tmp_path, drawn, capsys):
    run.append(groups)
    assert parity(run) == 0
    shown = capsys.readouterr().out
    assert "PARITY" in shown and "as the trainer computes it" in shown
    report = report_of(run)
    assert report["num_groups"] == len(groups) and report["versions"] == [1, 2]
    assert report["hypotheses"][0]["gap"]["mean"] < 1e-5
    assert {row["label"] for row in report["lags"]} == {"0", "0-mixed", "1"}, "version 2 is the newest"
    assert parity(run, "--groups", "2", "--json", "--out", str(tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["versions"] == [2] and err == ""
    assert any(f"the newest 2 of {len(groups)} groups" in note for note in json.loads(out)["notes"])
    assert drawn == [run.folder, tmp_path / "out"] and all((folder / "parity.json").is_file() for folder in drawn)

    run.append(with_logprobs(groups, lambda siblings: [[b / math.log(2) for b in own] for own in siblings]))
    assert parity(run, "--groups", str(len(groups))) == 1
    shown = capsys.readouterr().out
    assert "MISMATCH  these are logarithms to base 2" in shown and "multiply by ln 2" in shown


WRITES = {"xadd", "xack", "xdel", "xtrim", "xgroup", "xreadgroup", "xclaim", "xautoclaim", "set", "hset", "del", "eval"}


def test_the_check_disturbs_nobody(run, groups):
    run.append(groups)
    run.send_heartbeat()
    client = run.client
    client.xgroup_create(run.keys.rollouts, "somebody", id="0")
    before = {key: client.dump(key) for key in client.scan_iter()}
    client.config_resetstat()
    assert parity(run, "--groups", str(len(groups))) == 0
    commands = {name.removeprefix("cmdstat_").partition("|")[0] for name in client.info("commandstats")}
    assert "xread" in commands and not commands & WRITES
    assert {key: client.dump(key) for key in client.scan_iter()} == before


def test_a_live_run_is_waited_for_until_the_wait_ends(run, groups):
    run.send_heartbeat()
    later = threading.Timer(1.0, run.append, [groups])
    later.start()
    assert parity(run, "--groups", str(len(groups))) == 0
    later.join()
    assert report_of(run)["num_groups"] == len(groups)
    assert parity(run, "--wait", "0.6") == 0


def another_model(run: ParityRun, folder: Path) -> None:
    tiny_model(folder / "other", vocab_size=58, hidden_size=32)
    run.client.delete(run.keys.policy, run.keys.anchors)
    log = WrittenLog(run.client, run.keys)
    for version in (1, 2):
        log.announce(version, load_file(folder / "other/model.safetensors"))


def as_text(group: RolloutGroup) -> RolloutGroup:
    return msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, text="12+34="))


WORDLESS = partial(with_logprobs, change=lambda siblings: [[0.0] * len(own) for own in siblings])


@pytest.mark.parametrize(
    ("prepare", "messages"),
    [
        (lambda run, groups, _: None, ["no rollouts on its stream: no producer is at work"]),
        (
            lambda run, groups, _: run.commit(policy_version=2, finished=True),
            ["the run is finished", "recorded/run.toml`"],
        ),
        (lambda run, groups, _: run.append(WORDLESS(groups)), ["every behavior_logprob is 0"]),
        (lambda run, groups, _: run.append_payload(b"\x00", 99), ["none of the 1 groups on its stream can be read"]),
        (lambda run, groups, _: run.append(map(as_text, groups)), ["tokenizer does not match"]),
        (
            lambda run, groups, _: (run.append(groups), run.log.drop(0, 1, 2, 3)),
            ["version 1, 2; expected", "weights.keep_versions"],
        ),
        (
            lambda run, groups, folder: (run.append(groups), another_model(run, folder)),
            ["are not those of model.path"],
        ),
    ],
    ids=["empty", "finished", "no logprobs", "unreadable", "tokenizer", "weights gone", "other weights"],
)
def test_a_run_that_cannot_be_checked_ends_with_2_and_one_line(run, groups, tmp_path, prepare, messages, capsys):
    prepare(run, groups, tmp_path)
    assert parity(run) == 2
    line = refusal(capsys)
    assert all(message in line for message in messages), line


def test_a_part_that_cannot_be_read_or_is_not_wanted_is_left_out(run, groups, capsys, monkeypatch):
    run.append_payload(b"\x00", 99)
    run.append(map(as_text, groups))
    assert parity(run, "--no-tokenizer") == 0
    assert "1 groups break the contract" in capsys.readouterr().out

    def broken(*_, **__):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("penstock.consumers.parity.check.check_parity", broken)
    assert parity(run, "--no-tokenizer") == 2, "a defect of the check is no mismatch"
    assert "ZeroDivisionError: broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        ("run.toml", ["--dtype", "float16"], "--dtype float16: run.toml is a run file, and only a rollout file takes"),
        ("run.toml", ["--groups", "3"], "--groups 3: run.toml is a run file, and only a run takes"),
        (NAME, ["--set", "seed=2"], f"--set seed=2: {NAME} is a run, and only a run file takes"),
        ("nowhere/mine.rollouts", [], "nowhere/mine.rollouts: no such file; expected the name or folder of a run,"),
        ("notes.txt", [], "notes.txt: neither a run file (*.toml) nor a rollout file"),
        ("absent.toml", [], "absent.toml: no such file"),
        ("nothing", [], "nothing"),
    ],
)
def test_a_target_or_an_option_for_another_is_refused(run, tmp_path, target, option, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("rollouts")
    assert cli.main(["parity", target, "--runs", str(run.runs), *option]) == 2
    assert message in refusal(capsys)


def test_saved_rollouts_are_checked_without_the_run(run, groups, bench, tmp_path, capsys):
    file = tmp_path / "kept" / "rollouts"
    run.append(groups)
    assert parity(run, "--save", str(file)) == 0
    run.client.flushall()
    assert read_rollout_file(file).groups == tuple(groups)

    def check(*arguments: str) -> int:
        return cli.main(["parity", str(file), *arguments])

    capsys.readouterr()
    assert check() == 0
    assert f"rollout file rollouts of run {NAME}" in capsys.readouterr().out
    report = json.loads((file.parent / "parity.json").read_text())
    assert report["versions"] == [1, 2] and {row["label"] for row in report["lags"]} == {"0", "0-mixed", "1"}

    other = make_bench(tmp_path / "other")
    assert check("--model", str(other.folder)) == 0, "the same model, made again"
    weights = other.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert check("--model", str(other.folder)) == 2
    assert "its rollouts are of another model" in refusal(capsys)

    header = read_rollout_file(file).header
    write_rollout_file(file, msgspec.structs.replace(header, model="gone", model_digest=""), groups)
    assert check() == 2
    assert "model in gone, which is not there; expected --model FOLDER" in refusal(capsys)
    kept = file.with_name("rollouts.weights").rename(tmp_path / "moved")
    assert check("--model", str(bench.folder)) == 2
    assert "are gone" in refusal(capsys)
    assert check("--model", str(bench.folder), "--weights", str(kept)) == 0

    write_rollout_file(file, RolloutFileHeader(), groups)
    assert check() == 2
    assert "does not say of which model its rollouts are; expected --model FOLDER" in refusal(capsys)
    assert check("--model", str(bench.folder), "--dtype", "int8") == 2
    assert "dtype 'int8' of the published weights: expected one of float32, bfloat16" in refusal(capsys)
    file.write_bytes(file.read_bytes()[:-700])
    assert check() == 2
    assert f"{file}: checksum differs: the file was cut off" in refusal(capsys)
