"""Processes that die, freeze, leave early or come late."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks

from .scene import (
    PEER_TIMEOUT_S,
    SLACK_S,
    Seen,
    Site,
    begin,
    culprit_of,
    die,
    freeze_myself,
    later,
    mark,
    meeting,
    note,
    survived,
    watch,
    witness,
)

PTRACE_SEIZE = 0x4206
PTRACE_O_TRACEEXIT = 1 << 6

LARGE = 16 << 20
"""Elements: 64 MiB take tens of milliseconds anywhere."""


def small() -> None:
    dist.all_reduce(torch.ones(3))


def large() -> None:
    dist.all_reduce(torch.ones(LARGE))


def times(count: int, operation: Callable[[], None]) -> None:
    for _ in range(count):
        operation()


def _killed_idle(rank: int, size: int) -> Seen:
    begin(rank, size)
    if rank == size - 1:
        die()
    time.sleep(0.5)
    mark()  # from here on a rank waits
    return witness(small)


def _killed_in_large(rank: int, size: int) -> Seen:
    begin(rank, size)
    large()
    dist.barrier()
    with later(0.02, die if rank == size - 1 else lambda: None):
        return witness(lambda: times(100, large))


def _killed_before_small(rank: int, size: int) -> Seen:
    begin(rank, size)
    if rank == size - 1:
        time.sleep(0.3)  # the others wait by now
        die()
    return witness(small)


def _killed_behind_a_late_rank(rank: int, size: int) -> Seen:
    """The others wait for rank 0 first, which does not come before they have noticed."""
    begin(rank, size)
    if rank == size - 1:
        die()
    if rank == 0:
        meeting().wait([f"noticed {other}" for other in range(1, size - 1)])
    seen = witness(small)
    meeting().set(f"noticed {rank}", "")
    return seen


def expect_loss(site: Site, outcomes: list[ranks.Outcome], fault: str, victim: int, *, leaves: bool = False) -> None:
    seen = survived(outcomes, victim)
    for rank, outcome in seen.items():
        assert outcome.error == "PeerLostError", outcome
        assert outcome.text.startswith(f"rank {rank} of group '0' (default_pg): all_reduce "), outcome
        if leaves and site.shares_memory(rank, victim):
            assert f"rank {victim} has left the group (destroy_process_group, or the end of" in outcome.text
            assert f"(culprit: rank {victim} on " in outcome.text
            assert "); do all ranks make equally many steps" in outcome.text
        else:
            assert ": a peer died or stopped answering after " in outcome.text
            assert f" s (culprit: rank {victim} on " in outcome.text
            sign = "its process " if site.shares_memory(rank, victim) else "its last packet came "
            assert sign in outcome.text, outcome
            assert "); look at that rank's log" in outcome.text
        assert outcome.seconds < PEER_TIMEOUT_S + SLACK_S
    note(fault, site.name, seen, PEER_TIMEOUT_S)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (_killed_idle, "kill -9 of an idle rank"),
        (_killed_in_large, "kill -9 in a 64 MiB all-reduce"),
        (_killed_before_small, "kill -9 while the others wait"),
        (_killed_behind_a_late_rank, "kill -9 while another rank is late"),
    ],
    ids=["idle", "large", "small", "late"],
)
def test_a_killed_rank_is_lost_to_all(site: Site, body: Callable[..., Seen], fault: str) -> None:
    victim = site.size - 1
    outcomes = site.outcomes(body)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    expect_loss(site, outcomes, fault, victim)


def _hold_at_exit(process: int) -> None:
    """Traces another process, so that it stays between a fatal signal and its end as long as this process lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, process, None, ctypes.c_void_p(PTRACE_O_TRACEEXIT)) != 0:
        raise OSError(ctypes.get_errno(), f"cannot trace process {process}")


def _dies_slowly(rank: int, size: int) -> None:
    ranks.init(rank, size)
    store = ranks.store()
    if rank == 1:
        store.set("victim", str(os.getpid()))
        store.wait(["held"])
        die()
    _hold_at_exit(int(store.get("victim")))
    store.set("held", "")
    told = r"rank 1 on .*; its process \d+ on this host was ended by a signal"
    with pytest.raises(commlayer.PeerLostError, match=told):
        small()


def test_a_rank_is_lost_before_the_kernel_has_freed_its_memory() -> None:
    """The kernel tells of the end of a process when its core is written and its memory is free: 18 s for 1.5 GiB."""
    survivor, victim = ranks.outcomes(_dies_slowly, 2)
    assert survivor.error is None, survivor.error
    assert victim.exit_code == -signal.SIGKILL


def _frozen(rank: int, size: int, seconds: float) -> Seen:
    begin(rank, size)
    if rank == size - 1:
        freeze_myself(seconds)
    return witness(lambda: times(3, small))


def test_a_rank_frozen_for_long_is_lost(site: Site) -> None:
    seen = survived(site.outcomes(_frozen, 5.0))
    frozen = site.size - 1
    for rank in range(frozen):
        assert seen[rank].error == "PeerLostError", seen[rank]
        assert culprit_of(seen[rank]) == frozen
        assert seen[rank].seconds < PEER_TIMEOUT_S + SLACK_S
    assert seen[frozen].error in ("PeerLostError", "AbortedError"), seen[frozen]
    del seen[frozen]
    note("SIGSTOP for 5 s", site.name, seen, PEER_TIMEOUT_S)


def test_a_rank_frozen_briefly_is_waited_for(site: Site) -> None:
    seen = survived(site.outcomes(_frozen, 1.5))
    assert [outcome.error for outcome in seen.values()] == [None] * site.size
    note("SIGSTOP for 1.5 s", site.name, seen)


def _leaves(rank: int, size: int, destroys: bool) -> Seen:
    begin(rank, size)
    if rank == size - 1:
        time.sleep(0.3)
        mark()
        if destroys:
            dist.destroy_process_group()
            meeting().wait(["noticed"])
        return Seen(None, "", 0.0)
    seen = witness(small)
    meeting().set("noticed", "1")
    return seen


@pytest.mark.parametrize("destroys", [False, True], ids=["exits", "destroys"])
def test_a_rank_that_leaves_before_its_part_is_lost_to_all(site: Site, destroys: bool) -> None:
    outcomes = site.outcomes(_leaves, destroys)
    leaver = site.size - 1
    assert outcomes[leaver].error is None
    fault = "a rank destroys its group too early" if destroys else "a rank exits too early"
    expect_loss(site, outcomes, fault, leaver, leaves=destroys)


def _leaves_afterwards(rank: int, size: int) -> Seen:
    begin(rank, size)
    tensor = torch.full((3000,), float(rank))
    if rank != 0:
        time.sleep(0.3)
    mark()
    dist.broadcast(tensor, 0)
    assert tensor.sum().item() == 0.0
    return Seen(None, "", 0.0)


def test_a_rank_that_exits_after_its_part_is_not_missed(site: Site) -> None:
    seen = survived(site.outcomes(_leaves_afterwards))
    note("a rank exits after its part", site.name, seen)


def _never_calls(rank: int, size: int) -> Seen:
    begin(rank, size)
    # The timeout holds from here on: a busy machine may need longer than that to start.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    mark()
    if rank == size - 1:
        meeting().wait([f"noticed {peer}" for peer in range(size - 1)])
        return witness(small)
    seen = witness(small)
    meeting().set(f"noticed {rank}", "1")
    return seen


def test_a_rank_that_never_calls_is_named_at_the_timeout(site: Site) -> None:
    seen = survived(site.outcomes(_never_calls))
    late = site.size - 1
    first = {rank: outcome for rank, outcome in seen.items() if outcome.error == "OperationTimeoutError"}
    assert first
    for rank, outcome in first.items():
        # Other hosts wait for a rank of that host, which may be one that waits for the late one itself.
        named = (
            [late]
            if site.shares_memory(rank, late)
            else [r for r in range(1, site.size) if site.shares_memory(r, late)]
        )
        assert culprit_of(outcome) in {late, *named}, (rank, outcome)
        assert "the operation timed out after 1" in outcome.text
        assert "did not call it; a rank is late, is stuck, or made other calls: look at its log" in outcome.text
    for outcome in seen.values():
        assert outcome.error in ("OperationTimeoutError", "AbortedError"), outcome
        assert outcome.seconds < 1.0 + SLACK_S
    assert seen[late].error == "AbortedError"
    assert "the operation timed out after 1" in seen[late].text  # on the rank that failed first
    assert len({culprit_of(outcome) for outcome in seen.values()}) == 1, seen
    del seen[late]
    note("a rank never calls, timeout 1 s", site.name, seen, 1.0)


JOB = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import commlayer

dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
model = DistributedDataParallel(torch.nn.Linear(64, 64))
for step in range(10**6):
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 64)).sum().backward()
"""


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "udp"])
def test_an_uncaught_error_ends_a_training_script_with_1(tmp_path: Path, shm: str) -> None:
    """It does not end with a signal: neither our threads nor gloo's may end the process before Python has said why."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = []
    for rank in range(2):
        environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "COMMLAYER_SHM": shm, "COMMLAYER_IFNAME": "lo"}
        environ = ranks.script_environ(**environ)
        processes.append(
            subprocess.Popen([sys.executable, str(script)], env=environ, stderr=subprocess.PIPE, text=True)
        )
    texts = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL], texts
    assert "PeerLostError" in texts[0] or "a peer died or stopped answering after" in texts[0]
    assert "culprit: rank 1 on " in texts[0]


def _loop(rank: int, size: int) -> Seen:
    begin(rank, size)
    return watch(small, 0.5)


def test_the_watch_itself_sees_nothing(site: Site) -> None:
    for outcome in survived(site.outcomes(_loop)).values():
        assert outcome.error is None
