"""Synthetic samples of a job whose hosts have one interface per network."""

from collections.abc import Callable

from commlayer.tools.probe.path import DSCP, ECN
from commlayer.tools.probe.sample import Sample, Way
from commlayer.tools.probe.view import View

RATE_BPS = 100e6


def sample(way: Way) -> Sample:
    """A path without faults."""
    return Sample(
        way,
        f"10.87.{way.source_nic[-1]}.0/24",
        is_reached=True,
        rate_bps=RATE_BPS,
        is_own_limit=False,
        rtt_us=[200.0, 400.0],
        loaded_rtt_us=[2000.0, 4000.0],
        sent=2000,
        mtu=1500,
        interface_mtu=1500,
        dscp={str(code): code for code in DSCP},
        ecn={str(bits): bits for bits in ECN},
    )


def view(hosts: int, nics: int = 1, fault: Callable[[Sample], None] = lambda _each: None) -> View:
    """All paths of a job; `fault` changes the samples."""
    ways = [
        Way(source, f"eth{nic}", target, f"eth{nic}")
        for source in range(hosts)
        for target in range(hosts)
        for nic in range(nics)
        if source != target
    ]
    samples = [sample(way) for way in ways]
    for measured in samples:
        fault(measured)
    return View([f"host{number}" for number in range(hosts)], samples)


def lose(each: Sample, share: float = 0.02, burst: int = 4) -> None:
    """Losses in bursts."""
    each.lost = round(each.sent * share)
    each.bursts = max(1, each.lost // burst)
