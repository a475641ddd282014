"""`commlayer check`: what it says about hosts and paths. tests/emulated/test_reach.py runs it."""

from typing import Any

from commlayer.tools import check
from commlayer.tools.check import path_lines, summary

EQUAL = [("a", 0.001), ("a", 0.0011), ("b", 0.0012), ("b", 0.001)]


def test_equal_ranks_are_not_slow() -> None:
    assert summary(EQUAL) == summary(EQUAL[:1]) == ["no rank computes much slower than the others"]


def test_a_rank_that_computes_slowly_is_named() -> None:
    assert summary([*EQUAL, ("c", 0.005)]) == ["SLOW: rank 4 on c computes 4.5 times as long as usual"]


def path(rank: int, **more: Any) -> dict[str, Any]:
    found = {"rank": rank, "interface": "eth0", "address": "10.0.0.1", "port": 20000, "remote": f"10.0.0.{rank}:20000"}
    counts = {"packets_sent": 10, "packets_lost": 1, "round_trip_us": 250, "is_answered": 1, "is_dead": 0}
    return {**found, **counts, **more}


def test_paths_that_do_not_work_come_first() -> None:
    lines = path_lines(1, [path(2), path(3, is_answered=0), path(4, packets_sent=0), path(5, is_dead=1)])
    assert [line.split(",")[0] for line in lines] == [
        "rank 1 to rank 3: eth0 10.0.0.1:20000 to 10.0.0.3:20000 DOES NOT WORK",
        "rank 1 to rank 5: eth0 10.0.0.1:20000 to 10.0.0.5:20000 DOES NOT WORK",
        "rank 1 to rank 2: eth0 10.0.0.1:20000 to 10.0.0.2:20000 works",
    ]
    assert lines[2].endswith(", 10 packets sent, 1 lost, round trip 0.25 ms")


def test_paths_beside_shared_memory_are_left_out() -> None:
    """Their few packets may have no answer yet."""
    few = path(1, interface="lo", address="127.0.0.1", packets_sent=1, is_answered=0)
    assert path_lines(0, [few, path(1, interface="lo", address="::1", packets_sent=2)]) == []
    assert "DOES NOT WORK" in path_lines(0, [{**few, "packets_sent": 500}])[0]


def test_many_paths_are_counted() -> None:
    lines = path_lines(0, [path(rank) for rank in range(1, 30)])
    assert len(lines) == check.PATHS_SHOWN + 1
    assert lines[-1] == f"rank 0: {29 - check.PATHS_SHOWN} more paths work"
