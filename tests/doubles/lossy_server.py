"""A server that loses unsynced writes."""

import os
from pathlib import Path

from real_server import RealServer


class LossyServer(RealServer):
    """After a restart it has the content of its append-only file at `mark`; without a mark, all that it confirmed."""

    mark: int | None = None

    @property
    def _log(self) -> Path:
        return next((self._folder / "appendonlydir").glob("*.incr.aof"))

    def remember(self) -> None:
        """Sets `mark` to the present size of the append-only file."""
        self.mark = self._log.stat().st_size

    def restart(self) -> None:
        self.stop()
        if self.mark is not None:
            os.truncate(self._log, self.mark)
        self.start()
