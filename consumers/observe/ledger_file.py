"""The ledger as a file of the run folder, for views and reports."""

import json
import logging
from pathlib import Path

import msgspec

from penstock.consumers.stream.ledger import OUTCOMES, Ledger
from penstock.consumers.stream.progress import RunProgress
from penstock.schemas.process.files import write_whole

log = logging.getLogger(__name__)


class LedgerFile:
    """`trainer.json`: what became of every released group, when the last checkpoint was committed. Whole or as it was
    before."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_behind = False

    def write(self, ledger: Ledger, progress: RunProgress, policy_version: int, *, finished: bool) -> None:
        """Writes the file. A full disk leaves it as it was: the checkpoint holds what matters, and the next one writes
        the file again."""
        contents = {
            "num_updates": progress.num_batches,
            "epoch": progress.epoch,
            "policy_version": policy_version,
            "num_groups_released": ledger.num_released,
            **{f"num_groups_{outcome}": ledger.count(outcome) for outcome in OUTCOMES},
            "num_groups_cancelled": ledger.num_open if finished else 0,
            "num_groups_open": 0 if finished else ledger.num_open,
            "dead_reasons": dict(ledger.dead_reasons),
            "num_groups_released_again": dict(ledger.released_again),
            "num_duplicates_dropped": ledger.num_duplicates_dropped,
            "attrition": msgspec.to_builtins(ledger.attrition),
            **progress.totals,
            "finished": finished,
        }
        try:
            write_whole(self._file, json.dumps(contents, indent=1))
        except OSError as error:
            if not self._is_behind:
                log.warning("%s cannot be written: %s; it is written with a later checkpoint", self._file, error)
            self._is_behind = True
            return
        if self._is_behind:
            log.info("%s is written again", self._file)
        self._is_behind = False
