"""Environments of the library SkyRL-gym, as published, on rows as SkyRL reads them."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed: pip install -e '.[dev]'")

from penstock.producers.environments.skyrl import SkyRLEnvironment
from penstock.producers.interfaces import Environment
from penstock.schemas.config import EnvironmentConfig
from penstock.schemas.process.plugins import construct
from scripted_conversation import ScriptedConversation

ROW = {
    "prompt": [{"role": "user", "content": "What is 2+3?"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"method": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0},
}


def write(folder: Path, **changes: Any) -> str:
    (folder / "train.jsonl").write_text(json.dumps(ROW | changes))
    return str(folder / "train.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_turns_observations_rewards_and_metrics_are_its_own(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path)
    if suffix == ".parquet":
        file = str(tmp_path / "train.parquet")
        pq.write_table(pa.Table.from_pylist([ROW]), file)
    environment = SkyRLEnvironment(seed=0, training=file, evaluation=file, max_turns=4)
    assert (environment.num_tasks, environment.num_evaluation_prompts) == (1, 1)
    conversation = ScriptedConversation("#### 7", "I do not know", "#### 5")
    reward = await environment.converse(environment.prompt(1), conversation)
    assert (reward.value, reward.parts) == (1.05, {"finished": 1.0, "steps": 3.0})
    assert conversation.read[1].startswith("Please provide your step-by-step reasoning")
    assert (await environment.reward(environment.evaluation_prompt(1), "#### 5")).value == 1.0


@pytest.mark.parametrize(
    ("changes", "kwargs", "message"),
    [
        ({}, {"id": "gsm8"}, "no such environment, expected one of 7 such as gsm8k"),
        ({"env_class": None}, {}, "train.jsonl:1: no env_class, expected it in each row, or an id for all"),
        ({"reward_spec": {}}, {}, "train.jsonl:1: AssertionError: reward_spec.ground_truth is required"),
        ({}, {"id": "search"}, "Missing key search_url"),
        ({}, {"max_turns": 0}, "max_turns is 0, expected at least 1"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {},
            "column 'prompt': an image as None, expected bytes",
        ),
    ],
)
def test_what_cannot_be_begun_is_an_error_of_the_run_file(tmp_path: Path, changes, kwargs, message: str) -> None:
    kwargs = {"training": write(tmp_path, **changes), **kwargs}
    plug = EnvironmentConfig(path="penstock.producers.environments.skyrl:SkyRLEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)


async def test_the_row_of_the_page_is_worth_its_answer(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text("utf-8")
    (row,) = re.findall(r'^\{"prompt": .*"env_class".*\}$', page, re.M)
    (tmp_path / "train.jsonl").write_text(row)
    environment = SkyRLEnvironment(seed=0, training=str(tmp_path / "train.jsonl"), max_turns=3)
    rewards = [await environment.reward(environment.prompt(1), text) for text in ("It is #### 14", "It is #### 6")]
    assert [reward.value for reward in rewards] == [1.0, 0.0]
