"""The start of the ranks: what they agree on, and the launcher of one machine."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.consumers.distributed.start import launch, store_of_this_start
from waiting import wait_for


def test_ranks_that_are_started_again_find_nothing_of_their_first_start_in_the_store() -> None:
    kept = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        for start in range(3):
            stores = list(threads.map(lambda rank: store_of_this_start(kept, rank, 3), range(3)))
            assert not stores[0].check(["said"])
            stores[start].set("said", str(start))
            assert {store.get("said") for store in stores} == {str(start).encode()}


class CallerSignals:
    """The signals of a caller that is told to stop once the ranks were started."""

    def hand_to(self, stop) -> None:
        self.stop = stop


RANK = """
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
assert os.environ["WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == str(rank)
{body}
"""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(2)", 2),
        ("sys.exit(0 if rank else 2)", 2),
        ("sys.exit(3 if rank else 0)", 3),
        # The other one would run on, and ends by the SIGTERM of the launcher.
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(100)", 1),
        ("time.sleep(100) if rank else os.kill(os.getpid(), signal.SIGKILL)", 1),
    ],
)
def test_the_status_is_that_of_the_rank_that_failed(tmp_path: Path, body: str, status: int) -> None:
    assert launch(2, [sys.executable, "-c", RANK.format(body=body), str(tmp_path)], CallerSignals().hand_to) == status


@pytest.mark.parametrize("handler", ["lambda *_: sys.exit(0)", "signal.SIG_DFL"], ids=["in order", "before it began"])
def test_a_signal_is_handed_on_and_ranks_that_end_by_it_make_status_0(tmp_path: Path, handler: str) -> None:
    body = f"""
signal.signal(signal.SIGTERM, {handler})
open(f"{{folder}}/{{rank}}", "w").close()
time.sleep(100)
"""
    signals = CallerSignals()

    def stop_both() -> None:
        wait_for(lambda: len(os.listdir(tmp_path)) == 2)
        signals.stop()

    stopping = threading.Thread(target=stop_both)
    stopping.start()
    assert launch(2, [sys.executable, "-c", RANK.format(body=body), str(tmp_path)], signals.hand_to) == 0
    stopping.join()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (f"sys.exit(1) if rank else os.kill(os.getpid(), {int(signal.SIGSTOP)})", 1),
        # One that waits for a rank that was stopped before they met: a wait of torch lets no handler run.
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100) if rank else sys.exit(0); sys.exit(3)", 0),
    ],
    ids=["frozen", "deaf"],
)
def test_a_rank_that_no_signal_ends_is_killed_once_another_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: int
) -> None:
    monkeypatch.setattr("penstock.consumers.distributed.start.END_S", 0.2)
    assert launch(2, [sys.executable, "-c", RANK.format(body=body), str(tmp_path)], CallerSignals().hand_to) == status
