"""The seams of a producer: what an engine and an environment must offer. Neither needs a base class."""

from typing import Protocol

import msgspec
from penstock.schemas.policy import WeightManifest
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import EngineFingerprint, FinishReason, SamplingSettings, VersionSpan


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine sampled after one prompt.

    token_ids: int32 bytes, `[num_sampled]`, the stop token included where it was sampled.
    behavior_logprobs: float32 bytes, `[num_sampled]`, processed, natural log.
    version_spans: tile `[0, num_sampled)`.
    """

    token_ids: bytes
    behavior_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


class EngineError(RuntimeError):
    """The engine cannot serve as configured; the message names the setting, the value wanted and the value found."""


class WeightLoadError(RuntimeError):
    """New weights could not be loaded; the engine still serves `policy_version`, labelled so."""


class CaptureError(RuntimeError):
    """Hidden states could not be recorded; the engine serves on as before."""


class Engine(Protocol):
    """Samples from a policy whose weights can be replaced while it samples."""

    policy_version: int
    """The version that tokens sampled now are labelled with."""
    fingerprint: EngineFingerprint
    max_model_len: int
    """Longest prompt plus completion, in tokens."""

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingSettings, num_siblings: int, request_id: str
    ) -> list[Completion]:
        """Samples `num_siblings` completions of one prompt; cancelling the call aborts the request.

        One that the engine itself breaks off has the finish reason "abort" and what was sampled of it until then.
        """
        ...

    async def load_weights(self, manifest: WeightManifest, path: str) -> float:
        """Replaces the weights in flight by those in the verified safetensors file at `path`.

        Returns the seconds during which no token was sampled.

        Raises:
            WeightLoadError: the old version still serves, labelled so.
        """
        ...

    async def close(self) -> None: ...


class InspectableEngine(Engine, Protocol):
    """An engine that shows what it computes inside."""

    async def capture(self, token_ids: list[int], path: str) -> None:
        """Replays one sequence with the weights now served and writes its hidden states to `path`, a file laid out as
        `penstock.schemas.hidden_states` says.

        Raises:
            ValueError: the engine refuses the sequence.
            CaptureError: it is not idle, or its model is not one whose inside it can show.
        """
        ...


class Environment(Protocol):
    """Poses tasks and scores answers. Constructed with the run file's keyword arguments and `seed`."""

    num_evaluation_prompts: int

    def prompt(self, index: int) -> Prompt:
        """Training task `index` (from 1, over all dataset epochs); the same index always names the same task."""
        ...

    def evaluation_prompt(self, n: int) -> Prompt:
        """Held-out task `n`, from 1 to `num_evaluation_prompts`."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float | Reward: ...
