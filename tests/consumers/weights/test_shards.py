"""What several ranks publish together, against what one rank would."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.schemas.config import LoraConfig, ModelConfig, TrainerConfig
from rank_processes import on_ranks
from rank_work import publish_and_read
from training_groups import VOCABULARY, configuration, random_group, tiny_model

pytestmark = [pytest.mark.redis, pytest.mark.xdist_group("ranks")]


@pytest.mark.parametrize("server_binary", ["redis"], indirect=True)
@pytest.mark.parametrize(("experts", "lora"), [(False, None), (True, None), (False, LoraConfig(rank=3))])
def test_the_shards_of_all_ranks_are_the_policy_that_one_rank_would_publish(
    redis_url: str, tmp_path: Path, experts: bool, lora: LoraConfig | None
) -> None:
    if experts:
        fields = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        settings = Qwen3MoeConfig(**fields, **layers, num_experts=4, num_experts_per_tok=2, initializer_range=0.3)
        Qwen3MoeForCausalLM(settings).save_pretrained(tmp_path / "model")
    else:
        tiny_model(tmp_path / "model")
    config = configuration(
        str(tmp_path / "model"),
        model=ModelConfig(path=str(tmp_path / "model"), dtype="bfloat16"),
        trainer=TrainerConfig(device="cpu", learning_rate=1e-5 if lora is None else 1e-3),
        lora=lora,
    )
    batches = [[random_group(index, seed) for index in range(1, 5)] for seed in range(4)]
    found = on_ranks(2, publish_and_read, config, batches, redis_url, tmp_path, folder=tmp_path / "work")[0]
    assert len(found) == 5
    for read, expected, manifest in found:
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
        ranks = {chunk.key.split("-")[2] for chunk in manifest.chunks}
        assert ranks == ({"0"} if experts else {"0", "1"})
    assert {manifest.delta_of for _, _, manifest in found} > {None}, "there are deltas"
