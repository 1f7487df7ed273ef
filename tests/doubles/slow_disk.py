"""Makes the disk of one server sync slowly."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from waiting import wait_for

SOURCE = Path(__file__).with_suffix(".c")


class SlowDisk:
    """Each sync of a server started with `environment` takes the seconds last given to `take`. Skips the test without a
    compiler."""

    def __init__(self, folder: Path) -> None:
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if compiler is None:
            pytest.skip("needs a C compiler (cc, gcc or clang) to slow a server's disk down")
        library = folder / "slow_disk.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl"], check=True)
        self._folder = folder
        self.take(0.0)
        self.environment = {"LD_PRELOAD": str(library), "SLOW_DISK": str(folder)}

    def take(self, seconds: float) -> None:
        """Makes every sync that begins from now on take `seconds`."""
        partial = self._folder / "seconds.partial"
        partial.write_text(str(seconds))
        partial.replace(self._folder / "seconds")

    def wait_for_sync(self) -> None:
        """Waits for a sync to begin."""
        num_begun = self.count("begun")
        wait_for(lambda: self.count("begun"), lambda now: now != num_begun, poll_s=0.002)

    def count(self, what: str) -> int:
        """Returns the number of syncs that have `begun`, that were `slow`, or that have `ended`."""
        try:
            return os.stat(self._folder / what).st_size
        except FileNotFoundError:
            return 0
