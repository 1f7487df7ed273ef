"""What float16 cannot hold is refused by name: weights of the model, activations, a policy that would be published."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.weights.snapshots import Snapshots
from penstock.deploy.launch.start_checks import _check_model
from penstock.producers.engines.weight_files import BaseModel, check_range
from penstock.producers.interfaces import EngineError
from penstock.schemas.config import ConfigError, ModelConfig
from training_groups import configuration, tiny_model


def _saved(folder: Path, name: str, value: float, element: Any) -> Path:
    module = tiny_model(folder)
    with torch.no_grad():
        module.get_parameter(name)[element] = value
    module.save_pretrained(folder)
    return folder


def test_a_weight_beyond_float16_is_named_with_its_value_before_anything_starts(tmp_path) -> None:
    folder = _saved(tmp_path, "model.layers.1.mlp.up_proj.weight", -7e4, (0, 0))
    said = r"model.layers.1.mlp.up_proj.weight has a weight of -70000, float16 ends at 65504; expected 'bfloat16'"
    with pytest.raises(EngineError, match=said):
        check_range(BaseModel(str(folder)), "float16")
    with pytest.raises(ConfigError, match=said):
        _check_model(configuration(folder, model=ModelConfig(path=str(folder), dtype="float16")))
    with pytest.raises(ConfigError, match=said):
        PackedModel(str(folder), "float16", torch.device("cpu"))
    for dtype in ("bfloat16", "float32"):
        check_range(BaseModel(str(folder)), dtype)
        PackedModel(str(folder), dtype, torch.device("cpu"))


def test_activations_beyond_float16_are_refused_with_the_first_module_that_has_them(tmp_path) -> None:
    folder = _saved(tmp_path, "model.layers.1.mlp.up_proj.weight", 6e4, slice(None))
    said = (
        r"activations exceed float16, which ends at 65504, first in model\.layers\.1\.mlp\.up_proj; expected 'bfloat16'"
    )
    with pytest.raises(ConfigError, match=said):
        PackedModel(str(folder), "float16", torch.device("cpu"))
    PackedModel(str(folder), "bfloat16", torch.device("cpu"))


def test_a_policy_beyond_float16_is_not_published() -> None:
    masters = torch.tensor([1.0, 8e4])
    snapshots = Snapshots(lambda: lambda: [PublishedPart("w", torch.float16, (2,), 0, masters)])
    try:
        snapshots.begin(3)
        with pytest.raises(ConfigError, match=r"policy 3 cannot be published, w has a weight of 80000"):
            snapshots.wait()
    finally:
        snapshots.end()
