"""`Browser`: headless Chromium, driven in the W3C's WebDriver protocol.

It needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commlayer.tools.bench.launch import free_port

PATIENCE_S = 60.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
]


def request(port: int, method: str, path: str, headers: dict[str, str], data: str | None = None) -> tuple[int, str]:
    """Status and text of an answer of a server on this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


class Browser:
    """Chromium, driven by chromedriver.

    `profile`: a folder for Chromium's files. `flags`: more of its flags. Raises SystemExit if one of the two lacks.
    """

    def __init__(self, profile: Path, flags: Sequence[str] = ()) -> None:
        driver = shutil.which("chromedriver")
        if driver is None:
            raise SystemExit("chromedriver is missing: apt-get install chromium chromium-driver")
        port = free_port()
        self._driver = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL)
        self._port = port
        self._session = ""
        until("the driver", self._is_up)
        options = {"args": [*FLAGS, *flags, f"--user-data-dir={profile}"]}
        asked = {
            "capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        }
        self._session = "/session/" + self.call("POST", "/session", asked)["sessionId"]

    def _is_up(self) -> bool:
        try:
            return bool(self.call("GET", "/status")["ready"])
        except OSError:
            return False

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A command of WebDriver."""
        data = None if body is None else json.dumps(body)
        status, text = request(self._port, method, self._session + path, {"Content-Type": "application/json"}, data)
        value = json.loads(text)["value"]
        if status != 200:
            raise RuntimeError(f"{method} {path}: {value}")
        return value

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def awaited(self, script: str) -> Any:
        """The value of a promise in the page."""
        body = f"const done = arguments[0]; ({script}).then(done, (error) => done({{error: String(error)}}))"
        value = self.call("POST", "/execute/async", {"script": body, "args": []})
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{script}: {value['error']}")
        return value

    def screenshot(self) -> bytes:
        """The window, as PNG."""
        return base64.b64decode(self.call("GET", "/screenshot"))

    def complaints(self) -> list[str]:
        """The errors that the page has logged since the last call, but for the icon that it lacks."""
        log = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE" and "favicon" not in entry["message"]]

    def click(self, selector: str) -> None:
        """Clicks an element as a user does."""
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{next(iter(found.values()))}/click", {})

    def close(self) -> None:
        """Ends the browser and its driver."""
        with contextlib.suppress(OSError):
            self.call("DELETE", "")
        self._driver.terminate()
        self._driver.wait()


def until(what: str, condition: Callable[[], bool]) -> None:
    """Waits for a condition that must come true."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(0.2)
