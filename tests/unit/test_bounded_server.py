import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from commlayer.transport import bounded_server, metrics
from commlayer.transport.bounded_server import CONNECTIONS_MAX, BoundedServer
from tests.world import open_descriptors, until

VISITORS = 100


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(server: Any) -> Iterator[Any]:
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: BoundedServer, path: str = "/") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=30) as answer:
        found: bytes = answer.read()
        return found


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), open_descriptors()


def check_silent_visitors(server: BoundedServer, path: str) -> None:
    """Silent connections hold no more threads and descriptors than there is room for, and an honest one is answered."""
    threads, descriptors = held()
    with contextlib.ExitStack() as stack:
        for _ in range(VISITORS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
        asked(server, path)  # all others were accepted before it
        now = held()
        assert now[0] <= threads + CONNECTIONS_MAX
        assert now[1] <= descriptors + VISITORS + CONNECTIONS_MAX  # the test has the other ends


def test_silent_visitors_take_bounded_room() -> None:
    with served(BoundedServer(("127.0.0.1", 0), Handler)) as server:
        check_silent_visitors(server, "/")


def test_silent_visitors_of_the_metrics_take_bounded_room() -> None:
    with served(metrics.listen(0)) as server:
        check_silent_visitors(server, "/metrics")


def test_an_exchange_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(BoundedServer(("127.0.0.1", 0), Handler)) as server:
        monkeypatch.setattr(bounded_server, "EXCHANGE_S", 0.3)
        with socket.create_connection(("127.0.0.1", server.server_port)) as silent:
            silent.sendall(b"GET / HTTP/1.0\r\nSlow: ")
            silent.settimeout(60)
            assert silent.recv(1) == b""
        until(lambda: server._room._value == CONNECTIONS_MAX)
        assert asked(server) == b"here"


def test_metrics_listen_on_loopback_unless_asked() -> None:
    with metrics.listen(0) as server:
        assert server.server_address[0] == "127.0.0.1"
    with metrics.listen(0, "0.0.0.0") as server:  # noqa: S104
        assert server.server_address[0] == "0.0.0.0"  # noqa: S104
    with metrics.listen(0, "::1") as server:
        assert server.server_address[0] == "::1"
