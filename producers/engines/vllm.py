"""The vLLM engine: every setting that affects a logprob is explicit and verified; weights are replaced in flight."""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from vllm import SamplingParams, __version__
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_cls
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from penstock.producers.engines.completions import Reported, pack, pack_unfinished
from penstock.producers.engines.engine_process import boot, ends_alone, set_environment, shut_down
from penstock.producers.engines.images import ImagePrompts, image_processor_of
from penstock.producers.engines.routes import CAPTURE_ROUTES
from penstock.producers.engines.settings import engine_arguments, fingerprint, verify
from penstock.producers.engines.update import TRY, UPDATE, results_of
from penstock.producers.engines.weight_files import BaseModel, check, check_range
from penstock.producers.engines.weight_transfer import ADAPTER_ID, ADAPTER_NAME, BACKEND, EngineReport
from penstock.producers.interfaces import (
    NO_IMAGES,
    CaptureError,
    Completion,
    EngineError,
    PlacedImages,
    Restore,
    WeightLoadError,
)
from penstock.schemas.config import RunConfig
from penstock.schemas.policy import WeightManifest
from penstock.schemas.rollout import EngineFingerprint, SamplingSettings
from penstock.schemas.routes import kind_of

PARAMS_KEPT = 256
"""`SamplingParams` kept for reuse: agents' calls ask for any number of tokens up to the context."""
ANSWER_S = 60.0
"""How long the engine's process may take to answer while it loads no weights: many times its longest step."""
DEAD = "vLLM's engine process has died; see its log"


class VllmEngine:
    """One vLLM engine; see `penstock.producers.interfaces.Engine`. Built by `start`.

    max_model_len: the longest prompt plus completion, in tokens.
    """

    def __init__(self, llm: AsyncLLM, found: EngineFingerprint, config: RunConfig, base: BaseModel) -> None:
        self.policy_version = 0
        self.fingerprint = found
        self.max_model_len: int = llm.vllm_config.model_config.max_model_len
        self._vocabulary: int = llm.vllm_config.model_config.get_vocab_size()
        self._llm = llm
        self._base = base
        self._dtype = config.model.dtype
        self._salted = config.engine.prefix_caching
        kind = kind_of(llm.vllm_config.model_config.get_num_experts()) if config.model.replay_routes else None
        self._reported = Reported(config.sampling.is_truncated, kind)
        self._drained = config.engine.update == "drained"
        self._lora = config.lora
        self._adapter = None if config.lora is None else LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME)
        """Sent with every request; its path is never read, because the adapter is already loaded."""
        self._files = base.files if config.lora is None else []
        self._loading = asyncio.Lock()
        self._images: ImagePrompts | None = None
        self.image_processor: dict[str, Any] = {}
        """See `penstock.producers.interfaces.Engine`."""

    @classmethod
    async def start(cls, config: RunConfig, *, seed: int | None = None) -> "VllmEngine":
        """Boots an engine on `config.model.path`, labelled version 0, verified and warm; without weights there it
        starts on random ones.

        Args:
            seed: random seed of the engine's sampling; engines with the same one sample the same noise. None takes
                config.seed.

        Raises:
            EngineError: vLLM finds no device, refuses the model or a setting, or reports a value that was not
                requested.
        """
        if current_platform.is_unspecified():
            raise EngineError(
                "the installed vLLM is built for GPUs and finds none: expected an NVIDIA GPU that CUDA_VISIBLE_DEVICES "
                "does not hide, or the extra [cpu]"
            )
        base = BaseModel(config.model.path)
        check_range(base, config.model.dtype)
        cpu = current_platform.is_cpu()
        num_gpus = None if cpu else current_platform.device_count()
        arguments = engine_arguments(config, config.seed if seed is None else seed, cpu=cpu, num_gpus=num_gpus)
        arguments["weight_transfer_config"] = {"backend": BACKEND}
        arguments["worker_extension_cls"] = f"{EngineReport.__module__}.{EngineReport.__qualname__}"
        if not base.files:  # nothing is served before an announced policy is loaded
            if config.lora is not None:
                raise EngineError(
                    f"model.path = {config.model.path!r}: no safetensors weights there, and with [lora] the policies "
                    "are adapters alone; expected the base model"
                )
            arguments["load_format"] = "dummy"
        set_environment(config)
        with ends_alone(config.model.path) as ends:
            llm = await boot(ends | arguments)
        try:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest({}))
            if config.lora is not None:
                await llm.collective_rpc("penstock_adapt", args=(config.lora.scaling,))
            await llm.update_weight_version("0")
            reports = await llm.collective_rpc("penstock_report")
            verify(arguments, config, reports)
            engine = cls(llm, fingerprint(config, reports[0], __version__), config, base)
            if config.sampling.top_logprobs > engine._vocabulary:
                raise EngineError(
                    f"sampling.top_logprobs = {config.sampling.top_logprobs}: model.path = {config.model.path!r} has a "
                    f"vocabulary of {engine._vocabulary}; expected at most that"
                )
            await engine._on_ranks("penstock_unlink_memory")
            if config.model.replay_routes and cpu:
                await engine._answered(llm.engine_core.call_utility_async(CAPTURE_ROUTES))
            if _takes_images(llm):
                model: Any = get_model_cls(llm.vllm_config.model_config)
                engine._images = await ImagePrompts.of(llm.renderer, model.get_placeholder_str("image", 1))
                engine.image_processor = image_processor_of(llm.renderer.mm_processor)
            await engine._warm_up(config)
        except BaseException:
            await shut_down(llm)
            raise
        return engine

    @property
    def takes_images(self) -> bool:
        """See `penstock.producers.interfaces.Engine`."""
        return self._images is not None

    async def expand(self, prompt_token_ids: list[int], files: Sequence[bytes]) -> tuple[list[int], PlacedImages]:
        """See `penstock.producers.interfaces.Engine`."""
        if self._images is not None:
            return await self._images.expand(prompt_token_ids, files)
        if files:
            raise ValueError("the prompt holds an image, expected text: the policy is a model of text")
        return prompt_token_ids, NO_IMAGES

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
        """Samples `num_siblings` completions of one prompt; cancelling the call aborts the request. A completion ends
        after the token that completes one of the texts `stop`, special tokens spelled out.

        seed: sibling n draws by `seed + n` alone; None draws from the engine's own generator.
        images: of the prompt, as `expand` has placed them.

        Raises:
            ValueError: vLLM refuses the request (an empty or too long prompt, an id outside the vocabulary, images that
                its processor expands to other tokens).
            EngineError: the engine has stopped.
        """
        # A new request must not reuse KV that older weights computed.
        salt = str(self.policy_version) if self._salted else None
        params = sampling_params(sampling, num_siblings, masked=self._reported.masks, stop=tuple(stop), seed=seed)
        return await self._run(prompt_token_ids, params, request_id, salt, images)

    def sampled(self, request_id: str) -> list[Completion]:
        """Returns the siblings of a running request as far as they are sampled; see
        `penstock.producers.interfaces.Engine`. Reads what vLLM collects in this process for the final answer, without a
        call to the engine's process."""
        processor = self._llm.output_processor
        states = [processor.request_states[name] for name in processor.external_req_ids.get(request_id, ())]
        if not states:
            return []
        parent = states[0].parent_req
        outputs: list[Any] = [None] if parent is None else parent.output_aggregator
        found = {n: pack(one, request_id, self._reported) for n, one in enumerate(outputs) if one is not None}
        found |= {one.request_index: pack_unfinished(one, request_id, self._reported) for one in states}
        # A sibling that vLLM has not been handed yet is in neither place.
        return [found[n] for n in range(len(outputs))] if len(found) == len(outputs) else []

    async def _run(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        salt: str | None,
        images: PlacedImages = NO_IMAGES,
    ) -> list[Completion]:
        """Samples as `generate` does, reusing only KV cached under the same `salt`."""
        self._check_prompt(prompt_token_ids, request_id)
        prompt: Any = tokens_input(prompt_token_ids, cache_salt=salt)
        if images.places:
            if self._images is None:
                raise ValueError(f"request {request_id} refused: an image, expected text alone for a model of text")
            prompt = await self._images.request(prompt_token_ids, images)
            if salt is not None:
                prompt["cache_salt"] = salt
        final: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, params, request_id, lora_request=self._adapter):
                final = output
        except VLLMClientError as error:
            raise ValueError(f"request {request_id} refused: {error}") from error
        except EngineDeadError as error:
            raise EngineError(DEAD) from error
        except EngineGenerateError as error:
            raise EngineError(f"request {request_id}: {error.__cause__!r}") from error
        if final is None or final.prompt_token_ids != prompt_token_ids:
            raise EngineError(f"request {request_id}: the engine has answered a different prompt")
        return [pack(output, request_id, self._reported) for output in final.outputs]

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        """Replaces the weights in flight with those of the safetensors file at `path`, which is verified; see
        `penstock.producers.interfaces.Engine`.

        Requests in flight keep their KV and continue with the new weights; requests that arrive meanwhile wait. With
        engine.update = "drained" the load waits for those in flight to end, and clears the cache. Cancelling the call
        does not interrupt the load: the call returns once the file is no longer read.

        Returns:
            The seconds during which no token was sampled, without the wait for requests to end.

        Raises:
            WeightLoadError: the old version still serves, under its own label.
            EngineError: the old version could not be restored; nothing is sampled any more.
        """
        replacing = asyncio.ensure_future(self._replace_weights(manifest, path, restore))
        try:
            return await asyncio.shield(replacing)
        finally:
            while not replacing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({replacing})
            replacing.exception()

    async def capture(self, token_ids: list[int], path: str) -> None:
        """Writes the hidden states of a replayed sequence to `path`; see `InspectableEngine.capture`.

        Raises:
            ValueError: vLLM refuses the sequence.
            CaptureError: the engine is not idle, or vLLM's model has an architecture that cannot be recorded.
            EngineError: the engine has stopped.
        """
        async with self._loading:
            if running := self._llm.get_num_unfinished_requests():
                raise CaptureError(f"hidden states: {running} requests in flight, expected an idle engine")
            try:
                await self._on_ranks("penstock_begin_capture", token_ids)
                await self._replay(token_ids)
                await self._on_ranks("penstock_capture_as_served")
                await self._replay(token_ids)
                await self._on_ranks("penstock_end_capture", path, self.policy_version)
            except EngineDeadError as error:
                raise EngineError(DEAD) from error
            except (ValueError, EngineError):
                raise
            except Exception as error:  # vLLM hands every failure in a worker over as a bare Exception
                raise CaptureError(f"hidden states: {error}") from error
            finally:
                if not self._llm.errored:
                    await self._on_ranks("penstock_end_capture", None, 0)

    async def _on_ranks(self, method: str, *arguments: Any) -> None:
        """Calls a method of every worker; raises RuntimeError once all have answered if one failed."""
        results_of(await self._answered(self._llm.collective_rpc(TRY, args=(method, *arguments))))

    async def _replay(self, token_ids: list[int]) -> None:
        """Computes a sequence again, bypassing the prefix cache."""
        name = f"replay-{uuid.uuid4()}"
        salt = name if self.fingerprint.prefix_caching else None
        params = sampling_params(SamplingSettings(temperature=0, max_tokens=1), 1, masked=self._reported.masks)
        await self._run(token_ids, params, name, salt)

    async def check(self) -> None:
        """Waits up to `ANSWER_S` for an answer of the engine's process; see `penstock.producers.interfaces.Engine`."""
        if self._loading.locked():  # it answers after the load, which may take long
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._answered(self._llm.engine_core.call_utility_async("get_supported_tasks"))
        except EngineDeadError as error:
            raise EngineError(DEAD) from error
        except TimeoutError:
            pids = ", ".join(str(process.pid) for process in self._llm.engine_core.resources.engine_manager.processes)
            raise EngineError(
                f"vLLM's engine process (pid {pids}) is frozen: no answer within {ANSWER_S:g} s; it is stopped, or its "
                "device does not answer"
            ) from None

    async def close(self) -> None:
        """Kills the engine process; requests in flight fail with EngineError."""
        async with self._loading:
            await shut_down(self._llm)

    async def _replace_weights(self, manifest: WeightManifest, path: str, restore: Restore | None) -> float:
        async with self._loading:
            check(path, manifest, self._base, self._dtype, self._lora)
            pause_s = await self._load(path, manifest, restore)
            self.policy_version, self._files = manifest.version, [path]
            return pause_s

    async def _load(self, path: str, manifest: WeightManifest, restore: Restore | None) -> float:
        """Loads the file at `path`; after a failure, the weights of `policy_version` again."""
        try:
            return await self._update([path], manifest.version)
        except EngineDeadError as error:
            raise EngineError(DEAD) from error
        except Exception as error:  # vLLM hands every failure in a worker over as a bare Exception
            try:
                await self._update(self._files if restore is None else [await restore()], self.policy_version)
            except EngineDeadError:
                raise EngineError(DEAD) from error
            except Exception as second:
                raise EngineError(
                    f"policy {manifest.version} could not be loaded ({error}), nor policy {self.policy_version} again "
                    f"({second})"
                ) from second
            raise WeightLoadError(f"policy {manifest.version}: {error}") from error

    async def _update(self, paths: list[str], version: int) -> float:
        """Loads `paths` and labels them; returns the seconds during which no token was sampled."""
        # One call in place of pause_generation(), update_weights() and their like, each a round trip.
        call = self._llm.engine_core.call_utility_async
        pause_s, _ = await self._answered(call(UPDATE, paths, str(version), self._salted, self._drained))
        return float(pause_s)

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Returns the answer of the engine's process; vLLM alone would wait for ever for one that has died.

        Raises:
            EngineDeadError: it has died.
        """
        calling, watch = asyncio.ensure_future(call), self._llm.output_handler
        try:
            # The output handler ends with the process.
            await asyncio.wait({calling} if watch is None else {calling, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise EngineDeadError()
            return calling.result()
        finally:
            calling.cancel()

    async def _warm_up(self, config: RunConfig) -> None:
        """Compiles the kernels for one sequence and for many before the first request."""
        asked = config.sampling
        sampling = SamplingSettings(
            top_k=asked.top_k, top_p=asked.top_p, max_tokens=3, top_logprobs=asked.top_logprobs or msgspec.UNSET
        )
        for num_siblings in (1, config.engine.max_num_seqs):
            await self.generate([0] * min(4, self.max_model_len - 1), sampling, num_siblings, f"warm-up-{num_siblings}")

    def _check_prompt(self, ids: list[int], request_id: str) -> None:
        """Raises ValueError for a prompt that vLLM cannot take; an id outside the vocabulary would crash the engine."""
        if not 0 < len(ids) < self.max_model_len:
            raise ValueError(f"request {request_id} refused: {len(ids)} tokens, expected 1 to {self.max_model_len - 1}")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(
                f"request {request_id} refused: token ids from {min(ids)} to {max(ids)}, expected 0 to "
                f"{self._vocabulary - 1}"
            )


def _takes_images(llm: AsyncLLM) -> bool:
    """Returns whether prompts may hold images: of a model of text, and without a tokenizer, they may not."""
    renderer = llm.renderer
    if renderer.mm_processor is None or renderer.tokenizer is None:
        return False
    return renderer.mm_processor.info.allowed_mm_limits.get("image", 0) > 0


@functools.lru_cache(PARAMS_KEPT)
def sampling_params(
    sampling: SamplingSettings, num_siblings: int, *, masked: bool, stop: tuple[str, ...] = (), seed: int | None = None
) -> SamplingParams:
    """Returns vLLM's parameters of a request. masked: the engine reports the ids that each token was sampled from."""
    if masked and sampling.temperature == 0:
        # vLLM reports no mask at a temperature of 0, and refuses the request; this samples the same tokens.
        sampling = msgspec.structs.replace(sampling, temperature=1.0, top_k=1)
    return SamplingParams(
        n=num_siblings,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.top_logprobs or 0,
        flat_logprobs=True,
        stop=list(stop),
        detokenize=bool(stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
