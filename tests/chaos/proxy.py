"""The connections to Redis, in a separate process: one proxy per client process, so that one client alone can be cut
off."""

import json
import os
import tempfile
from pathlib import Path
from typing import TextIO

from cutting_proxy import TRAINER_SCRIPTS, CuttingProxy, When
from tests.chaos.processes import Process

TRAINER_COMMANDS = ("XREAD", "XRANGE", "release", "release_again", "announce", "dead_letter", "commit", "open_epoch")
PRODUCER_COMMANDS = ("EXEC", "XREADGROUP", "XCLAIM", "XPENDING", "SET", "XREAD")


class Proxy:
    """A socket for each of `names`, forwarded to the server's until a connection is cut."""

    def __init__(self, folder: Path, upstream: Path, names: list[str]) -> None:
        commands, self._commands = os.pipe()
        answers, answering = os.pipe()

        def body() -> int:
            os.close(self._commands)  # otherwise this process would never see the pipe's end
            tempfile.tempdir = str(folder)
            return _serve(f"unix://{upstream}", names, os.fdopen(commands), os.fdopen(answering, "w"))

        self.process = Process.fork("proxy", folder / "proxy.log", {}, body)
        os.close(commands)
        os.close(answering)
        with os.fdopen(answers) as reading:
            self._urls: dict[str, str] = json.loads(reading.readline())

    def url(self, name: str) -> str:
        return self._urls[name]

    def cut(self, name: str, away_s: float) -> None:
        """Closes every connection of `name` and refuses new ones for `away_s`."""
        self._send(name=name, away_s=away_s)

    def cut_command(self, name: str, command: str, nth: int, when: When) -> None:
        """Cuts the connection on which `name` sends the `nth` such command from now on."""
        self._send(name=name, command=command, nth=nth, when=when)

    def _send(self, **command: object) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")


def _serve(upstream: str, names: list[str], commands: TextIO, answering: TextIO) -> int:
    """Waits for commands until the suite closes their pipe or kills this process."""
    proxies = {name: CuttingProxy(upstream, TRAINER_SCRIPTS) for name in names}
    with answering:
        answering.write(json.dumps({name: proxy.url for name, proxy in proxies.items()}) + "\n")
    for line in commands:
        command = json.loads(line)
        proxy = proxies[command.pop("name")]
        if "command" in command:
            proxy.cut(command["command"], command["nth"], command["when"])
        else:
            proxy.refuse(command["away_s"])
    return 0
