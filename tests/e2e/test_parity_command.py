"""`penstock parity RUN.toml` and the gate of `penstock run`, on the real vLLM."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import probed_engine
from forked_programs import PYTHONPATH, start_penstock

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]

RUN_FILE = """
name = "letters"
num_updates = 2
group_size = 8
groups_per_batch = 4
[model]
path = "{model}"
[environment]
path = "letters_environment:Letters"
[sampling]
max_tokens = 48
[engine]
kv_cache_gib = 0.25
max_num_seqs = 64
[engine.args]
{arguments}
[producers]
count = 1
[metrics]
port = 0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    probed_engine.model(tied=True, seed=3).save_pretrained(folder)
    probed_engine.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `tmp_path` the working directory of the commands."""
    monkeypatch.chdir(tmp_path)


def penstock(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a `penstock` command; returns its status, output and errors."""
    output, errors = (folder / f"{words[0]}-{name}" for name in ("output", "errors"))
    for file in (output, errors):
        file.unlink(missing_ok=True)
    status = start_penstock(words, {**os.environ, "PYTHONPATH": PYTHONPATH}, output, errors).wait(500)
    return subprocess.CompletedProcess(words, status, output.read_text(), errors.read_text())


def run_file(folder: Path, model: Path, arguments: str = "") -> str:
    file = folder / "letters.toml"
    file.write_text(RUN_FILE.format(model=model, arguments=arguments))
    return str(file)


def test_a_probe_of_a_sound_engine_is_parity_through_updates_and_in_every_layer(tmp_path, model):
    ended = penstock(tmp_path, "parity", run_file(tmp_path, model), "--json", "--prompts", "4", "--save", "kept")
    log = tmp_path / "parity-engine.log"
    assert ended.returncode == 0, ended.stderr + log.read_text()
    report = json.loads(ended.stdout)
    assert report["verdict"]["status"] == "parity"
    assert report["versions"] == [0, 1, 2, 3] and report["num_groups"] == 16
    names = {layer["name"] for layer in report["layers"]}
    assert {"layers.0.attention", "layers.1.mlp", "head"} <= names
    assert all(layer["error"] <= layer["allowed"] for layer in report["layers"])
    assert (tmp_path / "parity.svg").exists() and (tmp_path / "parity.png").exists()
    assert not (tmp_path / "runs").exists(), "a probe leaves no run"
    assert penstock(tmp_path, "parity", "kept").returncode == 0, "the probe's rollouts, without the engine"


def test_a_run_whose_engine_computes_another_model_is_not_trained(tmp_path, model):
    file = run_file(tmp_path, model, "hf_overrides = { rms_norm_eps = 0.3 }")
    ended = penstock(tmp_path, "run", file)
    shown = ended.stdout + ended.stderr
    assert ended.returncode == 1, shown
    assert "MISMATCH" in ended.stdout and "the parity gate refuses to train" in ended.stderr, shown
    assert "to continue" not in shown
    run = tmp_path / "runs" / "letters"
    assert json.loads((run / "parity.json").read_text())["gate"] == "refuse"
    assert (run / "updates.jsonl").read_text() == ""
