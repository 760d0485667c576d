"""A headless Chromium that is driven over a pair of pipes: no port is opened, and no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def executable() -> str:
    """The browser; a test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium found; install the package chromium (apt-get install chromium)")
    return found


class Browser:
    """One page of a browser without a network."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        #: What the page wrote to its console, exceptions, refusals by its policy, and requests, as texts.
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def start(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path) -> None:
        """Open a file from disk and wait until its scripts have run."""
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + SECONDS
        while self.evaluate("document.URL + ' ' + document.readyState") != f"{path.as_uri()} complete":
            assert time.monotonic() < end, f"{path} did not load"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self, *, width: int, dark: bool) -> None:
        """Show the page at some width, in light or dark colors."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES.get(key, 0))

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._from, 2**16)
            assert received, "the browser has ended"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(params)[:1000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


_CODES = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


@contextlib.contextmanager
def running(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which ends with the context."""
    path = executable()
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    # Chromium reads descriptor 3 and writes descriptor 4. The sandbox needs rights that containers seldom give.
    command = [
        *("bash", "-c", f'exec "$0" "$@" 3<&{read_there} 4>&{write_there}', path, "--headless=new", "--no-sandbox"),
        *("--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--disable-extensions"),
        *("--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"),
    ]
    process = subprocess.Popen(
        command, pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_there)
    os.close(write_there)
    try:
        browser = Browser(write_here, read_here)
        browser.start()
        yield browser
    finally:
        # Closing the pipe ends the browser and all its processes.
        os.close(write_here)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()
        os.close(read_here)
