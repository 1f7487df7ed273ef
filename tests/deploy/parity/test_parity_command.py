"""`penstock parity` on runs and rollout files: the verdict is its exit status, and what is missing is named."""

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest
import redis
import torch
from safetensors.torch import load_file

from parity_bench import ParityBench, with_logprobs
from parity_run import NAME, ParityRun, make_bench, sampled_groups
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.gate import Gate, ParityRefusedError
from penstock.consumers.parity.report import ParityReport
from penstock.deploy import cli
from penstock.deploy.launch.redis_server import RedisServer
from penstock.deploy.parity import display
from penstock.deploy.parity.command import GateRefusedError, raise_gate_refusal
from penstock.deploy.parity.rollout_file import RolloutFileHeader, read_rollout_file, write_rollout_file
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import ModelConfig, ParityConfig
from penstock.schemas.rollout import RolloutGroup
from real_server import installed_servers
from training_groups import configuration, tiny_model
from written_log import WrittenLog

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


def in_base_2(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Rollouts of an engine that reports another logarithm."""
    return with_logprobs(groups, lambda siblings: [[value / 0.6931471805599453 for value in own] for own in siblings])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr beside progress."""
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: "))
    return line


def test_rollouts_of_a_sound_engine_are_parity_with_status_0(run, groups, capsys):
    run.append(groups)
    assert parity(run) == 0
    shown = capsys.readouterr().out
    assert "PARITY" in shown and "as the trainer computes it" in shown
    report = report_of(run)
    assert report["num_groups"] == len(groups) and report["versions"] == [1, 2]
    assert report["hypotheses"][0]["gap"]["mean"] < 1e-5
    assert {row["label"] for row in report["lags"]} == {"0", "0-mixed", "1"}, "version 2 is the newest"


def test_a_fault_is_named_with_status_1_and_what_to_do(run, groups, capsys):
    run.append(in_base_2(groups))
    assert parity(run) == 1
    shown = capsys.readouterr().out
    assert "MISMATCH  these are logarithms to base 2" in shown and "multiply by ln 2" in shown
    assert report_of(run)["verdict"]["cause"] == "log2"


def test_pictures_and_report_lie_in_the_run_s_folder_or_where_asked(run, groups, tmp_path, drawn):
    run.append(groups)
    parity(run)
    parity(run, "--out", str(tmp_path / "out"))
    assert drawn == [run.folder, tmp_path / "out"]
    assert all((folder / "parity.json").is_file() for folder in drawn)


def test_json_is_all_that_goes_to_stdout(run, groups, capsys):
    run.append(groups)
    assert parity(run, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]["status"] == "parity" and err == ""


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


def test_the_newest_groups_are_taken_and_the_rest_is_told(run, groups, capsys):
    run.append(groups)
    assert parity(run, "--groups", "2") == 0
    assert report_of(run)["num_groups"] == 2 and report_of(run)["versions"] == [2]
    assert f"the newest 2 of {len(groups)} groups" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["a", "0", "1.5"])
def test_a_number_of_groups_that_is_none_is_refused_in_words(run, number, capsys):
    with pytest.raises(SystemExit) as refused:
        parity(run, "--groups", number)
    assert refused.value.code == 2
    assert f"argument --groups: {number!r}: expected a whole number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        ("run.toml", ["--dtype", "float16"], "--dtype float16: run.toml is a run file, and only a rollout file takes"),
        ("run.toml", ["--weights", "there"], "--weights there: run.toml is a run file, and only a rollout file takes"),
        ("run.toml", ["--groups", "3"], "--groups 3: run.toml is a run file, and only a run takes"),
        (NAME, ["--set", "seed=2"], f"--set seed=2: {NAME} is a run, and only a run file takes"),
        (NAME, ["--prompts", "2"], f"--prompts 2: {NAME} is a run, and only a run file takes"),
        ("nowhere/mine.rollouts", [], "nowhere/mine.rollouts: no such file; expected the name or folder of a run,"),
    ],
)
def test_an_option_that_would_be_ignored_and_a_target_that_is_none_are_refused(run, target, option, message, capsys):
    assert cli.main(["parity", target, "--runs", str(run.folder.parent), *option]) == 2
    assert message in capsys.readouterr().err


def test_a_defect_of_the_check_is_no_mismatch(run, groups, capsys, monkeypatch):
    run.append(groups)

    def broken(*_, **__):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("penstock.consumers.parity.check.check_parity", broken)
    assert parity(run) == 2
    assert "ZeroDivisionError: broken" in capsys.readouterr().err


def test_what_the_gate_could_not_compare_is_told_by_the_launcher_as_a_refusal(bench, groups, tmp_path, capsys):
    config = configuration(bench.folder, model=ModelConfig(path=str(bench.folder)), parity=ParityConfig(gate="refuse"))
    wordless = with_logprobs(groups, lambda siblings: [[0.0] * len(own) for own in siblings])
    model = PackedModel(str(bench.folder), "float32", torch.device("cpu"))
    began_s = time.time() - 1
    with pytest.raises(ParityRefusedError):
        Gate(config, tmp_path).check(wordless, model, 2, lambda version: 0)
    with pytest.raises(GateRefusedError, match="the parity gate refuses to train"):
        raise_gate_refusal(tmp_path, began_s)
    assert "COULD NOT TELL  every behavior_logprob is 0" in capsys.readouterr().out
    raise_gate_refusal(tmp_path, time.time() + 60)  # returns: it was an earlier start's refusal


def test_a_live_run_is_waited_for(run, groups):
    run.send_heartbeat()
    later = threading.Timer(1.0, run.append, [groups])
    later.start()
    assert parity(run, "--groups", str(len(groups))) == 0
    later.join()
    assert report_of(run)["num_groups"] == len(groups)


def test_waiting_ends(run, groups):
    run.send_heartbeat()
    run.append(groups)
    assert parity(run, "--wait", "0.6") == 0


def test_a_stopped_run_s_own_server_is_started_and_stopped_again(bench, groups, tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = tmp_path / "runs" / NAME
    folder.mkdir(parents=True)
    server = RedisServer(folder, maxmemory_mb=64)
    stopped = ParityRun(tmp_path / "runs", bench, server.client)
    stopped.append(groups)
    server.stop()
    assert parity(stopped) == 0
    with pytest.raises(redis.ConnectionError):
        server.client.ping()


def test_versions_that_the_trainer_drops_while_the_check_goes_on_are_still_compared(run, groups, monkeypatch):
    run.append(groups)

    def later(config):
        run.log.drop(0, 1, 2, 3)
        return load_tokenizer(config)

    monkeypatch.setattr("penstock.deploy.parity.inputs.tokenizer_for", later)
    assert parity(run) == 0
    assert report_of(run)["versions"] == [1, 2]


def test_rows_whose_weights_are_gone_are_left_out_and_told(run, groups, capsys):
    run.append(groups)
    run.log.anchor(2)
    run.log.drop(0, 1)
    assert parity(run) == 0
    assert "weights of version 1 are gone" in capsys.readouterr().out
    assert report_of(run)["versions"] == [2]


def test_a_run_whose_weights_are_all_gone_is_named_with_what_would_keep_them(run, groups, capsys):
    run.append(groups)
    run.log.drop(0, 1, 2, 3)
    assert parity(run) == 2
    line = refusal(capsys)
    assert "versions 1, 2" in line.replace("version 1, 2", "versions 1, 2") and "weights.keep_versions" in line


def test_weights_of_another_model_are_refused(run, groups, bench, tmp_path, capsys):
    run.append(groups)
    tiny_model(tmp_path / "other", vocab_size=58, hidden_size=32)
    run.client.delete(run.keys.policy, run.keys.anchors)
    other = WrittenLog(run.client, run.keys)
    for version in (1, 2):
        other.announce(version, load_file(tmp_path / "other/model.safetensors"))
    assert parity(run) == 2
    assert "are not those of model.path" in refusal(capsys)


def test_a_stream_without_rollouts_says_why_and_what_to_do(run, capsys):
    assert parity(run) == 2
    assert "no rollouts on its stream: no producer is at work" in refusal(capsys)
    run.commit(policy_version=2, finished=True)
    assert parity(run) == 2
    line = refusal(capsys)
    assert "the run is finished" in line and f"penstock parity {run.folder}/run.toml" in line


def test_a_stream_without_logprobs_is_refused(run, groups, capsys):
    run.append(with_logprobs(groups, lambda siblings: [[0.0] * len(own) for own in siblings]))
    assert parity(run) == 2
    assert "every behavior_logprob is 0" in refusal(capsys)


def test_records_that_break_the_contract_are_told_of(run, groups, capsys):
    run.append_payload(b"\x00", 99)
    assert parity(run) == 2
    assert "none of the 1 groups on its stream can be read" in refusal(capsys)
    run.append(groups)
    assert parity(run) == 0
    assert "1 groups break the contract" in capsys.readouterr().out


def test_a_tokenizer_that_does_not_match_is_refused(run, groups, capsys):
    strange = [msgspec.structs.replace(g, prompt=msgspec.structs.replace(g.prompt, text="12+34=")) for g in groups]
    run.append(strange)
    assert parity(run) == 2
    assert "tokenizer does not match" in refusal(capsys)
    assert parity(run, "--no-tokenizer") == 0


def test_a_run_that_nobody_knows_is_refused(run, capsys):
    assert cli.main(["parity", "nothing", "--runs", str(run.runs / "none")]) == 2
    assert "nothing" in refusal(capsys)


class SavedRollouts:
    """A rollout file that `--save` wrote, with its own copies of everything."""

    def __init__(self, run: ParityRun, file: Path) -> None:
        self.run, self.file = run, file

    def check(self, *arguments: str) -> int:
        return cli.main(["parity", str(self.file), *arguments])


@pytest.fixture
def recorded(run, groups, tmp_path) -> SavedRollouts:
    run.append(groups)
    file = tmp_path / "kept" / "rollouts"
    assert parity(run, "--save", str(file)) == 0
    return SavedRollouts(run, file)


def test_a_rollout_file_is_checked_without_the_run(recorded, groups, capsys):
    recorded.run.client.flushall()
    assert read_rollout_file(recorded.file).groups == tuple(groups)
    assert recorded.check() == 0
    assert f"rollout file rollouts of run {NAME}" in capsys.readouterr().out
    report = json.loads((recorded.file.parent / "parity.json").read_text())
    assert report["versions"] == [1, 2] and {row["label"] for row in report["lags"]} == {"0", "0-mixed", "1"}


def test_a_rollout_file_that_was_cut_off_is_refused(recorded, capsys):
    recorded.file.write_bytes(recorded.file.read_bytes()[:-700])
    assert recorded.check() == 2
    assert f"{recorded.file}: checksum differs: the file was cut off" in refusal(capsys)


def test_a_rollout_file_of_another_model_is_refused(recorded, bench, tmp_path, capsys):
    other = make_bench(tmp_path / "other")
    assert recorded.check("--model", str(other.folder)) == 0, "the same model, made again"
    weights = other.folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert recorded.check("--model", str(other.folder)) == 2
    assert "its rollouts are of another model" in refusal(capsys)


def test_a_rollout_file_whose_model_or_weights_have_moved_names_them(recorded, bench, tmp_path, capsys):
    header, groups = read_rollout_file(recorded.file)
    write_rollout_file(recorded.file, msgspec.structs.replace(header, model="gone", model_digest=""), groups)
    assert recorded.check() == 2
    assert "model in gone, which is not there; expected --model FOLDER" in refusal(capsys)
    assert recorded.check("--model", str(bench.folder)) == 0
    kept = recorded.file.with_name("rollouts.weights").rename(tmp_path / "moved")
    assert recorded.check("--model", str(bench.folder)) == 2
    assert "are gone" in refusal(capsys)
    assert recorded.check("--model", str(bench.folder), "--weights", str(kept)) == 0


def test_a_bare_rollout_file_of_any_engine_needs_no_more_than_a_model_and_weights(bench, groups, tmp_path, capsys):
    file = tmp_path / "foreign"
    write_rollout_file(file, RolloutFileHeader(), groups)
    assert cli.main(["parity", str(file)]) == 2
    assert "does not say of which model its rollouts are; expected --model FOLDER" in refusal(capsys)
    arguments = ["--model", str(bench.folder), "--weights", str(bench.files[1].parent)]
    assert cli.main(["parity", str(file), *arguments]) == 0
    assert cli.main(["parity", str(file), *arguments, "--dtype", "int8"]) == 2
    assert "dtype 'int8' of the published weights: expected one of float32, bfloat16" in refusal(capsys)


def test_a_file_that_is_neither_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("rollouts")
    assert cli.main(["parity", str(tmp_path / "notes.txt")]) == 2
    assert "neither a run file (*.toml) nor a rollout file" in refusal(capsys)
    assert cli.main(["parity", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml: no such file" in refusal(capsys)
