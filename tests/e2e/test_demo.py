"""The demo's run file, shortened: killed and resumed, it learns and its ledger balances."""

import pytest

from demo_run import DemoRun
from penstock.schemas.policy import VERSIONS_PER_EPOCH

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_killed_demo_is_resumed_learns_and_balances_its_ledger(resumed_run: DemoRun) -> None:
    updates = resumed_run.updates()
    summary = resumed_run.read("summary.json")
    settled = sum(summary[f"num_groups_{outcome}"] for outcome in ("trained", "skipped", "dead", "cancelled"))
    assert summary["num_groups_released"] == settled
    assert summary["num_groups_dead"] == summary["num_groups_cancelled"] == 0
    assert summary["num_updates"] == updates[-1]["update"]
    assert summary["held_out"]["reward/exact"]["final"] > summary["held_out"]["reward/exact"]["initial"] + 0.2
    assert summary["mismatch_lag0"] is None or summary["mismatch_lag0"] < 1e-5
    assert summary["engine"]["logprobs_mode"] == "processed_logprobs"
    assert (resumed_run.folder / "report.html").stat().st_size > 100_000
    versions = [line["policy_version"] for line in updates]
    assert max(versions) > VERSIONS_PER_EPOCH, "the resumed trainer is of a later epoch"
    assert len(set(versions)) == len(versions), "a version was used twice"
    ledger = resumed_run.read("trainer.json")
    assert ledger["finished"] and ledger["num_updates"] == summary["num_updates"]
    seen, epoch = resumed_run.read("seen.json"), max(versions) // VERSIONS_PER_EPOCH
    of_this_session = [line for line in updates if line["policy_version"] // VERSIONS_PER_EPOCH == epoch]
    assert [row["update"] for row in seen["updates"]] == [line["update"] for line in of_this_session]
    assert [row["reward"] for row in seen["updates"]] == [line["reward"] for line in of_this_session]
    assert seen["evaluations"][-1]["reward/exact"] == summary["held_out"]["reward/exact"]["final"]
