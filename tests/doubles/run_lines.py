"""Lines of a run's files as its trainer writes them."""

import json
from pathlib import Path
from typing import Any


def update_line(update: int, **fields: Any) -> dict[str, Any]:
    """A line of updates.jsonl: 40 tokens of which 30 have lag 1, 10 s after the one before."""
    line = {
        "update": update,
        "policy_version": update,
        "time_s": 1000.0 + 10.0 * update,
        "reward": 0.5,
        "ess_fraction": 1.0 - update / 100,
        "lag_histogram": {"0": 10, "1": 30},
        "num_tokens_trained": 40,
        "num_tokens_masked_lag": 0,
        "num_groups_trained": 3,
        "num_groups_skipped": 1,
        "masked_frac": 0.0,
        "queue_depth": 2,
        "wait_s": 1.0,
        "step_s": 7.0,
        "publish_s": 0.5,
    }
    return line | fields


def ledger_line(num_updates: int, **counts: int) -> dict[str, Any]:
    """The content of trainer.json of a finished run. counts: groups by outcome."""
    outcomes = {f"num_groups_{outcome}": count for outcome, count in counts.items()}
    return outcomes | {"num_updates": num_updates, "finished": True}


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
