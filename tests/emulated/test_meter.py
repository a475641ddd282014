import os
import re
import sys
import textwrap

import pytest

from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.meter import Meter
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario

pytestmark = pytest.mark.needs_root

SEND = """
    import socket, sys, time
    out, end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:  # 60 Mbit/s, or less on a busy machine
        for _ in range(50):
            out.sendto(bytes(1472), ("10.87.0.2", 7000))
        time.sleep(0.01)
"""
BURN = "import sys, time; end = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


def metered(rate_bps: float | None, seconds: float) -> str | None:
    """The shortfall while host 0 sends for so long, and other processes keep all cores busy."""
    with Network(Scenario(nics=(Link(rate_bps=rate_bps),))) as network:
        with Meter(network) as meter:
            sources = [textwrap.dedent(SEND), *[BURN] * len(os.sched_getaffinity(0))]
            running = [network.popen(0, [sys.executable, "-c", source, str(seconds)]) for source in sources]
            assert [process.wait() for process in running] == [0] * len(running)
        return meter.shortfall


def test_a_rate_that_the_machine_did_not_reach_is_reported() -> None:
    text = metered(200e6, 3.0)
    assert text is not None
    assert text.startswith("this machine did not keep up: in ")
    assert re.search(r"\(host [01] NIC 0 came to \d+ of 200 Mbit/s\)", text)


def test_a_link_without_a_rate_is_not_watched() -> None:
    assert metered(None, 1.0) is None
