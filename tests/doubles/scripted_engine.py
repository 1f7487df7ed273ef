"""An engine without a model: deterministic tokens, and every failure of an engine on request.

A producer process makes it by `start`, which reads its settings as JSON from the environment variable SCRIPTED_ENGINE.
"""

import asyncio
import json
import os
import signal
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.producers.interfaces import (
    NO_IMAGES,
    Completion,
    EngineError,
    PlacedImages,
    Restore,
    WeightLoadError,
)
from penstock.schemas.config import RunConfig
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.policy import WeightManifest
from penstock.schemas.process.image_files import decoded
from penstock.schemas.rollout import EngineFingerprint, SamplingSettings, TopLogprobs
from wire_examples import spans

SETTINGS_VARIABLE = "SCRIPTED_ENGINE"
FINGERPRINT = EngineFingerprint(
    engine="scripted",
    version="1",
    model="none",
    dtype="float32",
    head_dtype="float32",
    logprobs_mode="processed_logprobs",
    prefix_caching=False,
    async_scheduling=False,
)


class ScriptedEngine:
    """An engine whose tokens depend on prompt, sibling, position and the request's seed alone; a token's version is the
    one held when it was sampled.

    token_s: seconds per token; all siblings advance together. 0 finishes without waiting.
    num_tokens: length of a completion (at most the sampling's max_tokens).
    first_token, num_token_ids: sampled ids are in [first_token, first_token + num_token_ids).
    script: returns the completion ids for a prompt, instead of the above.
    With top-k or top-p, the ids that a token was sampled from are `top_k` ids from its own on.
    pause_s: seconds for which a weight load stops sampling.
    die_after: raises EngineError for every request after so many.
    die_on_prompt: raises EngineError for a prompt that starts with these ids.
    kill_on_prompt: kills its own process with SIGKILL for a prompt that starts with these ids.
    hang_on_prompt: never finishes a prompt that starts with these ids.
    refuse_prompt: raises ValueError for a prompt that starts with these ids.
    refuse_versions: WeightLoadError for these.
    """

    def __init__(
        self,
        *,
        token_s: float = 0.0,
        num_tokens: int = 5,
        first_token: int = 1,
        num_token_ids: int = 10,
        max_model_len: int = 1024,
        pause_s: float = 0.0,
        die_after: int | None = None,
        die_on_prompt: tuple[int, ...] = (),
        kill_on_prompt: tuple[int, ...] = (),
        hang_on_prompt: tuple[int, ...] = (),
        refuse_prompt: tuple[int, ...] = (),
        refuse_versions: tuple[int, ...] = (),
        finish_reasons: Mapping[int, str] | None = None,
        script: Callable[[list[int], int], list[int]] | None = None,
        image_token: int | None = None,
    ) -> None:
        self.policy_version = 0
        self.fingerprint = FINGERPRINT
        self.max_model_len = max_model_len
        self.takes_images = image_token is not None
        self.image_processor: dict[str, Any] = {}
        self._image_token = image_token
        self.images: list[PlacedImages] = []
        """Those of each request."""
        self.closed = False
        self.is_frozen = False
        self.loaded_versions: list[int] = []
        self.requests: list[str] = []
        self.samplings: list[SamplingSettings] = []
        self.seeds: list[int | None] = []
        self.num_active = 0
        self.most_active = 0
        self.cancelled: list[str] = []
        self.token_s = token_s
        self._num_tokens = num_tokens
        self._first_token = first_token
        self._num_token_ids = num_token_ids
        self._pause_s = pause_s
        self._die_after = die_after
        self._die_on_prompt = list(die_on_prompt)
        self._kill_on_prompt = list(kill_on_prompt)
        self._hang_on_prompt = list(hang_on_prompt)
        self._refuse_prompt = list(refuse_prompt)
        self._refuse_versions = set(refuse_versions)
        self._finish_reasons = finish_reasons or {}
        self._script = script
        self._running: dict[str, tuple[list[list[int]], list[int], SamplingSettings]] = {}
        """The rows of each request, the versions of its steps so far, and its settings."""
        self.sampling = asyncio.Event()
        self.may_sample = asyncio.Event()
        """While a test has it cleared, every request waits before its next step."""
        self.may_sample.set()
        self.may_load = asyncio.Event()
        """While a test has it cleared, loads wait before the new weights take effect."""
        self.may_load.set()
        self.sampling.set()

    async def expand(self, prompt_token_ids: list[int], files: Sequence[bytes]) -> tuple[list[int], PlacedImages]:
        """Puts as many `image_token` in the place of one as an image is wide."""
        if self._image_token is None or prompt_token_ids.count(self._image_token) != len(files):
            raise ValueError(f"{len(files)} images, expected none, or one for each placeholder")
        ids: list[int] = []
        places: list[ImagePlace] = []
        left = iter(files)
        for token in prompt_token_ids:
            size = 1
            if token == self._image_token:
                size = decoded(data := next(left)).width
                places.append(ImagePlace(digest_of(data), len(ids), len(ids) + size))
            ids += [token] * size
        return ids, PlacedImages(tuple(places), {digest_of(data): data for data in files})

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
        images: PlacedImages = NO_IMAGES,
    ) -> list[Completion]:
        self.images.append(images)
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        self.requests.append(request_id)
        self.samplings.append(sampling)
        self.seeds.append(seed)
        if self._die_after is not None and len(self.requests) > self._die_after:
            raise EngineError("the scripted engine has died")
        if _starts_with(prompt_token_ids, self._die_on_prompt):
            raise EngineError("the scripted engine died of a prompt")
        if _starts_with(prompt_token_ids, self._kill_on_prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        if _starts_with(prompt_token_ids, self._refuse_prompt):
            raise ValueError("the scripted engine refuses this prompt")
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            if _starts_with(prompt_token_ids, self._hang_on_prompt):
                await asyncio.Event().wait()
            return await self._sample(prompt_token_ids, sampling, num_siblings, seed, request_id)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        finally:
            self.num_active -= 1
            self._running.pop(request_id, None)

    def sampled(self, request_id: str) -> list[Completion]:
        if request_id not in self._running:
            return []
        rows, versions, sampling = self._running[request_id]
        return self._completions(rows, versions, sampling)

    async def _sample(
        self, prompt_ids: list[int], sampling: SamplingSettings, num_siblings: int, seed: int | None, request_id: str
    ) -> list[Completion]:
        rows = [self._tokens(prompt_ids, sibling, sampling, seed) for sibling in range(num_siblings)]
        versions: list[int] = []
        self._running[request_id] = rows, versions, sampling
        for _ in range(max(len(row) for row in rows)):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            await self.may_sample.wait()
            await self.sampling.wait()
            versions.append(self.policy_version)
            self.stepped(request_id, len(versions))
        return self._completions(rows, versions, sampling)

    def stepped(self, request_id: str, num_sampled: int) -> None:
        """Called after each step of a request; for subclasses."""

    def _completions(self, rows: list[list[int]], versions: list[int], sampling: SamplingSettings) -> list[Completion]:
        """Returns the rows as far as they are sampled, with a version for each step."""
        completions = []
        for sibling, row in enumerate(rows):
            sampled = row[: len(versions)]
            reason: Any = self._finish_reasons.get(sibling, "stop") if len(sampled) == len(row) else "abort"
            completions.append(
                Completion(
                    token_ids=array("i", sampled).tobytes(),
                    behavior_logprobs=array("f", [-0.5 - 0.01 * t for t in range(len(sampled))]).tobytes(),
                    version_spans=spans(versions[: len(sampled)]),
                    finish_reason=reason,
                    sampling_mask=_masks(sampled, sampling.top_k) if sampling.is_truncated else None,
                    top_logprobs=_top(sampled, sampling.top_logprobs) if sampling.top_logprobs else None,
                )
            )
        return completions

    def _tokens(self, prompt_ids: list[int], sibling: int, sampling: SamplingSettings, seed: int | None) -> list[int]:
        if self._script is not None:
            return self._script(prompt_ids, sibling)[: sampling.max_tokens]
        key = 0 if sampling.temperature == 0 else sibling
        seeded = f"{seed}".encode() if seed is not None and sampling.temperature else b""
        noise = zlib.crc32(array("i", [*prompt_ids, key]).tobytes() + seeded)
        length = min(self._num_tokens, sampling.max_tokens)
        return [self._first_token + (noise + 7 * t) % self._num_token_ids for t in range(length)]

    @property
    def is_loading(self) -> bool:
        return not self.sampling.is_set()

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        started = time.perf_counter()
        if not await asyncio.to_thread(Path(path).is_file):
            raise WeightLoadError(f"{path}: no such file")
        if manifest.version in self._refuse_versions:
            raise WeightLoadError(f"version {manifest.version}: refused by the script")
        self.sampling.clear()
        try:
            await asyncio.sleep(self._pause_s)
            await self.may_load.wait()
            self.policy_version = manifest.version
            self.loaded_versions.append(manifest.version)
        finally:
            self.sampling.set()
        return time.perf_counter() - started

    async def check(self) -> None:
        if self.is_frozen:
            raise EngineError("the scripted engine is frozen")

    async def close(self) -> None:
        self.closed = True


def completion_of(ids: Sequence[int], version: int = 0, *, reason: Any = "stop") -> Completion:
    """Returns a completion of these ids, sampled by one version."""
    return Completion(
        token_ids=array("i", ids).tobytes(),
        behavior_logprobs=array("f", [-0.5] * len(ids)).tobytes(),
        version_spans=spans([version] * len(ids)),
        finish_reason=reason,
    )


async def start(config: RunConfig, *, seed: int) -> ScriptedEngine:
    """Makes the engine; a factory for `penstock.producers.__main__.main`."""
    settings: dict[str, Any] = json.loads(os.environ.get(SETTINGS_VARIABLE, "{}"))
    return ScriptedEngine(**settings)


def _starts_with(prompt_ids: list[int], ids: list[int]) -> bool:
    return bool(ids) and prompt_ids[: len(ids)] == ids


def _top(ids: list[int], count: int) -> TopLogprobs:
    """Returns likeliest ids as if each token were the first of `count`."""
    rows = [token + n for token in ids for n in range(count)]
    return TopLogprobs(count, array("i", rows).tobytes(), array("f", [-0.5 - (id % 7) for id in rows]).tobytes())


def _masks(ids: list[int], top_k: int) -> tuple[bytes, ...]:
    """Returns masks as if each token were the first of `top_k` that were kept."""
    return tuple(array("i", range(token, token + top_k)).tobytes() for token in ids)
