"""The probe run, on an engine that is scripted."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.producers.interfaces import Completion, WeightLoadError
from penstock.producers.rollout.probe import PosedPrompt, WeightUpdate, batch_dependence, probe
from penstock.schemas.policy import WeightManifest
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import SamplingSettings, decode_group, encode_group, pack_floats
from scripted_engine import ScriptedEngine

PROMPTS = [PosedPrompt(Prompt(text=f"prompt {n}"), [n, n + 1, n + 2]) for n in range(3)]
SAMPLING = SamplingSettings(max_tokens=40)


def update(version: int, folder: Path) -> WeightUpdate:
    path = folder / f"v{version}"
    path.write_bytes(b"")
    manifest = WeightManifest(version=version, parent_version=version - 1, total_bytes=0, tensors=())
    return WeightUpdate(manifest, str(path))


def versions_of(group) -> list[list[int]]:
    return [[span.version for span in rollout.segments[0].version_spans] for rollout in group.rollouts]


async def test_every_prompt_is_sampled_across_each_update_and_once_after_the_last(tmp_path):
    engine = ScriptedEngine(token_s=0.002, num_tokens=40)
    groups = await probe(engine, PROMPTS, SAMPLING, group_size=4, updates=[update(1, tmp_path), update(2, tmp_path)])
    assert [group.index for group in groups] == list(range(1, 10))
    assert all(decode_group(encode_group(group)) == group for group in groups)
    assert [group.prompt for group in groups] == [posed.prompt for posed in PROMPTS] * 3
    assert engine.loaded_versions == [1, 2]
    for wave, (older, newer) in enumerate([(0, 1), (1, 2)]):
        found = [versions_of(group) for group in groups[3 * wave : 3 * wave + 3]]
        assert [[older, newer]] * 4 in found, "rows were in flight when the weights came"
    assert all(versions_of(group) == [[2]] * 4 for group in groups[6:])


async def test_an_update_reaches_an_engine_that_finishes_a_request_at_once(tmp_path):
    groups = await probe(ScriptedEngine(), PROMPTS, SAMPLING, group_size=2, updates=[update(1, tmp_path)])
    assert len(groups) == 6
    assert versions_of(groups[0])[0][0] == 0, "nothing was in flight, and the policy before is checked all the same"
    assert all(versions_of(group) == [[1]] * 2 for group in groups[3:])


async def test_an_update_or_a_prompt_that_the_engine_refuses_ends_the_probe_and_its_requests(tmp_path):
    for refused, error, message in [
        ({"refuse_versions": (1,)}, WeightLoadError, "version 1"),
        ({"refuse_prompt": (1,)}, ValueError, "refuses this prompt"),
    ]:
        engine = ScriptedEngine(token_s=0.002, num_tokens=40, **refused)
        with pytest.raises(error, match=message):
            await probe(engine, PROMPTS, SAMPLING, group_size=2, updates=[update(1, tmp_path)])
        assert engine.num_active == 0


class DependsOnTheBatch(ScriptedEngine):
    """Logprobs are lower by 0.25 for each request beside; with `parts`, the third token is another one then."""

    parts = False

    async def _sample(self, prompt_ids: list[int], sampling: SamplingSettings, *rest: Any) -> list[Completion]:
        await asyncio.sleep(0.01)
        beside = self.num_active - 1
        (found,) = await super()._sample(prompt_ids, sampling, *rest)
        logprobs = [-1.0 - 0.25 * beside] * (len(found.token_ids) // 4)
        ids = bytearray(found.token_ids)
        if self.parts and beside:
            ids[8] += 1
        await asyncio.sleep(0.01)
        return [msgspec.structs.replace(found, behavior_logprobs=pack_floats(logprobs), token_ids=bytes(ids))]


async def test_batch_dependence_compares_requests_alone_with_the_same_together_until_the_texts_part():
    engine = DependsOnTheBatch()
    found = await batch_dependence(engine, PROMPTS)
    assert found == (15, 0.5, 0.5, 3, 0)
    assert "15 tokens" in str(found) and "2 others" in str(found)
    engine.parts = True
    assert await batch_dependence(engine, PROMPTS) == (6, 0.5, 0.5, 3, 3)
