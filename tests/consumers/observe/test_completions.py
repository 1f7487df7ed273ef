"""Which completions are shown, and as which text."""

from pathlib import Path
from typing import Any

import pytest

from inspected_run import byte_tokenizer, known, plain, turns
from penstock.consumers.observe.completions import SHOWN, CompletionTexts
from penstock.schemas.config import ConfigError, RunConfig, config_of


def config(model: Path, **metrics: Any) -> RunConfig:
    tables = {"environment": {"path": "a:B"}, "model": {"path": str(model)}, "metrics": metrics}
    return config_of({"name": "r", **tables}, Path("x"))


def test_completions_are_decoded_when_it_is_time_and_spread_over_the_batch(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    texts = CompletionTexts(config(tmp_path, tensorboard=True, completions_every=5))
    groups = [plain(index)[0] for index in range(1, 17)]
    assert texts.of(groups, 4) == () and CompletionTexts(config(Path("none"))).of(groups, 5) == ()
    shown = texts.of(groups, 10)
    assert len(shown) == SHOWN and shown[1] == (10, groups[2].environment, "3+3=", "ok", 0.03)
    assert [each.prompt for each in shown] == [f"{index}+{index}=" for index in range(1, 17, 2)]
    of_two = texts.of([known()[0], turns()[0]], 5)
    assert [(each.environment, each.prompt, each.completion) for each in of_two] == [
        (known()[0].environment, "2+2=", "abcdef"),
        ("tools", "ask tool result ", "end"),
    ]


def test_a_model_without_a_tokenizer_and_completions_without_a_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"completions_every = 5: no tokenizer can be loaded from model.path = "):
        CompletionTexts(config(tmp_path, tensorboard=True, completions_every=5))
    with pytest.raises(
        ConfigError, match=r"metrics.completions_every = 5: there is nothing to show them in; expected met"
    ):
        config(tmp_path, completions_every=5)
