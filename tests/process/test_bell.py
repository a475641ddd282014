"""`LocalSteps(uneven=True)`: a slow site begins a turn when the fastest one does, and counts by its steps."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.frontend.local.bell import Bell
from tests import ranks
from tests.process.hosts import LOOPBACK, on_hosts
from tests.process.local_deaths import check
from tests.process.local_plan import Plan
from tests.process.test_local_errors import check_refused, sgd
from tests.process.test_local_steps import Given, Net
from tests.world import until


def slow_last(**more: Any) -> Plan:
    return Plan(steps=40, every=8, is_uneven=True, pauses_s=(0.01, 0.01, 0.01, 0.08), **more)


@pytest.mark.parametrize("codec", ["none", "int4-int8"])
def test_a_slow_site_makes_fewer_steps_of_which_each_counts(codec: str) -> None:
    """The mean steps of the sites take 5 and 40 ms."""
    lived = check(slow_last(codec=codec), environ=ranks.UDP)
    steps = [lived[rank].steps for rank in range(4)]
    assert steps[3] < min(steps[:3]) / 2, steps
    heads = [ended.samples for ended in lived[0].syncs.values()]
    assert any(samples[3] < min(samples[:3]) for samples in heads)


def test_a_slow_site_that_dies() -> None:
    lived = check(slow_last(kills=((3, 5, 0.001),)), environ=ranks.UDP)
    assert set(lived) == {0, 1, 2}


def test_even_sites_wait_for_the_slowest() -> None:
    """The control: without `uneven`, all make as many steps."""
    lived = check(Plan(steps=16, every=8, pauses_s=(0.01, 0.01, 0.01, 0.08)), environ=ranks.UDP)
    assert {lived[rank].steps for rank in range(4)} == {16}


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_loop_that_has_ended_does_not_shorten_the_turns_of_the_others(rank: int, size: int) -> None:
    """Rank 0 makes one turn, then waits in its last syncs for those of rank 1."""
    model = Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlayer.LocalSteps(model, optimizer, 8, 2, (1.0, 0.0), "none", uneven=True) as local:
        for step in range(4 if rank == 0 else 40):
            time.sleep(0.03)  # longer than the thread waits between two looks
            model.step(optimizer, rank, step)
        syncs = local.syncs
    assert local.trained == 44
    assert rank == 0 or syncs <= 13, syncs  # its own are ten; if it heard each of the last syncs, about 40


def local_of(model: Given, rank: int) -> commlayer.LocalSteps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return commlayer.LocalSteps(model, optimizer, 4, 2, (1.0, 0.0), "none", lambda: 3 - rank, uneven=True)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_trained_goes_on_from_a_checkpoint(rank: int, size: int) -> None:
    """It is saved after the same sync on both ranks; their steps differ."""
    model, steps = Given(), 0
    with local_of(model, rank) as local:
        while not local.passed(20):
            model.step(local._optimizer, rank, steps)
            steps += 1
        before, state, weights = local.trained, local.state_dict(), copy.deepcopy(model.state_dict())
    made: list[Any] = [None] * size
    dist.all_gather_object(made, steps)
    assert 20 <= before <= local.trained == 3 * made[0] + 2 * made[1]
    model.load_state_dict(weights)
    again = local_of(model, rank)
    again.load_state_dict(state)
    with again:
        assert again.trained == before
    assert again.trained == local.trained


def listening(rank: int, size: int) -> None:
    store = ranks.store()
    bell = Bell(store, 3, 5.0)
    assert not bell.rung(3)
    ranks.meet("listen", size)
    if rank == 1:
        bell.ring(3)
    until(lambda: bell.rung(3))
    assert not bell.rung(4)
    bell.close()
    assert not bell._thread.is_alive()


def test_all_hear_the_bell() -> None:
    ranks.run(listening, 2)


@pytest.mark.parametrize("given", [{"uneven": True}, {"quorum": 1}], ids=str)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_second_training_hears_no_bell_of_the_first(rank: int, size: int, given: dict[str, Any]) -> None:
    """Their groups have the same part of the Store."""
    for _ in range(2):
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with commlayer.LocalSteps(model, optimizer, 4, 2, codec="none", **given) as local:
            time.sleep(0.3)  # far longer than the thread waits between two looks
            assert not local._training.rounds._bell.rung(0)  # type: ignore[union-attr]
            dist.barrier()
            for step in range(8):
                model.step(optimizer, rank, step)


ENDING = """
import sys
import time
import torch
import torch.distributed as dist
import commlayer

store = dist.TCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("commlayer", rank=0, world_size=1, store=store)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local = commlayer.LocalSteps(model, optimizer, every=4, min_sites=1, uneven=True)
local.__enter__()
optimizer.step()
time.sleep(1.5)  # far longer than the thread waits between two looks
if sys.argv[1] == "after":
    local.__exit__(None, None, None)
"""


@pytest.mark.parametrize("when", ["after", "within"])
def test_the_process_may_end(when: str) -> None:
    """A thread in the Store would abort it; torch would log each wait of a thread that ends in vain."""
    command = [sys.executable, "-c", ENDING, when]
    ended = subprocess.run(command, env=ranks.script_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "timed out" not in ended.stderr
    assert ("the process ends within `with`" in ended.stderr) == (when == "within")


@pytest.mark.parametrize("min_sites", [None, 1])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_no_thread_is_left(rank: int, size: int, min_sites: int | None) -> None:
    before = set(threading.enumerate())
    with commlayer.LocalSteps((model := Net()), sgd(model), 4, uneven=True, min_sites=min_sites):
        assert {thread.name for thread in threading.enumerate()} >= {"commlayer-bell"}
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not left & {"commlayer-bell", "commlayer-pulse"}


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_what_is_no_truth_value_is_refused(rank: int, size: int) -> None:
    check_refused(r"LocalSteps\(uneven=1\): use True or False", Net(), uneven=1)
    check_refused(r"LocalSteps\(every='auto', uneven=True\).*; give every", Net(), every="auto", uneven=True)
    check_refused("uneven differs: False on rank 0, True on rank 1", Net(), uneven=rank == 1)


def on_shared_hosts(rank: int, size: int) -> None:
    with on_hosts(rank, size, [0, 0, 1, 1]):
        check_refused(r"LocalSteps\(uneven=True, codec='int4-int8'\): the ranks \[0, 1\]", Net(), uneven=True)


def test_a_codec_is_refused_where_ranks_share_a_host() -> None:
    ranks.run(on_shared_hosts, 4, environ=LOOPBACK)
