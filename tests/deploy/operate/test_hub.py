"""A run's model goes to the Hub, over HTTP to a server with its API."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

import penstock
from hub_server import TOKEN, HubServer
from penstock.deploy import cli
from run_lines import ledger_line, update_line, write_lines

# huggingface-hub uploads a file in a way that httpx will give up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
RUN_FILE = """
name = "sums"
[model]
path = "/home/me/models/tiny"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)  # they draw from a thread of their own
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the tests are
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines((folder := tmp_path / "runs" / "sums") / "updates.jsonl", update_line(1), update_line(2))
    (folder / "run.toml").write_text(RUN_FILE)
    points = [{"policy_version": n, "update": n, "reward": n / 4, "num_prompts": 9, "time_s": 1.0} for n in (0, 1, 2)]
    write_lines(folder / "evaluations.jsonl", *points)
    write_lines(folder / "trainer.json", ledger_line(2, released=8, trained=8, skipped=0, dead=0, cancelled=0))
    write_model(folder / "model")
    return folder


def write_model(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "README.md").write_text("of the base model")


def test_a_model_is_pushed_whole_with_a_card_of_the_runs_figures(hub: HubServer, folder: Path, capsys: Any) -> None:
    assert cli.main(["push", "sums", "lab/sums", "--private"]) == 0
    assert capsys.readouterr().out == f"{hub.url}/lab/sums/commit/1\n"
    assert hub.repos == [{"name": "sums", "organization": "lab", "visibility": "private"}]
    assert hub.commits == ["Penstock run sums, 2 updates"]
    card = hub.files.pop("README.md").decode()
    assert hub.files == {file.name: file.read_bytes() for file in (folder / "model").iterdir() if file.suffix != ".md"}
    data = ModelCard(card).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["penstock", "reinforcement-learning", "grpo"]
    assert "\n# sums\n" in card and "`tiny`, trained with reinforcement learning on `penstock.producers.env" in card
    assert "| held-out reward | 0.0000 | 0.5000 | 0.5000 |" in card and "| groups | 8 released: 8 trained" in card
    assert "/home/me" not in card and str(folder.parent) not in card


def test_what_the_hub_refuses_is_one_line_that_says_what_helps(
    hub: HubServer, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(repo: str = "lab/sums") -> tuple[int, str]:
        status = cli.main(["push", "sums", repo])
        return status, capsys.readouterr().err

    for token in ("hf_bad", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        status, said = refused()
        assert status == 1 and said.startswith(
            f"penstock: lab/sums at {hub.url} refuses with status 401: expected a tok"
        )
        assert "hf_bad" not in said and said.count("\n") == 1
    status, said = refused("lab/sums/x")
    assert (
        status == 2 and said.startswith("penstock: repo = 'lab/sums/x': ") and said.endswith("; expected USER/NAME\n")
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.takes_large = False
    status, said = refused()
    assert status == 1 and "Error while uploading 'model.safetensors' to the Hub. " in said and "403" in said
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    status, said = refused()
    assert status == 1 and f"penstock: lab/sums at {nobody} cannot be reached: ConnectError: " in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(penstock.HubError, match="cannot be reached: OfflineModeIsEnabled"):
        penstock.push_to_hub("sums", "lab/sums")
    assert hub.files == {}
