"""What the trainer's parity gate has left in a run's folder."""

import sys
from pathlib import Path

import msgspec
from penstock.consumers.parity.report import REPORT_FILE, Verdict
from penstock.deploy.launch.run_folder import RUN_FILE


class _Report(msgspec.Struct):
    """The part of a report that is read back; its numbers may hold null for NaN."""

    verdict: Verdict
    gate: str = ""


def refusal(run_folder: Path, since_s: float) -> Verdict | None:
    """Why the gate has refused to train; None where it has not since `since_s`, in seconds since the epoch."""
    file = run_folder / REPORT_FILE
    try:
        if file.stat().st_mtime < since_s:
            return None
        report = msgspec.json.decode(file.read_bytes(), type=_Report)
    except (OSError, msgspec.DecodeError):
        return None  # the trainer's log, which is shown in any case, says why it has ended
    return report.verdict if report.gate == "refuse" and report.verdict.status != "parity" else None


def tell_refusal(run_folder: Path, since_s: float) -> bool:
    """Prints why the gate has refused to train, and what to do; False where it has not."""
    verdict = refusal(run_folder, since_s)
    if verdict is None:
        return False
    from penstock.deploy.parity.table import print_verdict

    print_verdict(verdict)
    print(f"report    {run_folder / REPORT_FILE}")
    print(
        "penstock: the parity gate refuses to train, and nothing was trained. Mend it, then start under another name "
        f"(--name). `penstock parity {run_folder / RUN_FILE}` looks closer; --set parity.gate=warn trains all the same",
        file=sys.stderr,
    )
    return True
