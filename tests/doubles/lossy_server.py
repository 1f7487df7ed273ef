"""A server that loses what it had not synced."""

import os
from pathlib import Path

from real_server import RealServer


class LossyServer(RealServer):
    """Started again, it has what was in its append-only file at `mark`; without a mark, what it had answered for."""

    mark: int | None = None

    @property
    def _log(self) -> Path:
        return next((self._folder / "appendonlydir").glob("*.incr.aof"))

    def remember(self) -> None:
        self.mark = self._log.stat().st_size

    def restart(self) -> None:
        self.stop()
        if self.mark is not None:
            os.truncate(self._log, self.mark)
        self.start()
