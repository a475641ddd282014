"""A site joins a training of `LocalSteps(min_sites=...)` that has begun."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks
from tests.process.hosts import LOOPBACK
from tests.process.local_deaths import Report, check
from tests.process.local_plan import SIZE, Plan
from tests.process.test_local_state import copied
from tests.process.test_local_steps import Net, train


def counted(report: Report) -> list[int]:
    """The turns of the syncs in which the site counted."""
    return [turn for turn, ended in report.syncs.items() if ended.counting[ended.members.index(report.number)]]


@pytest.mark.parametrize(
    "wire", [pytest.param({}, id="shm", marks=pytest.mark.slow), pytest.param(ranks.UDP, id="udp")]
)
@pytest.mark.parametrize("more", [{}, {"codec": "int4-int8"}, {"outer": (0.7, 0.6)}, {"is_uneven": True}], ids=str)
def test_a_site_joins_and_counts(wire: dict[str, str], more: dict[str, Any]) -> None:
    found = check(Plan(joins=(1,), waits=True, has_buffers=True, **more), environ=wire)
    joined = found[SIZE]
    assert joined.number == SIZE
    assert joined.steps > 0
    assert 0 < len(counted(joined)) < len(joined.syncs) < len(found[0].syncs)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1, 1), pytest.param((0, 0, 0, 0, 1), marks=pytest.mark.slow)], ids=str)
def test_a_site_joins_on_a_host_of_several(hosts: tuple[int, ...]) -> None:
    """A host encodes the sum of its sites; one that counts nothing yet may be the one that keeps the error."""
    found = check(Plan(joins=(1,), waits=True, codec="int4-int8", hosts=hosts, steps=28), environ=LOOPBACK)
    assert counted(found[SIZE])


@pytest.mark.parametrize("seed", range(3))
def test_a_site_joins_while_h_changes(seed: int) -> None:
    """It learns H from the syncs of the others: `check` compares the turns at the end."""
    found = check(Plan(seed, joins=(1,), waits=True, is_paced=True, codec="int8", steps=40))
    assert len(counted(found[SIZE])) > 1
    assert found[0].turns.since_turn > 0


def test_two_sites_join_at_once() -> None:
    found = check(Plan(joins=(1, 1), waits=True))
    assert {found[process].number for process in (SIZE, SIZE + 1)} == {SIZE, SIZE + 1}
    assert all(counted(found[process]) for process in (SIZE, SIZE + 1))


def test_a_site_that_died_comes_back_as_another_process() -> None:
    found = check(Plan(kills=((3, 1, 0.0),), joins=(3,), waits=True, steps=28))
    assert sorted(found) == [0, 1, 2, SIZE]
    assert found[0].syncs[max(found[0].syncs)].members == (0, 1, 2, SIZE)


@pytest.mark.parametrize("kept", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_site_that_gives_its_state_dies(kept: int) -> None:
    found = check(Plan(joins=(1,), last_piece=(0, 4), kept=kept, waits=True, steps=28))
    assert sorted(found) == [1, 2, 3, SIZE]
    assert counted(found[SIZE])


def test_a_site_dies_while_it_gets_the_state() -> None:
    found = check(Plan(joins=(1,), last_piece=(SIZE, 4), waits=False, steps=40, pauses_s=(0.05,) * 5))
    assert sorted(found) == [0, 1, 2, 3]
    assert any(SIZE in ended.members for ended in found[0].syncs.values())


def test_a_site_dies_once_it_counts() -> None:
    """It joins at the sixth sync at the latest: the steps before are long."""
    found = check(Plan(joins=(1,), kills=((SIZE, 10, 0.001),), waits=True, steps=28))
    assert sorted(found) == [0, 1, 2, 3]


def _lonely(rank: int, size: int) -> str:
    """All that have the state die while rank 2 gets it."""
    store: Any = ranks.store()
    if rank == 2:
        store.wait(["begun"])
    else:
        ranks.init(rank, 2, timeout=timedelta(seconds=20))
    local = _local(Net(), join=store if rank == 2 else None)
    try:
        with local:
            for step in range(1000):
                train(local._model, local._optimizer, rank, [step])
                store.set("begun", "")
                time.sleep(0.02)
                if local._training.living is not None and local._training.living.listening:
                    os.kill(os.getpid(), signal.SIGKILL)
    except commlayer.PeerLostError as error:
        return str(error)
    return "trained"


def _local(model: torch.nn.Module, **given: Any) -> commlayer.LocalSteps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return commlayer.LocalSteps(model, optimizer, **{"every": 4, "fragments": 2, "min_sites": 1, **given})


def test_a_site_that_outlives_all_that_have_the_state_raises() -> None:
    found = ranks.outcomes(_lonely, 3)
    assert "are fewer than min_sites=1" in found[2].result or "have died" in found[2].result, found[2]


def _refused(rank: int, size: int, given: dict[str, Any]) -> str:
    store: Any = ranks.store()
    if rank == 2:
        store.wait(["begun"])
        model = torch.nn.Linear(3, 2) if given.pop("model", None) else Net()
        with pytest.raises(commlayer.ConfigError) as caught, _local(model, join=store, **given):
            pass
        store.set("refused", "")
        return str(caught.value)
    ranks.init(rank, 2)
    with _local(model := Net()) as local:
        step = 0
        while local.steps < 40 or not _all_know(local, store):
            train(model, local._optimizer, rank, [step])
            step += 1
            store.set("begun", "")
        assert local.ranks == [0, 1]
    dist.destroy_process_group()
    return ""


def _all_know(local: commlayer.LocalSteps, store: Any) -> bool:
    """Whether rank 2 has been refused; the sites come to the same result at the same step."""
    return bool(store.compare_set(f"at {local.steps}", "", str(store.check(["refused"]))) == b"True")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": True}, r"the model \(weight\) is float32\[2, 3\] \(trained\) here and missing in the job"),
        ({"every": 6}, "every is 6 here and 4 in the job"),
        ({"fragments": 1}, "fragments is 1 here and 2 in the job"),
        ({"codec": "none"}, "codec is none here and int4-int8 in the job"),
        ({"min_sites": 2}, "min_sites is 2 here and 1 in the job"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_site_that_does_not_fit_is_refused_and_harms_nobody(given: dict[str, Any], said: str) -> None:
    found = ranks.run(_refused, 3, given)
    assert re.search(said, found[2]), found[2]


def _scheduled(rank: int, size: int, backend: str, before: int) -> tuple[list[int], int, list[float], int]:
    """Two exact steps, then local ones; `auto` would take as long. Each step has another learning rate. `before`: the
    H before a restart, after step 7; 0: there is none."""
    store: Any = ranks.store()
    joins = rank == 2
    if joins:
        store.wait(["begun"])
    else:
        ranks.init(rank, 2, backend)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 if joins else 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    given: dict[str, Any] = {"min_sites": 1, "exact_steps": 2, "schedule": schedule}
    local = commlayer.LocalSteps(model, optimizer, 4, 2, join=store if joins else None, **given)
    if before and not joins:
        with commlayer.LocalSteps(model, optimizer, before, 2, **given) as former:
            for step in range(7):
                train(model, optimizer, rank, [step])
                schedule.step()
            saved = copied((model.state_dict(), optimizer.state_dict(), former.state_dict()))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        local.load_state_dict(saved[2])
    rates = {}
    with local:
        assert local.rank == rank
        while local.steps < 60:
            rates[local.steps] = optimizer.param_groups[0]["lr"]
            train(model, optimizer, rank, [local.steps])
            schedule.step()
            if local.steps == 8:
                store.set("begun", "")
            time.sleep(0.2 if local.steps > 8 and len(local.ranks) < 3 and local.steps < 50 else 0.0)
    assert not joins or min(rates) > 8
    wrong = {step: rate for step, rate in rates.items() if abs(rate / 0.01 / 0.9**step - 1) > 1e-9}
    assert not wrong, wrong
    return local.ranks, local.steps, [float(value.sum()) for value in model.parameters()], schedule.last_epoch


@pytest.mark.parametrize(("backend", "before"), [("commlayer", 0), ("gloo", 0), ("commlayer", 2)])
def test_schedule_and_ranks_of_a_site_that_has_joined(backend: str, before: int) -> None:
    found = ranks.run(_scheduled, 3, backend, before)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [0, 1, 2]
    assert found[0][3] == 60


def _long_turns(rank: int, size: int, delay: int) -> tuple[list[int], int]:
    """A turn takes longer than the timeout."""
    store: Any = ranks.store()
    if rank == 2:
        store.wait(["begun"])
    else:
        ranks.init(rank, 2, timeout=timedelta(seconds=3))
    model = Net()
    local = _local(model, every=2, fragments=1, delay=delay, join=store if rank == 2 else None)
    with local:
        while len(local.ranks) < 3 and local.steps < 16:
            store.set("begun", "")
            time.sleep(1.7)
            train(model, local._optimizer, rank, [local.steps])
    if rank < 2:
        dist.destroy_process_group()
    return local.ranks, local.steps


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_site_joins_where_a_turn_takes_longer_than_the_timeout(delay: int) -> None:
    found = ranks.run(_long_turns, 3, delay)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [0, 1, 2]


@ranks.on(2)
def test_calls_that_make_no_sense(rank: int, size: int) -> None:
    for given, said in (({"min_sites": None}, "min_sites=None"), ({"join": "host"}, "give a Store")):
        with pytest.raises(commlayer.ConfigError, match=said), _local(Net(), **{"join": ranks.store(), **given}):
            pass
    ranks.init(rank, size)
    with pytest.raises(commlayer.ConfigError, match="has a WORLD"), _local(Net(), join=ranks.store()):
        pass
    with _local(Net()):
        pass
    ranks.meet("ended", size)
    dist.destroy_process_group()
    with pytest.raises(commlayer.ClosedError, match="has ended"), _local(Net(), join=ranks.store()):
        pass
