"""`BoundedServer`: an HTTP server whose visitors hold a bounded number of threads and descriptors, for a bounded time.

Whoever reaches its port may connect to it without a key, and say nothing for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .fork import disowned_in_children

CONNECTIONS_MAX = 16
"""Connections at once. A further one ends the oldest."""

EXCHANGE_S = 10.0
"""Longest time for a question and its answer."""

ROOM_S = 0.2
"""Longest wait until the oldest connection has gone."""


class BoundedServer(ThreadingHTTPServer):
    """Answers each connection in a thread. `address`: host and port; the port 0 is any free one."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        """Raises OSError if the address is not one of this host, or the port is taken."""
        self._room = threading.Semaphore(CONNECTIONS_MAX)
        self._since_s: dict[socket.socket, float] = {}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        disowned_in_children(self)

    def disown(self) -> None:
        """See `fork.Owned`: a child that held the port would keep it from the next run of the job."""
        self.socket.close()

    def is_open(self) -> bool:
        """Whether it has its port."""
        return self.socket.fileno() >= 0

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, or refuses a connection for which there is no room."""
        if not self._room.acquire(blocking=False):
            self._end(list(self._since_s.items())[:1])
            if not self._room.acquire(timeout=ROOM_S):
                self.close_request(request)
                return
        self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection is over."""
        super().shutdown_request(request)
        if self._since_s.pop(request, None) is not None:
            self._room.release()

    def service_actions(self) -> None:
        """Ends connections that take too long: `serve_forever` calls it twice a second, and after each connection."""
        now_s = time.monotonic()
        self._end([item for item in list(self._since_s.items()) if now_s - item[1] > EXCHANGE_S])

    def handle_error(self, *_: object) -> None:
        """A visitor that goes away is no error."""

    def _end(self, connections: list[tuple[socket.socket, float]]) -> None:
        """Ends the wait of these connections' threads, which then close them."""
        for request, _ in connections:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
