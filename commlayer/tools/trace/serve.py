"""Serves a trace to ui.perfetto.dev, which runs in the browser: the trace does not leave this machine."""

from __future__ import annotations

import os
import shutil
import urllib.parse
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ORIGIN = "https://ui.perfetto.dev"
"""The only page that may read the trace."""

ADDRESS = "127.0.0.1"

PORT = 9001
"""The only port of this machine that the page may read from: its content security policy has it."""

QUESTION_S = 5.0
"""Longest silence of a visitor, during which the page would wait."""


def url(path: Path, port: int = PORT) -> str:
    """The address to open in a browser."""
    return f"{ORIGIN}/#!/?url=http://{ADDRESS}:{port}/{urllib.parse.quote(path.name)}"


class TraceServer(HTTPServer):
    """Serves one file."""

    allow_reuse_address = True

    def __init__(self, path: Path, port: int = PORT) -> None:
        """`port` 0: any free one. Raises ValueError if the port is taken."""
        self.path = path
        self.fetched = False
        """Whether the file was sent to the end."""
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"{ADDRESS}:{port}: {error.strerror}; ui.perfetto.dev reads from this port only: end the other "
                f"program (trace_processor?), or open {path} in the page by hand"
            ) from error

    def handle_error(self, *_: object) -> None:
        """A browser that ends a connection early asks again."""


class _Handler(BaseHTTPRequestHandler):
    server: TraceServer
    timeout = QUESTION_S

    def do_GET(self) -> None:  # the name that http.server asks for
        """Sends the trace, whatever its path in the address is, if that is its name."""
        if urllib.parse.unquote(urllib.parse.urlsplit(self.path).path) != f"/{self.server.path.name}":
            self.send_error(404)
            return
        with open(self.server.path, "rb") as file:
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", ORIGIN)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)
        self.server.fetched = True

    def log_message(self, *_: object) -> None:
        """Keeps the terminal clean."""


def serve(path: Path, say: Callable[[str], None], port: int = PORT) -> None:
    """Opens a browser, or says the address, and returns when the page has the trace. Raises ValueError."""
    with TraceServer(path, port) as server:
        address = url(path, server.server_port)
        seen = (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and webbrowser.open(address)
        say(f"{'opened' if seen else 'open in a browser:'} {address}")
        if not seen:
            say(f"from another machine, first: ssh -L {port}:{ADDRESS}:{port} THIS_HOST")
        say("if the browser asks, let the page access this device")  # Chromium asks since version 142
        say("waiting until the page has fetched the trace (Ctrl-C ends)")
        while not server.fetched:
            server.handle_request()
