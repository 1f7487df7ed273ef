"""Images from environment and agent to the stream, with the real engine and a real Redis."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoProcessor, AutoTokenizer

from agent_client import as_plain_client
from penstock.schemas.config import SamplingConfig
from penstock.schemas.images import data_url, digest_of
from penstock.schemas.process.image_files import decoded
from penstock.schemas.prompt import Message, Prompt
from penstock.schemas.rollout import RolloutGroup, unpack_floats, unpack_ids
from producer_run import Numbers
from shared_engine import BUDGET, run_config
from vision_models import picture, tiny_idefics3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.parametrize("server_binary", ["valkey"], indirect=True),
    pytest.mark.filterwarnings("ignore"),  # of transformers' processors
]
FIRST, SECOND = picture(48, 40, 1), picture(20, 70, 2)


class Showing(Numbers):
    """Poses a picture."""

    def prompt(self, index: int) -> Prompt:
        parts = [{"type": "text", "text": "see "}, {"type": "image", "image": FIRST}]
        return Prompt(messages=(Message(role="user", content=parts),), answer="7")


class Unchanged:
    """An engine that takes every policy for the one it has."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load_weights(self, *policy: Any) -> float:
        return 0.0


def gap(model: Any, processor: Any, group: RolloutGroup) -> float:
    """Returns the largest |difference| of logprobs from transformers', which is given the ids and the files of each
    segment."""
    largest = 0.0
    for rollout in group.rollouts:
        for segment in rollout.segments:
            ids = unpack_ids(segment.token_ids).tolist()
            files = [group.images[place.digest] for place in segment.images]
            seen = {n for place in segment.images for n in range(place.start, place.end)}
            if any(ids[n] == model.config.image_token_id for n in range(len(ids)) if n not in seen):
                continue  # sampled: transformers would look for an image there
            inputs = processor.image_processor([list(map(decoded, files))], return_tensors="pt")
            row = torch.tensor([ids])
            pixels = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
            with torch.no_grad():
                logits = model(input_ids=row, attention_mask=torch.ones_like(row), **pixels).logits[0].double()
            sampled = [n for start, end in segment.loss_mask for n in range(start, end)]
            logprobs = logits.log_softmax(-1)[[n - 1 for n in sampled], [ids[n] for n in sampled]]
            difference = logprobs - torch.tensor(unpack_floats(segment.behavior_logprobs))
            largest = max(largest, difference.abs().max().item())
    return largest


async def test_two_turns_with_an_image_each_have_transformers_logprobs(vllm_engine, serve, tmp_path):
    model = tiny_idefics3(tmp_path / "model")
    config = run_config(tmp_path / "model", engine={"max_num_seqs": 8, "max_model_len": 512})
    engine = await vllm_engine.start(replace(config, engine=replace(config.engine, args={"enforce_eager": True})))
    try:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        one = await serve(
            Unchanged(engine),
            environment=Showing(),
            tokenizer=tokenizer,
            group_size=4,
            sampling=SamplingConfig(max_tokens=12),
        )
        one.trainer.release(1, 1)
        for n in range(4):
            rollout = await one.client.open()
            messages = rollout["prompt"]["messages"]
            messages.append(as_plain_client(await one.client.chat(rollout, messages)))
            image = {"type": "image_url", "image_url": {"url": data_url(SECOND)}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "and "}, image]})
            await one.client.chat(rollout, messages)
            await one.client.finish(rollout, n / 4)
        (group,) = await one.groups(1)
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            assert [place.digest for place in segment.images] == [digest_of(FIRST), digest_of(SECOND)]
            assert len(segment.loss_mask) == 2
        assert set(group.images) == {digest_of(FIRST), digest_of(SECOND)}
        assert gap(model, AutoProcessor.from_pretrained(tmp_path / "model"), group) < BUDGET
    finally:
        await engine.close()
