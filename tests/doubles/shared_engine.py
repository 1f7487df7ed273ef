"""Makes tiny Qwen3 models, publishes policies as a trainer does, and boots engines that tests share."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fakeredis
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.producers.interfaces import Completion
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.weights.follower import WeightFollower
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.config import EngineConfig, EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.policy import TensorSpec, WeightManifest
from penstock.schemas.rollout import SamplingSettings, unpack_floats, unpack_ids
from penstock.schemas.weights.reading import WeightReader
from weight_writer import WeightWriter

VOCABULARY = 64
CONTEXT = 512
EOS = 1
PROMPT = [3, 17, 5, 40, 8]
StateDict = dict[str, torch.Tensor]


def qwen3(*, tied: bool, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen3ForCausalLM:
    """Returns a random model whose distributions are neither flat nor peaked. changes: of its configuration."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**settings | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.15)
    return model.to(dtype).eval()


def weights_of(model: Qwen3ForCausalLM) -> StateDict:
    """Returns the parameters as in a checkpoint: a tied head is included once, as the embedding."""
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def publish(weights: StateDict, version: int, folder: Path) -> tuple[WeightManifest, str]:
    """Writes `weights` as policy `version`; returns its manifest and path."""
    path = folder / f"v{version}.safetensors"
    save_file(weights, path)
    tensors = tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in weights.items()
    )
    size = path.stat().st_size
    manifest = WeightManifest(version=version, parent_version=version - 1, total_bytes=size, tensors=tensors)
    return manifest, str(path)


def run_config(model: Path, *, engine: dict[str, Any] | None = None, dtype: str = "float32") -> RunConfig:
    settings: dict[str, Any] = {"kv_cache_gib": 0.25, "gpu_memory_utilization": 0.3, "max_num_seqs": 64} | (
        engine or {}
    )
    settings["args"] = {"skip_tokenizer_init": True} | settings.get("args", {})
    return RunConfig(
        name="engine-tests",
        seed=7,
        model=ModelConfig(path=str(model), dtype=dtype),
        environment=EnvironmentConfig(path="nobody:Needed"),
        engine=EngineConfig(**settings),
    )


@torch.no_grad()
def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], sampled: list[int], temperature: float
) -> np.ndarray:
    """Returns the model's logprobs of the sampled tokens, float32 `[num_sampled]`, by one plain forward pass."""
    logits = model(torch.tensor([prompt + sampled])).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs[torch.arange(len(sampled)), torch.tensor(sampled, dtype=torch.long)].numpy()


BUDGET = 1e-5
"""Mean |difference| of logprobs, float32 on both sides."""


def gap(
    model: Qwen3ForCausalLM, completions: Sequence[Completion], temperature: float = 1.0, prompt: list[int] = PROMPT
) -> float:
    """Returns the mean |difference| of the model's logprobs from those recorded, over the sampled tokens."""
    differences = [
        np.abs(
            np.array(unpack_floats(one.behavior_logprobs))
            - reference_logprobs(model, prompt, [*unpack_ids(one.token_ids)], temperature)
        )
        for one in completions
    ]
    return float(np.concatenate(differences).mean())


async def assert_serves(engine: Any, model: Qwen3ForCausalLM, version: int, prompt: list[int] = PROMPT) -> None:
    """Checks that the engine samples from `model` and labels its tokens `version`."""
    completions = await engine.generate(prompt, SamplingSettings(max_tokens=24), 8, f"serves-{version}")
    assert {span.version for one in completions for span in one.version_spans} == {version} == {engine.policy_version}
    assert gap(model, completions, prompt=prompt) <= BUDGET


@dataclass
class SharedEngine:
    """A running engine, the folder it publishes into, and what it sampled before any update."""

    engine: Any
    base: Qwen3ForCausalLM
    folder: Path
    boot_completions: list[Completion] = field(default_factory=list)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def publish(self, weights: StateDict, version: int) -> tuple[WeightManifest, str]:
        return publish(weights, version, self.folder)

    async def load(self, weights: StateDict) -> int:
        """Makes the engine load `weights` under the next version; returns the version."""
        manifest, path = self.publish(weights, next(self.versions))
        await self.engine.load_weights(manifest, path)
        return manifest.version


class EngineHost:
    """A weight log, and the producers of one host that have engines load from its copy of it."""

    def __init__(self, folder: Path) -> None:
        self._client = fakeredis.FakeRedis(protocol=2)
        self._folder = folder
        self._log = WeightWriter(self._client, "engines", piece=4096)
        self._versions = itertools.count(1)
        self._copies: list[HostCopy] = []

    def follower(self, engine: Any) -> WeightFollower:
        keys, metrics, connection = Keys("engines"), ProducerMetrics(), cast(Any, None)
        reader = WeightReader(lambda command: command(self._client), keys)
        copy = HostCopy(str(self._folder), "engines", "redis", reader, metrics)
        copy.open()
        self._copies.append(copy)
        return WeightFollower(connection, keys, engine, copy, metrics)

    async def load(self, follower: WeightFollower, manifest: WeightManifest) -> None:
        """Loads a policy in a producer without the retries of `WeightFollower.keep_current`: raises what that logs."""
        await follower._load(manifest)

    def announce(self, make: Callable[[int], StateDict]) -> WeightManifest:
        """Announces the next version, as a delta if its tensors have the names and shapes of the one before."""
        version = next(self._versions)
        bits = {name: tensor.numpy().view(np.uint32) for name, tensor in make(version).items()}
        before = self._log.policies.get(version - 1, {})
        if {name: array.shape for name, array in bits.items()} != {name: a.shape for name, a in before.items()}:
            return self._log.whole(version, bits)
        return self._log.delta(version, bits, of=version - 1)

    def trim(self, version: int) -> None:
        """Removes policies older than `version` from the log."""
        self._log.trim(version)

    def close(self) -> None:
        for copy in self._copies:
            copy.close()


async def boot_shared(vllm_engine: Any, folder: Path, *, tied: bool, **engine: Any) -> SharedEngine:
    """Boots an engine on a random model. engine: further settings of the run file's section."""
    base = qwen3(tied=tied, seed=0)
    base.save_pretrained(folder / "model")
    shared = SharedEngine(await vllm_engine.start(run_config(folder / "model", engine=engine)), base, folder)
    shared.boot_completions = await shared.engine.generate(PROMPT, SamplingSettings(max_tokens=32), 16, "boot")
    return shared
