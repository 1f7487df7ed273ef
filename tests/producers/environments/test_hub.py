"""Data sets of the Hugging Face Hub, by the real library and a server that answers as the Hub does."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pyarrow
import pyarrow.parquet
import pytest

from hub_server import Files, HubServer, commit_of

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""
PROGRAM = """
import json, sys
from penstock.producers.environments.dataset import Dataset

found = []
for kwargs in json.loads(sys.argv[1]):
    try:
        opened = Dataset(seed=0, columns={"prompt": "question", "answer": "answer"}, shuffle=False, **kwargs)
        prompt = opened.prompt(1)
        found.append([opened.num_tasks, opened.num_evaluation_prompts, prompt.messages[0].content, prompt.answer])
    except ValueError as error:
        found.append(str(error))
print(json.dumps(found))
"""
"""The library reads the Hub's address when it is imported, so that it runs in a process of its own."""


def files(tag: str) -> Files:
    def parquet(split: str, count: int) -> bytes:
        rows = [{"question": f"{tag} {split} {n}", "answer": str(n)} for n in range(count)]
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        return buffer.getvalue()

    sizes = {"main/train": 5, "main/test": 2, "socratic/train": 1}
    return {"README.md": CARD} | {f"{name}-00000-of-00001.parquet": parquet(name, n) for name, n in sizes.items()}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    server = HubServer({"lab/sums": {"main": files("new"), "v1": files("old")}})
    yield server
    server.close()


@pytest.fixture(scope="module")
def opened(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> list:
    cases: list[dict] = [
        {"subset": "main", "evaluation": "lab/sums"},
        {"subset": "socratic"},
        {"subset": "main", "revision": "v1"},
        {"subset": "main", "revision": commit_of(files("old"))},
        {"training": "lab/products"},
        {"subset": "main", "revision": "v2"},
        {"subset": "hard"},
        {"subset": "main", "split": "validation"},
        {"subset": "socratic", "evaluation": "lab/sums"},
        {},
    ]
    home = tmp_path_factory.mktemp("home")
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    asked = json.dumps([{"training": "lab/sums", **case} for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked], env=variables, cwd=home, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_name_is_read_by_subset_split_and_revision(opened: list, hub: HubServer) -> None:
    assert opened[:4] == [
        [5, 2, "new main/train 0", "0"],
        [1, 0, "new socratic/train 0", "0"],
        [5, 0, "old main/train 0", "0"],
        [5, 0, "old main/train 0", "0"],
    ]
    read = [each for each in hub.requests if each.startswith("GET") and each.endswith(".parquet")]
    assert len(read) == len(set(read)), "each file is downloaded once"


def test_what_the_hub_has_not_is_named(opened: list) -> None:
    expected = [
        ["training: 'lab/products' with split = 'train'", "doesn't exist on the Hub"],
        ["training: 'lab/sums' with subset = 'main', split = 'train', revision = 'v2'", "v2"],
        ["training: 'lab/sums' with subset = 'hard'", "Available: ['main', 'socratic']"],
        ["training: 'lab/sums' with subset = 'main', split = 'validation'", "['train', 'test']"],
        ["evaluation: 'lab/sums' with subset = 'socratic', split = 'test'", "['train']"],
        ["training: 'lab/sums' with split = 'train'", "Config name is missing."],
    ]
    for error, texts in zip(opened[4:], expected, strict=True):
        assert all(text in error for text in texts) and "\n" not in error, texts
