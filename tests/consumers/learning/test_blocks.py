"""The blocks of a model, compiled: what changes with `trainer.compile`, and what does not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.blocks import compile_blocks
from penstock.schemas.config import ConfigError, ModelConfig, RunConfig, TrainerConfig
from training_groups import configuration, lag_from, random_group, random_groups, tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """What has been compiled, by a compiler that leaves it as it is."""
    found: list[torch.fx.GraphModule] = []
    real = torch.compile

    def keep(program: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(program)
        return program.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=keep, **options))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def _config(folder: Path, dtype: str, **trainer: bool) -> RunConfig:
    tiny_model(folder)
    settings = TrainerConfig(device="cpu", learning_rate=1e-3, tokens_per_microbatch=60, **trainer)
    return configuration(folder, model=ModelConfig(path=str(folder), dtype=dtype), trainer=settings)


# Torch hides this warning itself, by a filter that has no say where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_train_the_same_weights_and_are_compiled_once(tmp_path, programs) -> None:
    eager = _config(tmp_path, "bfloat16", gradient_checkpointing=True)
    compiled = replace(eager, trainer=replace(eager.trainer, compile=True))
    expected, found = Learner(eager), Learner(compiled)
    num_programs = []
    for seed in range(3):
        for learner in (expected, found):
            # The last group has no reward variance: it is scored without gradient.
            groups = [*random_groups(4, seed), random_group(5, seed, rewards=[1.0] * 4)]
            learner.step(learner.pack(groups, lag_from(7)))
        num_programs.append(len(programs))
    assert num_programs[0] > 1 and num_programs == num_programs[:1] * 3, "rows of other lengths are compiled again"
    weights = found.published_weights()
    assert weights.keys() == expected.published_weights().keys()
    for name, tensor in expected.published_weights().items():
        assert torch.equal(weights[name], tensor), name
    assert found.model.state().keys() == expected.model.state().keys()


# The compiler's import uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_a_compiler_or_blocks_the_setting_is_refused_at_the_start(tmp_path) -> None:
    config = _config(tmp_path, "float32", compile=True)
    message = r"trainer\.compile = true: .*No working C\+\+ compiler.*expected a C\+\+ comp"
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with no_compiler, pytest.raises(ConfigError, match=message):
        Learner(config)
    with pytest.raises(ConfigError, match=r"trainer\.compile = true: the blocks of Linear cannot be found .* false"):
        compile_blocks(torch.nn.Linear(2, 2), CPU)
