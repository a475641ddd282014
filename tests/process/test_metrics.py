"""The counters for Prometheus."""

import os
import random
import re
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.transport.flight import Recorder
from commlayer.transport.lags import Lag
from commlayer.transport.metrics import lines, text
from commlayer.transport.native import Report
from tests import ranks
from tests.world import until

LINE = re.compile(r'(commlayer_[a-z_]+)\{((?:[a-z]+="[^"]*",?)*)\} ([-+.e0-9]+)')


def free_port() -> int:
    """The first of two ports that are free. The kernel gives them to nobody meanwhile: they lie below its own range.

    Hypothesis seeds `random` before each example, so that two workers of a test run would try the same ports in the
    same order; the system's random numbers differ.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("", port))
                two.bind(("", port + 1))
            except OSError:
                continue
            return port


def scraped(port: int, path: str = "/metrics") -> dict[str, float]:
    """The values by metric and labels. Every line must be of the format."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        found = {}
        for line in answer.read().decode().splitlines():
            if re.fullmatch(r"# (HELP|TYPE) commlayer_[a-z_]+ .+", line):
                continue
            name, labels, value = LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            found[f"{name} {labels}"] = float(value)
    return found


def job(rank: int, size: int, port: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    with ranks.job(rank, size):
        dist.all_reduce(torch.ones(1000))
        dist.barrier()
        found = scraped(port + rank)
        assert found[f'commlayer_operations_done_total rank="{rank}"'] >= 2
        assert any(line.startswith(f'commlayer_path_packets_sent_total rank="{rank}",peer=') for line in found)
        with pytest.raises(urllib.error.HTTPError, match="use /metrics"):
            scraped(port + rank, "/")
        if rank == 1:
            ranks.store().wait(["rank 0 has waited"])
            dist.all_reduce(torch.ones(3))
        else:
            waiting = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))
            waiting.start()
            until(lambda: scraped(port)['commlayer_oldest_collective_seconds rank="0",group="0"'] > 0.2)
            ranks.store().set("rank 0 has waited", "1")
            waiting.join()
            assert scraped(port)['commlayer_oldest_collective_seconds rank="0",group="0"'] == 0
            assert scraped(port)['commlayer_waited_seconds_total rank="0",peer="1"'] > 0.2


def test_a_job_serves_its_counters() -> None:
    port = free_port()
    ranks.run(job, 2, port, environ={"COMMLAYER_METRICS_PORT": str(port), "COMMLAYER_SHM": "0"})


def job_of_a_taken_port(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        dist.all_reduce(torch.ones(3))


def test_a_taken_port_stops_no_job() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ranks.run(job_of_a_taken_port, 1, environ={"COMMLAYER_METRICS_PORT": str(taken.getsockname()[1])})


@ranks.on(1)
def test_without_a_group_there_are_no_metrics(rank: int, size: int) -> None:
    assert text() == ""


def test_labels_are_escaped() -> None:
    path: dict[str, Any] = dict.fromkeys(
        ("packets_sent", "packets_lost", "packets_received", "rate_bytes", "window_bytes", "queue_us", "is_dead"), 1
    )
    path |= {"round_trip_us": 1500, "interface": 'a"b\\c', "remote": "[::1]:7"}
    found = list(lines(Report({"packets_sent": 2, "waited_us": 5}, {3: Lag(1, 2_500_000)}, {3: [path]}), Recorder()))
    labels = r'rank="None",peer="3",path="0",interface="a\"b\\c",remote="[::1]:7"'
    assert f"commlayer_path_round_trip_seconds{{{labels}}} 0.0015" in found
    assert 'commlayer_waited_seconds_total{rank="None",peer="3"} 2.5' in found
    assert 'commlayer_packets_sent_total{rank="None"} 2' in found
    assert not [line for line in found if "waited_us" in line]
