"""On a GPU the trainer computes what it computes on a CPU, and each continues from the other's checkpoint."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.weights.snapshots import Snapshots
from penstock.schemas.config import ModelConfig, TrainerConfig
from training_groups import configuration, random_group, tiny_model

pytestmark = pytest.mark.gpu
GPU = "cuda"


def learner(folder: Path, device: str, dtype: Literal["float32", "bfloat16"]) -> Learner:
    trainer = TrainerConfig(
        device=device,  # type: ignore[arg-type]
        learning_rate=1e-3,
        tokens_per_microbatch=64,
        gradient_checkpointing=True,
    )
    return Learner(configuration(folder, model=ModelConfig(path=str(folder), dtype=dtype), trainer=trainer))


def train(one: Learner, seed: int) -> dict[str, float]:
    report = one.step(one.pack([random_group(index, seed) for index in range(8)], lambda version: 0))
    assert report.num_optimizer_steps == 1
    return report.metrics


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "model", hidden_size=64, head_dim=64)
    return tmp_path / "model"


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_an_update_is_that_of_a_cpu(model: Path, dtype: Literal["float32", "bfloat16"], allowed: float) -> None:
    on_gpu, on_cpu = (learner(model, device, dtype) for device in (GPU, "cpu"))
    assert on_gpu.device.type == GPU
    found, expected = train(on_gpu, 0), train(on_cpu, 0)
    for name in ("grad_norm", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=allowed), name
    assert found["loss"] == pytest.approx(expected["loss"], abs=allowed)


def test_a_cpu_continues_from_a_checkpoint_of_a_gpu_and_back(model: Path, tmp_path: Path) -> None:
    first = learner(model, GPU, "float32")
    train(first, 0)
    for number, device in enumerate(("cpu", GPU)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        state = first.state()
        first.begin_checkpoint(folder).result()
        second = learner(model, device, "float32")
        second.load_checkpoint(folder, state)
        weights = second.published_weights()
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.published_weights().items())
        found, expected = train(second, 1), train(first, 1)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        first = second


def test_a_snapshot_holds_the_bits_that_the_policy_had_when_it_was_begun() -> None:
    masters = torch.randn(1_000_003, device=GPU)
    snapshots = Snapshots(lambda: lambda: [PublishedPart("w", torch.bfloat16, tuple(masters.shape), 0, masters)])
    for version in range(4):  # from the third on in buffers that were used before
        expected = masters.cpu().bfloat16().view(torch.int16).numpy().view("uint16")
        snapshots.begin(version)
        snapshots.wait()
        masters.add_(1.0)
        assert (snapshots.bits(version)[0] == expected).all()
