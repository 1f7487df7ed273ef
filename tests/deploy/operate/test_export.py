"""`penstock export`: which checkpoint, where to, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inspected_run import byte_tokenizer
from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.checkpoints.model_folder import copy_model_files
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.export import describe_weights
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.adapter import identity_of
from penstock.schemas.best import BestModel
from penstock.schemas.config import LoraConfig
from penstock.schemas.keys import Keys
from training_groups import configuration, tiny_model

Export = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one of three checkpoints, whose every weight is the checkpoint's version."""
    folder = tmp_path_factory.mktemp("exported")
    byte_tokenizer(folder / "base")
    tiny_model(folder / "base")
    config = configuration(folder / "base")
    save_run_file(config, folder / "runs" / "test")
    checkpoints = Checkpoints(folder / "runs" / "test" / "checkpoints", 9, folder / "base")
    checkpoints.claim_epoch(0)
    learner = Learner(config)
    for version in (3, 5, 10):
        for parameter in learner.model.parameters():
            parameter.data.fill_(version + 1 / 300)
        checkpoints.begin(learner, CheckpointState(policy_version=version)).result()
    return folder


@pytest.fixture
def export(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Export:
    monkeypatch.delenv("REDIS_URL", raising=False)

    def run(*words: str, folder: Path = tmp_path / "out", of: str = "test") -> tuple[int, str, str]:
        status = cli.main(["export", of, str(folder), "--runs", str(written / "runs"), *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def names(written: Path) -> dict[int, str]:
    found = [folder.name for folder in (written / "runs" / "test" / "checkpoints").iterdir() if folder.is_dir()]
    return {int(name.partition("-")[0]): name for name in found}


def test_without_a_number_the_newest_is_exported_in_float32_with_its_tokenizer(export, written, tmp_path) -> None:
    status, out, _ = export()
    assert status == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {parameter.unique().item() for parameter in model.parameters()} == {torch.tensor(10 + 1 / 300).item()}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([65, 66]) == "AB"
    assert f"checking {written / 'runs' / 'test' / 'checkpoints' / names(written)[10]}" in out
    assert f"out ({names(written)[10]})" in out and "out in float32" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing half written"


def test_a_number_or_a_name_chooses_a_checkpoint_and_bfloat16_halves_it(export, written, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert export("--checkpoint", "3", folder=tmp_path / "empty")[0] == 0
    assert export("--checkpoint", names(written)[5], "--dtype", "bfloat16", folder=tmp_path / "in" / "half")[0] == 0
    three, five = (load_file(tmp_path / name / "model.safetensors") for name in ("empty", "in/half"))
    assert {tensor.dtype for tensor in five.values()} == {torch.bfloat16}
    assert {int(tensor.max()) for tensor in three.values()} == {3} and {int(t.max()) for t in five.values()} == {5}


@pytest.mark.redis
def test_the_committed_checkpoint_counts_and_not_a_newer_one(export, written, redis_client, redis_url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    redis_client.hset(Keys("test").commit, "checkpoint", names(written)[5])
    status, out, _ = export()
    assert status == 0 and names(written)[5] in out


def test_what_cannot_be_exported_is_refused_with_what_there_is(export, written, tmp_path) -> None:
    there = ", ".join(name for _, name in sorted(names(written).items()))
    status, _, err = export("--checkpoint", "4")
    assert (status, err) == (
        2, f"penstock: --checkpoint 4: is not there; expected a policy version or a name: {there}\n",
    )  # fmt: skip
    assert export(of="nothing")[::2] == (
        2, f"penstock: nothing: neither a folder nor a run in {written / 'runs'}\n",
    )  # fmt: skip
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    status, _, err = export(folder=tmp_path / "full")
    assert (status, err) == (2, f"penstock: {tmp_path / 'full'}: exists already; expected a new or an empty folder\n")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"] and not (tmp_path / "out").exists()
    save_run_file(configuration(written / "base", name="new"), written / "runs" / "new")
    status, _, err = export(of="new")
    assert status == 2 and "run new has no checkpoint yet" in err


def best(**fields: Any) -> BestModel:
    return BestModel(figure="reward", value=0.5, policy_version=4, update=4, dtype="float32", **fields)


def test_the_model_of_the_best_evaluation_is_exported_under_its_name(export, written, tmp_path) -> None:
    status, _, err = export("--checkpoint", "best")
    assert status == 2 and "--checkpoint best: " in err and "expected a run that has checkpoint.best" in err
    kept = written / "runs" / "test" / "best"
    kept.mkdir()
    try:
        copy_model_files(written / "base", kept)
        weights = describe_weights(written / "base", kept, "float32", None)
        save_file(
            {name: tensor + 0.001 for name, tensor in load_file(written / "base" / "model.safetensors").items()},
            weights,
        )
        (kept / "best.json").write_bytes(msgspec.json.encode(best()))
        status, out, _ = export("--checkpoint", "best", "--dtype", "bfloat16")
        assert status == 0 and "out (best)" in out and "out in bfloat16" in out
        found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(weights)
    finally:
        shutil.rmtree(kept)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([65, 66]) == "AB"
    assert not (tmp_path / "out" / "best.json").exists()


def test_a_checkpoint_that_is_not_whole_is_refused(export, written, tmp_path) -> None:
    tensors = written / "runs" / "test" / "checkpoints" / names(written)[3] / "tensors" / "rank-0.safetensors"
    content = tensors.read_bytes()
    try:
        tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        status, _, err = export("--checkpoint", "3")
    finally:
        tensors.write_bytes(content)
    assert status == 2 and "no whole checkpoint: tensors/rank-0.safetensors: checksum differs; expected another" in err
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_exported_as_peft_s_folder_or_merged_into_its_base(export, written, tmp_path) -> None:
    config = configuration(written / "base", name="adapted", lora=LoraConfig(rank=2, alpha=6.0, targets=("q_proj",)))
    runs = written / "runs" / "adapted"
    save_run_file(config, runs)
    checkpoints = Checkpoints(runs / "checkpoints", 9, written / "base")
    checkpoints.claim_epoch(0)
    learner = Learner(config)
    for parameter in learner.model.parameters():
        parameter.data.fill_(0.5)
    checkpoints.begin(learner, CheckpointState(policy_version=4, learner=learner.state())).result()
    assert export(of="adapted", folder=tmp_path / "adapter")[0] == 0
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (2, ["q_proj"])
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").decode([65, 66]) == "AB"
    status, out, _ = export("--merged", of="adapted", folder=tmp_path / "merged")
    assert status == 0 and "merged" in out
    base, merged = (load_file(folder / "model.safetensors") for folder in (written / "base", tmp_path / "merged"))
    for name, tensor in merged.items():
        # alpha / rank = 3, and the product is 2 * 0.5 * 0.5 everywhere.
        assert torch.allclose(tensor, base[name] + 1.5 * name.endswith("q_proj.weight"), atol=1e-6), name
    tiny_model(tmp_path / "other", seed=5)
    kept = runs / "best"  # as the trainer keeps the policy of the best evaluation
    kept.mkdir()
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(weights, describe_weights(written / "base", kept, "float32", identity_of(config)))
    (kept / "best.json").write_bytes(msgspec.json.encode(best(adapter=identity_of(config))))
    assert export("--checkpoint", "best", "--merged", of="adapted", folder=tmp_path / "again")[0] == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in merged.items())
    assert export("--checkpoint", "best", of="adapted", folder=tmp_path / "peft")[0] == 0
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    status, _, err = export("--merged", "--base", str(tmp_path / "other"), of="adapted")
    assert status == 2 and "expected the base of the adapter, the model that was" in err
    status, _, err = export("--base", str(tmp_path / "other"), of="adapted")
    assert status == 2 and "an adapter is exported without its base; expected --merged with it" in err
    status, _, err = export("--merged")
    assert status == 2 and "--merged: " in err and "holds all weights; expected no option" in err
