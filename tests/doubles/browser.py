"""A real headless Chromium, controlled through its debugging pipe: no port and no separate driver."""

import base64
import fcntl
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from waiting import wait_for

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BINARY is None, reason="needs chromium on PATH (the Debian package chromium)")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--disable-extensions",
    "--remote-debugging-pipe",
]
# Chromium's pipe is file descriptors 3 and 4.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_LIMIT_S = 60.0


class Browser:
    """One page in its own browser.

    requests, dialogs, errors: the URLs requested, the dialogs opened and the errors logged by the page so far.
    """

    def __init__(self, *, size: tuple[int, int] = (1500, 950), scheme: str = "light") -> None:
        assert BINARY is not None
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.downloads = Path(tempfile.mkdtemp(prefix="penstock-browser-"))
        self._downloaded = ""
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (theirs_in, theirs_out)]
        command = [sys.executable, "-c", _LAUNCH, *map(str, theirs), BINARY, *_FLAGS]
        command += [
            f"--user-data-dir={self.downloads / 'profile'}",
            f"--window-size={size[0]},{size[1]}",
            "about:blank",
        ]
        with (self.downloads / "log").open("wb") as log:
            self._process = subprocess.Popen(command, pass_fds=theirs, stdout=log, stderr=log, start_new_session=True)
        for descriptor in (theirs_in, theirs_out, *theirs):
            os.close(descriptor)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.call(
                "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
            )
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            self.call(
                "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads), eventsEnabled=True
            )
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the DevTools protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], f"no answer: {self._log()}"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser has ended: {self._log()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, details: dict[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(details["message"])
                self._number += 1
                close = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                os.write(self._write, json.dumps({**close, "sessionId": self._session}).encode() + b"\0")
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(details["exceptionDetails"])[:2000])
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.errors.append(details["entry"]["text"])
            case "Browser.downloadProgress" if details["state"] == "completed":
                self._downloaded = details["guid"]

    def _log(self) -> str:
        return (self.downloads / "log").read_text(errors="replace")[-2000:]

    def open(self, url: str) -> None:
        """Opens a URL and waits until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, accept: Callable[[Any], bool] = bool) -> Any:
        """Evaluates an expression until `accept` is true of its value; returns that value."""
        return wait_for(
            lambda: self.evaluate(expression),
            accept,
            timeout_s=_LIMIT_S,
            poll_s=0.05,
            log=lambda: f"{expression}; errors: {self.errors}",
        )

    def text(self, selector: str) -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def centre(self, selector: str, nth: int = 0) -> tuple[float, float]:
        """Scrolls the nth such element into view; returns the coordinates of its centre."""
        expression = (
            f"(() => {{ const found = document.querySelectorAll({json.dumps(selector)})[{nth}]; "
            "found.scrollIntoView({block: 'nearest', inline: 'nearest'}); const box = found.getClientRects()[0]; "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = self.evaluate(expression)
        return x, y

    def hover(self, selector: str, nth: int = 0) -> None:
        x, y = self.centre(selector, nth)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, nth: int = 0) -> None:
        self.hover(selector, nth)
        x, y = self.centre(selector, nth)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = (
            {"windowsVirtualKeyCode": 13}
            if key == "Enter"
            else {"windowsVirtualKeyCode": 27}
            if key == "Escape"
            else {}
        )
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, selector: str | None = None) -> Image.Image:
        """Returns a screenshot of the window, or of the first such element."""
        options: dict[str, Any] = {}
        if selector is not None:
            expression = (
                f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getClientRects()[0]; "
                "return {x: box.x, y: box.y, width: box.width, height: box.height, scale: 1}; })()"
            )
            options["clip"] = self.evaluate(expression)
        data = self.call("Page.captureScreenshot", format="png", **options)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def downloaded(self) -> Path:
        """Waits for the next complete download; returns its file."""
        deadline = time.monotonic() + _LIMIT_S
        while not self._downloaded:
            self._receive(deadline)
        guid, self._downloaded = self._downloaded, ""
        found = [file for file in self.downloads.iterdir() if file.is_file() and file.name != "log"]
        return next((file for file in found if file.name == guid), found[0])

    def close(self) -> None:
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        try:
            self._process.wait(10)  # it ends when its pipe is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.downloads, ignore_errors=True)
