"""Models, policies and expected logprobs for tests of the engine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3ForCausalLM

from penstock.schemas.config import RunConfig
from penstock.schemas.policy import WeightManifest
from shared_engine import StateDict, publish, qwen3, reference_logprobs, run_config, weights_of


@pytest.fixture(scope="session")
def make_qwen3() -> Callable[..., Qwen3ForCausalLM]:
    return qwen3


@pytest.fixture(scope="session")
def make_config() -> Callable[..., RunConfig]:
    return run_config


@pytest.fixture(scope="session")
def parameters() -> Callable[[Qwen3ForCausalLM], StateDict]:
    return weights_of


@pytest.fixture(scope="session")
def write_policy() -> Callable[[StateDict, int, Path], tuple[WeightManifest, str]]:
    return publish


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    return reference_logprobs
