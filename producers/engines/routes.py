"""Returns the experts of every token from vLLM's CPU build, whose model runner cannot do it itself.

On GPUs vLLM has `enable_return_routed_experts`. Here hooks on the routers write what they choose beside the KV cache,
by the place of each token in it. A token whose KV is reused, of a prefix or of a sibling, has there the experts by
which that KV was computed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from penstock.schemas.routes import UNKNOWN, kind_of

CAPTURE_ROUTES = "penstock_capture_routes"


class RouteCapture:
    """Mixed into vLLM's worker."""

    def penstock_capture_routes(self) -> None:
        """Returns every request's experts with its tokens from now on.

        Raises:
            RuntimeError: the model has no experts, or no layer that keeps the KV of all tokens.
        """
        worker: Any = self
        _Capture(worker.model_runner)


class _Capture:
    """Follows the steps of a model runner: the experts of a step's tokens, then of all places in the KV cache."""

    def __init__(self, runner: Any) -> None:
        config = runner.vllm_config.model_config
        experts, per_token = config.get_num_experts(), config.get_num_experts_per_tok()
        routers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        groups = runner.kv_cache_config.kv_cache_groups
        full = [n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        if not routers or not full:
            raise RuntimeError(
                f"model.replay_routes = true: {type(runner.model).__name__} has {len(routers)} layers of experts and "
                f"{len(full)} kinds of full attention; expected both"
            )
        self._runner, self._group = runner, full[0]
        self._block_size = groups[full[0]].kv_cache_spec.block_size
        kind = kind_of(experts)
        shape = (config.get_total_num_hidden_layers(), per_token)
        num_places = runner.kv_cache_config.num_blocks * self._block_size
        self._kept: np.ndarray = np.full((num_places, *shape), UNKNOWN[kind], dtype=kind)
        self._step = np.empty((runner.max_num_tokens, *shape), dtype=kind)
        for router in routers:
            router.router.set_capture_fn(partial(self._keep, router.layer_id))
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._outputs: dict[str, AuxRequestOutput] = {}
        runner.execute_model, runner.sample_tokens = self._executed, self._sampled

    def _keep(self, layer: int, chosen: Tensor) -> None:
        self._step[: len(chosen), layer] = chosen.numpy()

    def _executed(self, scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
        result = self._execute(scheduled, *arguments, **keywords)
        if scheduled.total_num_scheduled_tokens:
            self._outputs = self._read(scheduled)
        return result

    def _read(self, scheduled: Any) -> dict[str, AuxRequestOutput]:
        """Keeps the experts of a step's tokens; returns those of each request from where the scheduler wants them."""
        batch = self._runner.input_batch
        num_tokens = scheduled.total_num_scheduled_tokens
        places = batch.block_table[self._group].slot_mapping.gpu[:num_tokens].numpy()
        self._kept[places] = self._step[:num_tokens]
        starts: Mapping[str, int] = scheduled.aux_output_connector_metadata
        found = {}
        for row, name in enumerate(batch.req_ids):
            end = int(batch.num_computed_tokens_cpu[row]) + scheduled.num_scheduled_tokens[name]
            positions = np.arange(starts[name], end)
            blocks = np.asarray(self._runner.requests[name].block_ids[self._group])
            kept = self._kept[blocks[positions // self._block_size] * self._block_size + positions % self._block_size]
            found[name] = AuxRequestOutput(starts[name], kept)
        return found

    def _sampled(self, *arguments: Any, **keywords: Any) -> Any:
        output = self._sample(*arguments, **keywords)
        output.aux_output_connector_output, self._outputs = self._outputs, {}
        return output


class RouteOutputs:
    """In vLLM's scheduler: says from which token on a request's experts are wanted, and hands them over."""

    def build_connector_meta(self, scheduled: Any, requests: Mapping[str, Any]) -> dict[str, int]:
        """Returns the first token by request: before anything is sampled all of the prompt, then the last one. Tokens
        that are computed again after a preemption keep the experts by which the next one was sampled."""
        return {
            name: requests[name].num_tokens - 1 if requests[name].num_output_tokens else 0
            for name in scheduled.num_scheduled_tokens
        }

    def take_output(self, request: Any, outputs: Mapping[str, AuxRequestOutput]) -> np.ndarray:
        return outputs[request.request_id].rows

    def request_finished(self, request: Any) -> None:
        pass

    def reset(self) -> None:
        pass
