"""A short leg of the fault suite (`make chaos` runs the long ones), and the proof that the suite can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# In its own group: its processes need a core.
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("chaos")]

ROOT = Path(__file__).parents[2]


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_random_faults_lose_no_index_and_train_none_twice(tmp_path):
    # A trainer and one that stands by; fifteen kinds of faults.
    shown = chaos("--seed", "58", "--faults", "24", "--gap", "1.0", "--limit", "240", "--out", str(tmp_path))
    assert shown.returncode == 0, shown.stdout[-6000:] + shown.stderr[-3000:]
    (leg,) = json.loads((tmp_path / "results.json").read_bytes())["legs"]
    assert len(leg["faults"]) == 24
    verdict = leg["verdict"]
    assert verdict["num_trained"] > 100 and verdict["num_epochs"] > 2
    assert verdict["num_lost"] == verdict["num_trained_twice"] == 0 and not verdict["problems"]
    assert "0 indexes lost, 0 trained twice" in (tmp_path / "faults.md").read_text()


@pytest.mark.exhaustive
def test_a_protocol_that_is_broken_on_purpose_is_noticed(tmp_path):
    shown = chaos("--self-test", "--out", str(tmp_path))
    assert shown.returncode == 0, shown.stdout[-6000:] + shown.stderr[-3000:]
    files = sorted(tmp_path.glob("seed-*/results.json"))
    legs = [leg for file in files for leg in json.loads(file.read_bytes())["legs"]]
    noticed = {leg["leg"]["broken"] for leg in legs if leg["verdict"]["problems"]}
    assert noticed == {"reconciling", "ledger", "sharing"}
