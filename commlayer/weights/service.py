"""`Service`: the port at which a reader gives other readers what is on its `Shelf`. It belongs to the thread of the
reader's `Intake`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..telemetry import curve
from ..transport.log import log
from .message import WANT, Want
from .outlet import Outlet
from .peers import BATCH
from .shelf import Shelf

ROOM = 64
"""Other readers, and strangers, that are connected to a reader."""


class Service:
    """Closed until the reader has reached the publisher."""

    def __init__(self, context: Any, key: bytes, shelf: Shelf, *, is_wanted: bool) -> None:
        """`is_wanted`: whether the reader may serve others."""
        self._context, self._key, self._shelf, self._is_wanted = context, key, shelf, is_wanted
        self._askers: dict[bytes, int] = {}
        """The connections of readers that have asked, by their descriptors."""
        self.outlet: Outlet | None = None
        self.address = ""
        """Where others reach it; empty: nowhere."""

    def open(self, endpoint: str, poller: Any) -> None:
        """Opens the port at the address from which this host reaches the publisher's endpoint, unless it is open."""
        if not self._is_wanted or self.outlet is not None:
            return
        host, port = curve.split(endpoint.removeprefix("tcp://"))
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))
                own = str(probe.getsockname()[0])
            own = f"[{own}]" if ":" in own else own
            self.outlet = Outlet(self._context, self._key, f"tcp://{own}:0", ROOM)
        except (OSError, ConfigError) as error:
            self._is_wanted = False
            log.warning("commlayer.subscribe: this reader serves no others: %s", error)
            return
        self.address = f"{own}:{self.outlet.port}"
        for watched in self.outlet.sockets:
            poller.register(watched, curve.load().POLLIN)

    @property
    def is_asked(self) -> bool:
        """Whether a part that is here waits for room."""
        return self.outlet is not None and self._shelf.is_asked

    def serve(self, ready: Mapping[Any, int]) -> None:
        """Hears other readers, and gives them parts."""
        outlet = self.outlet
        if outlet is None:
            return
        self._forget(outlet.look(ready))
        if outlet.sockets[0] in ready:
            for _ in range(BATCH):
                try:
                    heard = outlet.hear()
                    if heard is None:
                        break
                    reader, descriptor, kind, text = heard
                    self._forget(outlet.look({}))  # before it, libzmq told of the descriptor's former connection
                    if kind == WANT and outlet.has(descriptor):
                        self._askers[reader] = descriptor
                        self._shelf.want(reader, Want.read(text))
                except ValueError as error:
                    log.warning("commlayer.subscribe: a message that is no question: %s", error)
        self._shelf.push(outlet)

    def close(self) -> None:
        """Ends the connections."""
        if self.outlet is not None:
            self.outlet.close()

    def _forget(self, ended: set[int]) -> None:
        """Forgets readers whose connections have ended."""
        for reader in [reader for reader, descriptor in self._askers.items() if descriptor in ended]:
            del self._askers[reader]
            self._shelf.forget(reader)
