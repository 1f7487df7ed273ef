"""Makes the telemetry of a run in one mode, as the benchmark reads it."""

from typing import Any

from bench.pipeline.modes import ModeRun
from penstock.deploy.report.telemetry import RunTelemetry, Update


def mode_run(step_s: float, num_updates: int, *, telemetry: dict[str, Any] | None = None, **fields: Any) -> ModeRun:
    """Returns a run whose updates are `step_s` apart. telemetry, fields: replace empty fields of its records."""
    updates = tuple(
        Update(
            update=n,
            policy_version=n,
            time_s=100.0 + n * step_s,
            lag_histogram={0: 10},
            num_tokens_trained=10,
            num_tokens_masked_lag=0,
            num_groups_trained=3,
            num_groups_skipped=1,
            wait_s=0.1,
            step_s=0.25,
            publish_s=0.05,
        )
        for n in range(1, num_updates + 1)
    )
    whole: dict[str, Any] = {"config": None, "ledger": None, "evaluations": (), "producers": {}, "missing": ()}
    found = RunTelemetry(name="b", updates=updates, num_torn_lines=0, **whole | (telemetry or {}))
    empty: dict[str, Any] = {"phases_s": [], "snapshots": [], "time_to_accuracy_s": None, "wall_s": 1.0}
    return ModeRun(telemetry=found, **empty | fields)
