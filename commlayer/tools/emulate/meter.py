"""Whether this machine kept up with the emulated network: CPU time and the bytes of all links while a command ran.

All hosts share the machine's cores. A link that carries traffic below its rate while no core is idle shows the speed of
the machine; on real hosts it would have carried more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import namespace
from .network import Network

_WINDOW_S = 0.5
_BUSY_IDLE = 0.05
"""Share of idle CPU time below which the machine is busy."""
_CARRIES, _FULL = 0.05, 0.9
"""Shares of its rate from which a link carries traffic, and from which it is full."""
_LEAST_S, _LEAST_SHARE = 1.0, 0.1
"""Shortest time that is reported, and its share of the time with traffic."""


@dataclass(frozen=True)
class Window:
    """A short stretch of time."""

    seconds: float
    idle: float
    """Share of the cores' time that was idle."""
    link: str
    """The link with the highest share of its rate, of those with a rate."""
    carried_bps: float
    rate_bps: float

    @property
    def used(self) -> float:
        """Share of the link's rate."""
        return self.carried_bps / self.rate_bps


def shortfall(windows: Iterable[Window]) -> str | None:
    """A sentence on the time in which the CPU was the limit; None if the machine kept up."""
    carrying = [window for window in windows if window.used >= _CARRIES]
    short = [window for window in carrying if window.idle < _BUSY_IDLE and window.used < _FULL]
    short_s, carrying_s = (sum(window.seconds for window in some) for some in (short, carrying))
    if short_s < max(_LEAST_S, _LEAST_SHARE * carrying_s):
        return None
    best = max(short, key=lambda window: window.used)
    return (
        f"this machine did not keep up: in {short_s:.1f} of {carrying_s:.1f} s with traffic no core was idle and no "
        f"link was full ({best.link} came to {best.carried_bps / 1e6:.0f} of {best.rate_bps / 1e6:.0f} Mbit/s); "
        "results show its CPU, not the network: use lower rates, fewer hosts or more cores"
    )


class Meter:
    """`with Meter(network) as meter:` measures the block; `meter.shortfall` may be asked at any time."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._windows: list[Window] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="meter", daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def shortfall(self) -> str | None:
        """The sentence of `shortfall` on the windows so far."""
        return shortfall(list(self._windows))

    def _measure(self) -> None:
        with namespace.inside(self._network.switch):
            before = _Sample()
            while not self._stop.wait(_WINDOW_S):
                now = _Sample()
                if (window := self._window(before, now)) is not None:
                    self._windows.append(window)
                before = now

    def _window(self, before: _Sample, now: _Sample) -> Window | None:
        network, seconds = self._network, now.at_s - before.at_s
        idle = (now.idle_ticks - before.idle_ticks) / max(1, now.cpu_ticks - before.cpu_ticks)
        windows = []
        for host in range(network.scenario.hosts):
            for nic in range(len(network.scenario.nics)):
                rate_bps, port = network.current_link(host, nic).rate_bps, network.switch_port(host, nic)
                if rate_bps is not None:
                    ways = zip(before.carried[port], now.carried[port], strict=True)
                    carried_bps = max(8 * (end - begin) for begin, end in ways) / seconds
                    windows.append(Window(seconds, idle, f"host {host} NIC {nic}", carried_bps, rate_bps))
        return max(windows, key=lambda window: window.used, default=None)


class _Sample:
    """The counters at one moment: of the machine, and of the interfaces in the calling thread's namespace."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()
        # user, nice, system, idle, iowait, irq, softirq, steal; the guest's time is in user and nice
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        self.cpu_ticks, self.idle_ticks = sum(ticks), ticks[3] + ticks[4]
        self.carried: dict[str, tuple[int, int]] = {}
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
            name, _, counters = line.partition(":")
            words = counters.split()
            self.carried[name.strip()] = int(words[0]), int(words[8])
