"""Counters of this process for Prometheus, as text on an HTTP port: COMMLAYER_METRICS_PORT.

The format (text, version 0.0.4) is a few kinds of lines, so this needs no client library. The port is that of the
setting plus LOCAL_RANK, because each process of a host serves its own. It listens on loopback, unless
COMMLAYER_METRICS_HOST names another address.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ClosedError
from .flight import Recorder, recorder
from .native import Engine, Report

if TYPE_CHECKING:
    from .bounded_server import BoundedServer

log = logging.getLogger("commlayer")

PREFIX = "commlayer"

LOOPBACK = "127.0.0.1"

PATHS = {
    "path_packets_sent_total": ("packets_sent", 1, "packets sent over a path, without acknowledgements"),
    "path_packets_lost_total": ("packets_lost", 1, "packets declared lost on a path"),
    "path_packets_received_total": ("packets_received", 1, "packets received over a path"),
    "path_rate_bytes_per_second": ("rate_bytes", 1, "rate at which packets may leave; 0: only the window limits them"),
    "path_window_bytes": ("window_bytes", 1, "bytes that may be in flight"),
    "path_round_trip_seconds": ("round_trip_us", 1e-6, "smoothed round trip"),
    "path_queue_seconds": ("queue_us", 1e-6, "part of the round trip in queues beyond this host's interface"),
    "path_dead": ("is_dead", 1, "1: another path delivers and this one does not"),
}
"""Metrics of a path: the field of `commlayer.paths()`, its unit, and the help text."""

_guard = threading.Lock()
_server: BoundedServer | None = None


def serve(config: Config) -> None:
    """Starts the server of this process, if the settings ask for one. A port that is taken is only logged."""
    global _server
    with _guard:
        if not config.metrics_port or (_server is not None and _server.is_open()):
            return
        port = config.metrics_port + int(os.environ.get("LOCAL_RANK", "0"))
        try:
            _server = listen(port, config.metrics_host)
        except OSError as error:
            log.warning(
                "COMMLAYER_METRICS_PORT: cannot serve metrics on %s, port %d: %s; use a free port, and a "
                "COMMLAYER_METRICS_HOST of this host",
                *(config.metrics_host, port, error),
            )
            return
        threading.Thread(target=_server.serve_forever, name="commlayer-metrics", daemon=True).start()


def listen(port: int, host: str = LOOPBACK) -> BoundedServer:
    """A server of `text()` at /metrics, not started yet. Raises OSError if it cannot have the address."""
    # They take long to import, and most jobs do not need them.
    from http.server import BaseHTTPRequestHandler

    from .bounded_server import BoundedServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "use /metrics")
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Says nothing: a scrape is no news."""

    return BoundedServer((host, port), Handler)


def text() -> str:
    """The metrics of this process; empty before its first group."""
    try:
        report = Engine.shared_report()
    except ClosedError:
        return ""
    return "".join(f"{line}\n" for line in lines(report, recorder))


def lines(report: Report, recorder: Recorder) -> Iterator[str]:
    """The lines of a report, with the rank of this process as a label."""
    rank = {"rank": recorder.rank}
    for name, value in report.stats.items():
        if name == "waited_us":
            continue  # the sum of the next metric
        yield from _metric(f"{name}_total", "counter", f"{name} of commlayer.stats()", [(rank, value)])
    waited = [({**rank, "peer": peer}, lag.waited_us / 1e6) for peer, lag in sorted(report.lags.items())]
    yield from _metric("waited_seconds_total", "counter", "time that collectives waited for the last rank", waited)
    last = [({**rank, "peer": peer}, lag.last) for peer, lag in sorted(report.lags.items())]
    yield from _metric("last_total", "counter", "collectives in which the data of this peer came last", last)
    running = [({**rank, "group": group}, age_s) for group, age_s in recorder.oldest().items()]
    yield from _metric("oldest_collective_seconds", "gauge", "age of the oldest collective in flight", running)
    for name, (field, unit, help_text) in PATHS.items():
        values = [
            (
                {**rank, "peer": peer, "path": number, "interface": path["interface"], "remote": path["remote"]},
                path[field] * unit,
            )
            for peer, paths in report.paths.items()
            for number, path in enumerate(paths)
        ]
        yield from _metric(name, "counter" if name.endswith("_total") else "gauge", help_text, values)


Values = Sequence[tuple[Mapping[str, object], float]]
"""Labels and value, of one metric."""


def _metric(name: str, kind: str, help_text: str, values: Values) -> Iterator[str]:
    if not values:
        return
    yield f"# HELP {PREFIX}_{name} {help_text}"
    yield f"# TYPE {PREFIX}_{name} {kind}"
    for labels, value in values:
        told = ",".join(f'{label}="{_escaped(str(content))}"' for label, content in labels.items())
        yield f"{PREFIX}_{name}{{{told}}} {value:.9g}" if value % 1 else f"{PREFIX}_{name}{{{told}}} {value:.0f}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
