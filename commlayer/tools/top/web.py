"""`commlayer top --web`: a page on this machine, with the table and the last minutes as curves.

The server listens on loopback. Its addresses begin with a secret word, because other users of the machine reach
loopback, too, and it answers only to its own name, because pages of other sites can give theirs this address.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any

from ...transport.bounded_server import BoundedServer
from .client import Client, NoAnswerError
from .summary import CURVES, summarize

ADDRESS = "127.0.0.1"

HISTORY_S = 600
"""Seconds that the curves show."""

COLUMNS = ("time", *CURVES)
"""The sums of `summary.summarize` that the history has."""


class Feed:
    """Asks the job, for all browsers."""

    def __init__(self, ask: Callable[[], dict[str, Any]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._history: deque[list[Any]] = deque()
        self._latest: dict[str, Any] = {"error": "no answer yet"}

    def look(self) -> None:
        """Asks once."""
        try:
            found = summarize(self._ask())
        except NoAnswerError as error:
            with self._lock:
                self._latest = {**self._latest, "error": str(error)}
            return
        with self._lock:
            self._latest = {**found, "error": "" if found["job"]["live"] else "the job has ended"}
            if found["job"]["live"]:
                self._keep([found["job"][name] for name in COLUMNS])

    def _keep(self, row: list[Any]) -> None:
        """Adds a row, whose first value is its time, and drops those that are too old."""
        self._history.append(row)
        while row[0] - self._history[0][0] > HISTORY_S:
            self._history.popleft()

    def latest(self) -> bytes:
        """The latest view, as JSON."""
        with self._lock:
            return json.dumps(self._latest).encode()

    def history(self) -> bytes:
        """Names and values of the curves, as JSON."""
        with self._lock:
            return json.dumps({"names": COLUMNS, "rows": list(self._history)}).encode()


class Server(BoundedServer):
    """Serves the page of one job. `port` 0: any free one."""

    def __init__(self, feed: Feed, port: int = 0) -> None:
        """Raises ValueError if the port is taken."""
        self.feed = feed
        self.word = secrets.token_urlsafe(12)
        self.page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; use another one, or leave it out") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/{self.word}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}:
            self.send_error(403, "another name than that of this server")
            return
        answers: dict[str, Callable[[], bytes]] = {
            "": lambda: b"",
            "view": self.server.feed.latest,
            "history": self.server.feed.history,
        }
        _, word, *rest = self.path.split("/")
        name = "/".join(rest)
        if not secrets.compare_digest(word.encode(), self.server.word.encode()) or name not in answers or not rest:
            self.send_error(404, "use the address that the command printed")
            return
        nonce = secrets.token_urlsafe(12)
        body = answers[name]() if name else self.server.page.replace("NONCE", nonce).encode()
        own = f"connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:"
        policy = f"default-src 'none'; {own}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if name else "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", f"{policy}; base-uri 'none'; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keeps the terminal clean."""


def serve(client: Client, port: int, interval_s: float, say: Callable[[str], None]) -> None:
    """Serves the page until Ctrl-C. Raises ValueError if the port is taken."""
    feed = Feed(client.view)
    with Server(feed, port) as server:
        threading.Thread(target=server.serve_forever, name="commlayer-top-web", daemon=True).start()
        say(f"open in a browser: {server.url}")
        say(f"from another machine, first: ssh -L {server.server_port}:{ADDRESS}:{server.server_port} THIS_HOST")
        try:
            while True:
                feed.look()
                time.sleep(interval_s)
        finally:
            server.shutdown()
