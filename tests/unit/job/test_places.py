"""The rank of a process, and the TCP counters of its host."""

from pathlib import Path

from commlayer.tools.job.places import rank_of, tcp_counts


def test_the_rank_of_a_process_without_a_group() -> None:
    assert rank_of({"RANK": "3"}) == 3
    assert rank_of({}) == 0


def test_segments_are_counted_by_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "snmp"
    table.write_text("Ip: Forwarding\nIp: 1\nTcp: MaxConn InSegs OutSegs RetransSegs\nTcp: -1 900 1000 12\n")
    assert tcp_counts(table) == {"sent": 1000, "resent": 12}
    assert tcp_counts(tmp_path / "absent") == {}
    assert set(tcp_counts()) == {"sent", "resent"}
