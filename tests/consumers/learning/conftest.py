"""A tiny model that all tests of the learner read."""

from pathlib import Path

import pytest

from training_groups import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model(folder)
    return folder
