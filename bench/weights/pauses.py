"""The pause of a weight update under traffic, against the bare load of the same file by the same engine when idle."""

import asyncio
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from bench.pipeline.bare import BareEngine
from bench.result import Figure, Goal
from penstock.producers.engines.weight_files import read_header
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.layout import tensor_bytes

if TYPE_CHECKING:
    from penstock.producers.engines.vllm import VllmEngine

SETTLE_S = 1.0
"""From the first request of a block of updates to the first update."""


class PauseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """blocks: of updates under traffic, each between two blocks of bare loads. spacing_s: between two updates."""

    size: str
    run_file: str
    blocks: int
    updates_per_block: int
    sequences_in_flight: int
    spacing_s: float


async def measure_pauses(settings: PauseSettings) -> Figure:
    from penstock.producers.engines.vllm import VllmEngine

    config = load_config(Path(settings.run_file))
    engine = await VllmEngine.start(config, seed=1)
    try:
        return await _measure(config, settings, engine)
    finally:
        await engine.close()


async def _measure(config: RunConfig, settings: PauseSettings, engine: "VllmEngine") -> Figure:
    sampling = msgspec.structs.replace(config.sampling, max_tokens=engine.max_model_len - 16)
    bare = BareEngine(engine, sampling, 1)
    path = str(Path(config.model.path) / "model.safetensors")
    tensors = tuple(read_header(path).values())
    manifest = WeightManifest(version=0, parent_version=-1, total_bytes=tensor_bytes(tensors), tensors=tensors)
    pauses: list[float] = []
    bare_loads: list[float] = []

    async def load_idle() -> None:
        bare_loads.extend([await bare.load(path) for _ in range(settings.updates_per_block)])

    async def load_under_traffic() -> None:
        stop = asyncio.Event()
        traffic = asyncio.create_task(bare.stream([5, 6, 7, 8], settings.sequences_in_flight, stop))
        await asyncio.sleep(SETTLE_S)
        for _ in range(settings.updates_per_block):
            newer = msgspec.structs.replace(manifest, version=engine.policy_version + 1)
            pauses.append(await engine.load_weights(newer, path))
            await asyncio.sleep(settings.spacing_s)
        stop.set()
        await traffic

    await bare.load(path)  # the first one maps the file and builds the loader's tables
    for _ in range(settings.blocks):
        await load_idle()
        await load_under_traffic()
    await load_idle()
    pause_s, bare_load_s = median(pauses), median(bare_loads)
    return Figure(
        f"pause per update, {settings.size} of weights",
        unit="ms",
        measured=pause_s * 1000,
        reference=bare_load_s * 1000,
        reference_is="vLLM's own load of the same file into the idle engine",
        goal=Goal(at_most=1.05),
        details={
            "weight_bytes": manifest.total_bytes,
            "pause_s_max": max(pauses),
            "num_updates": len(pauses),
        },
    )
