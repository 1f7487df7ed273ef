"""A host that shares only Redis with a run: a mount namespace in which the run's folders are empty."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forked_programs import PYTHONPATH

NAMESPACE = ["unshare", "--mount", "--map-root-user"]
# Arguments: the server's socket, its new place, folders to hide, --, the command.
SCRIPT = """
touch "$2" && mount --bind "$1" "$2" || exit 99
shift 2
while [ "$1" != -- ]; do
    mount -t tmpfs none "$1" && [ -z "$(ls -A "$1")" ] || exit 99
    shift
done
shift
mount -t tmpfs none /dev/shm && cd "$TMPDIR" && exec "$@"
"""


def has_namespaces() -> bool:
    """Returns whether this user may create mount namespaces."""
    return shutil.which("unshare") is not None and subprocess.run([*NAMESPACE, "true"]).returncode == 0


class IsolatedHost:
    """Runs one Python program that sees the folders `hidden` empty. `url` is of a server on a UNIX socket.

    folder: the host's temporary folder. log: the program's output.
    """

    def __init__(self, url: str, hidden: Sequence[Path]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-host-"))
        self.log = self.folder / "output"
        self._socket, self._hidden = unquote(urlsplit(url).path), hidden
        self.url = url.replace(urlsplit(url).path, str(self.folder / "redis.sock"))
        self.process: subprocess.Popen[bytes] | None = None
        assert not any(self.folder.is_relative_to(each) for each in hidden)

    def start(self, *arguments: str) -> None:
        """Starts `python ARGUMENTS...`."""
        hidden = [str(folder) for folder in self._hidden]
        script = ["sh", "-c", SCRIPT, "sh", self._socket, str(self.folder / "redis.sock"), *hidden, "--"]
        environment = os.environ | {"PYTHONPATH": PYTHONPATH, "TMPDIR": str(self.folder), "PENSTOCK_LOG": "text"}
        with self.log.open("wb") as output:
            command = [*NAMESPACE, *script, sys.executable, *arguments]
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder)
