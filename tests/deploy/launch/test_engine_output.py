"""What commands that boot an engine tell of their progress."""

import gc
import os
from pathlib import Path

from penstock.deploy.launch.engine_output import output_in, progress


def test_progress_is_told_on_the_stderr_of_the_start_and_leaves_no_descriptor_open(tmp_path: Path, capfd) -> None:
    gc.collect()  # what earlier tests have left
    before = os.listdir("/proc/self/fd")
    say = progress(True)
    with output_in(tmp_path / "log"):
        say("boots")
    progress(False)("is not told")
    del say
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    shown = capfd.readouterr().err
    assert shown.endswith(" s  boots\n") and shown.count("\n") == 1
