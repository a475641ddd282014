"""The errors of operations: the last sign of life of a lost peer, by memory and by network."""

import os
import subprocess
import time
from typing import Any

import pytest
import torch

from commlayer.errors import ClosedError, PeerLostError
from commlayer.transport.call import Call
from commlayer.transport.diagnosis import Diagnosis
from commlayer.transport.inquiry import Verdict
from commlayer.transport.status import lib


class Paths:
    """The engine: what it knows of its paths."""

    def __init__(self, heard_us: list[int]) -> None:
        self.heard_us = heard_us
        self.routes = self

    def paths(self, peer: int) -> list[dict[str, int]]:  # noqa: ARG002
        if not self.heard_us:
            raise ClosedError("closed")
        return [{"heard_us": heard_us} for heard_us in self.heard_us]


def port(name: str, address: str, number: int) -> dict[str, Any]:
    shape = {"prefix": 24, "mtu": 1500, "loopback": False, "running": True, "version": 4}
    return {"ifname": name, "address": address, "port": number, **shape}


def descriptions(pid: int, *, one_host: bool) -> list[dict[str, Any]]:
    """Ranks 4 and 5 of the job."""
    found = []
    for rank in range(2):
        ports = [port(f"eth{nic}", f"10.0.{nic}.{rank + 1}", 20000 + rank) for nic in range(2)]
        host = 0 if one_host else rank
        about = {"peer": 4 + rank, "host": f"key {host}", "hostname": f"node{host}", "shm": True, "pid": pid}
        found.append({**about, "ports": ports})
    return found


def lost(
    heard_us: list[int], pid: int = 1, *, one_host: bool = False, left: bool = False, elapsed_s: float = 3.0
) -> PeerLostError:
    engine: Any = Paths(heard_us)
    diagnosis = Diagnosis(engine, "7", 0, descriptions(pid, one_host=one_host), lambda: "mesh_dp")
    call = Call.of("all_reduce", [torch.ones(3)], [], reduction="SUM")
    call.sequence, call.submitted_s, call.ended_s = 9, 1.0, 1.0 + elapsed_s
    error = diagnosis.error(lib.CL_EPEERLOST, 1, "", call, left=left)
    assert isinstance(error, PeerLostError)
    return error


def test_an_error_has_the_call_the_group_and_the_culprit() -> None:
    error = lost([])
    assert str(error) == (
        "rank 4 of group '7' (mesh_dp): all_reduce 9 of float32 [3], SUM: a peer died or stopped answering after 3 s "
        "(culprit: rank 5 on node1); look at that rank's log (did its script end before the others'?), and in its "
        "host's `dmesg` if it was killed without a word (out of memory); restart the job, or the group without it"
    )
    assert (error.rank, error.culprit, error.host, error.group) == (4, 5, "node1", "7")
    assert (error.operation, error.sequence) == ("all_reduce", 9)


def test_a_rank_that_has_left_the_group_did_not_die() -> None:
    assert str(lost([], os.getpid(), one_host=True, left=True)) == (
        "rank 4 of group '7' (mesh_dp): all_reduce 9 of float32 [3], SUM: rank 5 has left the group "
        "(destroy_process_group, or the end of its script) (culprit: rank 5 on node0); do all ranks make equally many "
        "steps, and the same calls? (DDP with uneven data: `with model.join():`)"
    )


@pytest.mark.parametrize(
    ("told", "remedy"),
    [
        ("rank 5 did not call it", "a rank is late, is stuck, or made other calls: look at its log and its stacks, or"),
        ("all ranks have called it", "their data did not come in time: look at print(commlayer.paths()), or"),
    ],
)
def test_a_timeout_is_told_with_the_remedy_for_its_cause(told: str, remedy: str) -> None:
    class Inquired:
        def timeout(self, call: Any, culprit: int | None, failure: str) -> Verdict:  # noqa: ARG002
            return Verdict(culprit, f"{failure}; {told}")

    engine: Any = Paths([])
    inquiry: Any = Inquired()
    diagnosis = Diagnosis(engine, "7", 0, descriptions(1, one_host=False), inquiry=inquiry)
    assert str(diagnosis.error(lib.CL_ETIMEDOUT, 1, "", None)) == (
        f"rank 4 of group '7': the operation timed out (culprit: rank 5 on node1); {told}; {remedy} raise the timeout "
        "of the group"
    )


def test_a_time_is_for_readers() -> None:
    assert "answering after less than 0.001 s (culprit" in str(lost([], elapsed_s=9.6e-05))
    assert "answering after 0.0156 s (culprit" in str(lost([], elapsed_s=0.0156))


def test_a_peer_that_was_heard_is_told_with_its_path() -> None:
    now_us = int(time.monotonic() * 1e6)
    text = str(lost([now_us - 9_000_000, now_us - 3_100_000]))
    assert "its last packet came 3.1 s ago over eth1 from 10.0.1.2:20001" in text


def test_a_peer_that_was_never_heard_is_told_with_all_paths() -> None:
    text = str(lost([0, 0]))
    assert "no packet of it ever came; paths: eth0 to 10.0.0.2:20001, eth1 to 10.0.1.2:20001: a firewall" in text
    assert "COMMLAYER_IFNAME" in text


@pytest.mark.parametrize("ended", [True, False])
def test_a_process_of_this_host_is_told_with_its_state(ended: bool) -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until `with` ends
        pid = child.pid if ended else os.getpid()
        state = "has ended" if ended else "is there, but does not answer"
        assert f"its process {pid} on this host {state}" in str(lost([], pid, one_host=True))


def test_a_culprit_may_be_unknown_or_this_rank() -> None:
    engine: Any = Paths([])
    diagnosis = Diagnosis(engine, "7", 0, descriptions(1, one_host=False))
    error = diagnosis.error(lib.CL_EABORTED, None, "", None)
    assert "the group was aborted; look for the first error" in str(error)
    assert error.culprit is None
    error = diagnosis.error(lib.CL_EABORTED, 0, "", None)
    assert "the group was aborted (culprit: rank 4, this one)" in str(error)
    assert error.culprit == error.rank == 4


@pytest.mark.parametrize(("culprit", "told"), [(None, " by this rank; make a new group"), (1, " (culprit: rank 5 on")])
def test_a_rank_that_aborts_its_group_is_told_so_unless_another_one_failed(culprit: int | None, told: str) -> None:
    engine: Any = Paths([])
    diagnosis = Diagnosis(engine, "7", 0, descriptions(1, one_host=False), is_aborted_here=True)
    for peer in (culprit, 0) if culprit is None else (culprit,):
        text = str(diagnosis.error(lib.CL_EABORTED, peer, "", None)).replace(" (culprit: rank 4, this one)", "")
        assert text.startswith(f"rank 4 of group '7': the group was aborted{told}")
