"""The handler of the log, and the texts of sockets."""

import logging
import socket
from collections.abc import Iterator

import pytest

from commlayer.frontend.group.report import Report, advice
from commlayer.transport import log as module
from commlayer.transport.log import begin, end, log
from commlayer.transport.path_watch import Uplink
from commlayer.transport.sockets import BUFFER_BYTES, Socket, _read


@pytest.fixture(autouse=True)
def _without_handler() -> Iterator[None]:
    yield
    end()


def test_lines_have_level_rank_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    begin("info", 3)
    begin("info", 3)  # a second group
    log.info("path %s", "eth0")
    log.debug("a detail")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(f"INFO commlayer rank 3 on {socket.gethostname()}: path eth0")


def test_debug_shows_more(capsys: pytest.CaptureFixture[str]) -> None:
    begin("debug", 0)
    log.debug("a detail")
    assert "DEBUG commlayer rank 0" in capsys.readouterr().err


def test_records_come_once(caplog: pytest.LogCaptureFixture) -> None:
    """The handlers of the root logger get them without the variable, and not with it."""
    log.warning("before")
    begin("info", 0)
    log.warning("during")
    end()
    log.warning("after")
    assert [record.message for record in caplog.records] == ["before", "after"]
    assert module._handler is None
    assert log.level == logging.NOTSET


def test_one_operation_is_told_as_one() -> None:
    report = Report()
    assert "end: 0 operations of" in report._summary()
    report._tally.count = 1
    assert "end: 1 operation of" in report._summary()


def test_advice_is_for_jobs_that_the_network_limits() -> None:
    link = Uplink("eth0", 0.0, 0, full_s=60.0, full_bytes=75_000_000)
    assert "commlayer probe" in advice(busy_s=74, passed_s=77, waited_s=1, link=None)
    assert "eth0 filled the link for 81% of that time, at 10 Mbit/s" in advice(74, 77, 1, link)
    link.full_s = 20.0
    assert "neither late ranks nor the links of this rank explain that: the `end:` lines of" in advice(74, 77, 1, link)
    assert advice(busy_s=74, passed_s=77, waited_s=40, link=link) == ""  # late ranks do
    assert advice(busy_s=20, passed_s=77, waited_s=1, link=link) == ""


PORT = {"ifname": "eth0", "address": "10.0.0.1", "port": 20001, "mtu": 9000}


def test_clipped_buffers_come_with_the_sysctl_to_set() -> None:
    small = Socket(PORT, 208 << 10, BUFFER_BYTES, has_gso=True, has_gro=False)
    assert small.advice.endswith(f"sysctl -w net.core.rmem_max={BUFFER_BYTES}")
    assert small.text == ("eth0 10.0.0.1:20001, MTU 9000; buffers of 0.203 MiB (receive) and 8 MiB (send); GSO, no GRO")
    assert Socket(PORT, BUFFER_BYTES, BUFFER_BYTES, has_gso=True, has_gro=True).advice == ""


def test_sizes_of_a_socket_are_those_that_were_asked_for() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 90_000)
        opened.setsockopt(socket.IPPROTO_UDP, 104, 1)
        read = _read(PORT, opened)
    assert (read.receive_bytes, read.send_bytes, read.has_gro) == (100_000, 90_000, True)
