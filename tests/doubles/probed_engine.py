"""A tiny model on the real vLLM, probed and checked as `penstock parity` does."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.check import check_parity
from penstock.consumers.parity.inference import captured_version, compare_layers
from penstock.consumers.parity.report import LayerGap, ParityReport
from penstock.producers.rollout.probe import PosedPrompt, WeightUpdate, probe
from penstock.schemas.config import EngineConfig, EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup, SamplingSettings
from shared_engine import publish, qwen3

LETTERS = "abcdefg"
MERGES = [(one, two) for one in LETTERS for two in LETTERS]
TOKENS = ["<pad>", "<eos>", *LETTERS, *(one + two for one, two in MERGES)]
VOCABULARY = len(TOKENS)
GROUP_SIZE = 8
PROMPTS = ([10, 17, 5, 11, 8], [4, 4, 9], [20, 30, 2, 3, 40, 5, 6, 7], [55])


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of letters and pairs of letters: most texts have many tokenizations, of which encoding finds
    one."""
    vocabulary = {token: n for n, token in enumerate(TOKENS)}
    bpe = Tokenizer(models.BPE(vocabulary, MERGES))
    bpe.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def model(*, tied: bool, seed: int, num_layers: int = 2) -> Qwen3ForCausalLM:
    """Returns a model of `qwen3` for the tokenizer that never ends a text."""
    without_end = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    return qwen3(tied=tied, seed=seed, vocab_size=VOCABULARY, num_hidden_layers=num_layers, **without_end)


def posed(prompts: Sequence[list[int]] = PROMPTS) -> list[PosedPrompt]:
    """Returns prompts of these ids as the probe poses them."""
    spelling = tokenizer()
    return [PosedPrompt(Prompt(text=spelling.decode(ids)), ids) for ids in prompts]


class ProbedEngine:
    """A running engine, the policies it was given, and the trainer's side of the check."""

    def __init__(self, engine: Any, config: RunConfig, base: Qwen3ForCausalLM, folder: Path) -> None:
        self.engine, self.config, self.folder = engine, config, folder
        self.weights: dict[int, Path] = {0: Path(config.model.path)}
        self._base = base
        self._dtype = getattr(torch, config.model.dtype)
        self._numbers = itertools.count(1)

    def model(self, seed: int) -> Qwen3ForCausalLM:
        """Returns another random model of the same shape."""
        return model(tied=self._base.config.tie_word_embeddings, seed=seed)

    def policy(self, base: Qwen3ForCausalLM | None = None, *, nudge: float = 0.0) -> WeightUpdate:
        """Publishes the next policy: `base` with each parameter changed by a share of about `nudge`."""
        version = next(self._numbers)
        torch.manual_seed(version)
        weights = {
            name: (parameter.detach() * (1 + nudge * torch.randn_like(parameter))).to(self._dtype).contiguous()
            for name, parameter in (base or self._base).named_parameters()
        }
        manifest, path = publish(weights, version, self.folder)
        self.weights[version] = Path(path)
        return WeightUpdate(manifest, path)

    async def load(self, update: WeightUpdate) -> None:
        await self.engine.load_weights(update.manifest, update.path)

    async def sample(
        self,
        updates: Sequence[WeightUpdate] = (),
        *,
        prompts: Sequence[list[int]] = PROMPTS,
        engine: Any = None,
        max_tokens: int = 96,
        **sampling: Any,
    ) -> list[RolloutGroup]:
        """Samples groups of siblings while the updates arrive."""
        settings = SamplingSettings(max_tokens=max_tokens, **sampling)
        return await probe(engine or self.engine, posed(prompts), settings, group_size=GROUP_SIZE, updates=updates)

    def check(self, groups: Sequence[RolloutGroup]) -> ParityReport:
        return check_parity(groups, config=self.config, weights=self.weights.get, tokenizer=tokenizer())

    async def layers(self) -> tuple[LayerGap, ...]:
        """Compares engine and trainer layer by layer, on one sequence and the policy that the engine holds."""
        path = self.folder / "hidden_states.safetensors"
        await self.engine.capture([n % VOCABULARY for n in range(3, 100, 2)], str(path))
        trainer = PackedModel(self.config.model.path, self.config.model.dtype, torch.device("cpu"))
        if version := captured_version(path):
            (self.folder / "held").mkdir(exist_ok=True)
            (self.folder / "held" / "model.safetensors").unlink(missing_ok=True)
            (self.folder / "held" / "model.safetensors").symlink_to(self.weights[version])
            config = (Path(self.config.model.path) / "config.json").read_text()
            (self.folder / "held" / "config.json").write_text(config)
            trainer.load(self.folder / "held")
        return compare_layers(trainer, path)


async def start(
    vllm_engine: Any, folder: Path, *, tied: bool, dtype: str = "float32", eager: bool = False, **engine: Any
) -> ProbedEngine:
    """Boots vLLM on a random model. engine: further settings of the run file's section."""
    base = model(tied=tied, seed=0)
    base.to(getattr(torch, dtype)).save_pretrained(folder / "model")
    args = {"skip_tokenizer_init": True, "enforce_eager": eager} | engine.pop("args", {})
    config = RunConfig(
        name="parity",
        seed=11,
        model=ModelConfig(path=str(folder / "model"), dtype=dtype),
        environment=EnvironmentConfig(path="none:None"),
        trainer=TrainerConfig(device="cpu"),
        engine=EngineConfig(**{"kv_cache_gib": 0.25, "max_num_seqs": 64, "args": args} | engine),
    )
    return ProbedEngine(await vllm_engine.start(config), config, base.float(), folder)
