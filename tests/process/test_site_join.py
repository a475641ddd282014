"""A site of several ranks joins a training of `LocalSteps(min_sites=...)` as a whole."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.local.rounds import Rounds
from tests import ranks
from tests.process.local_deaths import Report, begin_site, check
from tests.process.local_plan import Plan
from tests.process.test_local_steps import Net, train


def of_two(layout: str, **given: Any) -> Plan:
    """Two sites of two ranks; processes 4 and 5 join."""
    return Plan(sites=2, layout=layout, width=2, joins=(1,), waits=True, **given)


def joined(found: dict[int, Report], first: int = 4) -> list[int]:
    """The turns in which the site of these processes counted."""
    turns = counted_at(found[first])
    assert turns == counted_at(found[first + 1])
    return turns


def counted_at(report: Report) -> list[int]:
    site = report.number // 2
    return [turn for turn, ended in report.syncs.items() if ended.counting[ended.members.index(site)]]


@pytest.mark.parametrize(
    "wire", [pytest.param({}, id="shm", marks=pytest.mark.slow), pytest.param(ranks.UDP, id="udp")]
)
@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.slow), {"codec": "int4-int8", "outer": (0.7, 0.6)}],
    ids=str,
)
def test_a_site_joins_and_counts(wire: dict[str, str], layout: str, more: dict[str, Any]) -> None:
    found = check(of_two(layout, has_buffers=True, **more), environ=wire)
    assert {process: report.number for process, report in found.items()} == {each: each for each in range(6)}
    assert found[4].steps == found[5].steps > 0
    assert 0 < len(joined(found)) < len(found[4].syncs) < len(found[0].syncs)


@pytest.mark.parametrize("wire", [{}, pytest.param(ranks.UDP, marks=pytest.mark.slow)], ids=str)
def test_a_site_joins_whose_world_has_another_backend(wire: dict[str, str]) -> None:
    """DDP averages by gloo; the ranks of the site have the numbers of others in the job."""
    assert joined(check(of_two("DDP", backend="gloo"), environ=wire))


@pytest.mark.slow
def test_a_site_of_replicas_joins() -> None:
    plan = Plan(sites=2, layout="HSDP", width=4, joins=(1,), waits=True, has_buffers=True)
    found = check(plan, environ=ranks.UDP, timeout_s=250.0)
    assert sorted(found) == list(range(12))
    assert 0 < len(found[8].syncs) < len(found[0].syncs)
    assert any(all(ended.counting) and 2 in ended.members for ended in found[0].syncs.values())


def test_a_site_that_lost_a_rank_comes_back_as_other_processes() -> None:
    found = check(Plan(sites=3, layout="DDP", width=2, kills=((4, 1, 0.0),), joins=(3,), waits=True, steps=28))
    assert sorted(found) == [0, 1, 2, 3, 6, 7]
    assert joined(found, 6)


def test_the_rank_that_gives_its_state_dies() -> None:
    """Its site goes; each rank of the new one gets its state from another site."""
    plan = Plan(sites=3, layout="DDP", width=2, joins=(1,), last_piece=(0, 3), waits=True, steps=28)
    found = check(plan)
    assert sorted(found) == [2, 3, 4, 5, 6, 7]
    assert joined(found, 6)


def test_a_rank_dies_while_its_site_gets_the_state() -> None:
    plan = Plan(
        sites=2, layout="FSDP2", width=2, joins=(1,), last_piece=(4, 3), waits=False, steps=40, pauses_s=(0.05,) * 6
    )
    found = check(plan)
    assert sorted(found) == [0, 1, 2, 3]
    assert any(2 in ended.members for ended in found[0].syncs.values())


def test_a_rank_dies_once_its_site_counts() -> None:
    found = check(of_two("DDP", kills=((5, 10, 0.001),), steps=28))
    assert sorted(found) == [0, 1, 2, 3]


def test_a_site_that_has_joined_votes_for_itself() -> None:
    """It and the first one are late at once, in several turns: one of them is left out, and not both."""
    away = tuple((process, turn) for process in (0, 4) for turn in range(12, 16))
    found = check(of_two("DDP", quorum=2, away=away, steps=36), environ=ranks.UDP)
    assert min(sum(found[0].syncs[turn].counting) for turn in range(12, 16)) == 2


def model_of(layout: str, mesh: Any) -> Any:
    model: Any = Net()
    if layout == "DDP":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if layout == "FSDP2":
        fully_shard(model, mesh=mesh)
    return model


def local_of(model: Any, **given: Any) -> commlayer.LocalSteps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return commlayer.LocalSteps(model, optimizer, **{"every": 4, "fragments": 2, "min_sites": 1, **given})


def refused(rank: int, size: int, layouts: tuple[str, str], world: int, given: dict[str, Any]) -> str:
    """Ranks 0 to 3 train, in sites of two ranks, or of one where they have no layout. The others ask to join, with a
    WORLD of so many ranks."""
    store: Any = ranks.store()
    if rank < 4:
        ranks.init(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "rank"))["rank"]
        with local_of(model := model_of(layouts[0], mesh)) as local:
            step = 0
            while local.steps < 40 or not all_know(local, store, size):
                train(model, local._optimizer, rank, [step])
                step += 1
                store.set("begun", "")
            assert local.ranks == [0, 1, 2, 3]
        return ""
    store.wait(["begun"])
    part: Any = dist.PrefixStore(f"site {(rank - 4) // world}", store)
    dist.init_process_group("commlayer", store=part, rank=(rank - 4) % world, world_size=world)
    mesh = init_device_mesh("cpu", (world // 2 or 1, min(world, 2)), mesh_dim_names=("site", "rank"))["rank"]
    with pytest.raises(commlayer.ConfigError) as caught, local_of(model_of(layouts[1], mesh), join=store, **given):
        pass
    store.set(f"refused {rank}", "")
    return str(caught.value)


def all_know(local: commlayer.LocalSteps, store: Any, size: int) -> bool:
    """Whether all that ask have been refused; all ranks come to the same result at the same step."""
    found = str(store.check([f"refused {rank}" for rank in range(4, size)]))
    return bool(store.compare_set(f"at {local.steps}", "", found) == b"True")


@pytest.mark.parametrize(
    ("layouts", "world", "given", "said"),
    [
        (("DDP", "DDP"), 2, {"every": 6}, "every is 6 here and 4 in the job"),
        (("DDP", "FSDP2"), 2, {}, r"the model \(.*\) is float32.*divided by.* here and float32.* in the job"),
        (("", "DDP"), 2, {}, "ranks per site is 2 here and 1 in the job"),
        (("DDP", "DDP"), 4, {}, r"a WORLD of 4 rank\(s\), and the ranks \[(0, 1|2, 3)\] are its site"),
        (("DDP", ""), 2, {}, r"a WORLD of 2 rank\(s\), and the ranks \[[01]\] are its site"),
        (("DDP", "DDP"), 2, {"min_sites": None}, "min_sites=None: a site joins as one of min_sites="),
    ],
    ids=str,
)
def test_a_site_that_does_not_fit_is_refused_on_all_its_ranks(
    layouts: tuple[str, str], world: int, given: dict[str, Any], said: str
) -> None:
    found = ranks.run(refused, 4 + world, layouts, world, given)
    for text in found[4:]:
        assert re.search(said, text), text


def long_turns(rank: int, size: int) -> tuple[list[int], int]:
    """A turn takes longer than the timeout."""
    store: Any = ranks.store()
    if rank < 4:
        ranks.init(rank, 4, timeout=timedelta(seconds=3))
    else:
        store.wait(["begun"])
        part: Any = dist.PrefixStore("site", store)
        dist.init_process_group("commlayer", store=part, rank=rank - 4, world_size=2)
    mesh = init_device_mesh("cpu", (1 if rank > 3 else 2, 2), mesh_dim_names=("site", "rank"))["rank"]
    model = model_of("DDP", mesh)
    with local_of(model, every=2, fragments=1, delay=2, join=store if rank > 3 else None) as local:
        while len(local.ranks) < 6 and local.steps < 16:
            store.set("begun", "")
            time.sleep(1.7)
            train(model, local._optimizer, rank, [local.steps])
    return local.ranks, local.steps


@pytest.mark.slow
def test_a_site_joins_where_a_turn_takes_longer_than_the_timeout() -> None:
    found = ranks.run(long_turns, 6)
    assert found == [found[0]] * 6
    assert found[0][0] == list(range(6))


def one_refused(rank: int, size: int) -> str:
    """Of the site that asks, one rank alone does not fit; both learn it."""
    return refused(rank, size, ("DDP", "DDP"), 2, {"codec": "none"} if rank == 5 else {})


def test_one_rank_that_does_not_fit_keeps_its_site_out() -> None:
    found = ranks.run(one_refused, 6)
    for text in found[4:]:
        assert "codec is none here and int4-int8 in the job" in text, text


def found_by_one(rank: int, met: Callable[..., Any]) -> Any:
    """A model of three sites of two ranks, of which the last joins. Rank 5 meets the others by `met`."""
    if rank < 4:
        ranks.init(rank, 4, timeout=timedelta(seconds=20))
    else:
        ranks.store().wait(["begun"])
        begin_site(of_two("DDP"), rank)
    if rank == 5:
        Rounds._meet = met  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (1 if rank > 3 else 2, 2), mesh_dim_names=("site", "rank"))["rank"]
    return model_of("DDP", mesh)


def asks_again(rank: int, size: int) -> list[str]:
    """In its first meeting, one rank of the site that joins finds an error. Returns what the log says of that."""
    store, logged = ranks.store(), ranks.logged()
    meet, errors = Rounds._meet, [commlayer.PeerLostError("injected")]

    def met(self: Rounds, sync: Any) -> Any:
        found = meet(self, sync)
        if errors:
            raise errors.pop()
        return found

    model = found_by_one(rank, met)
    with local_of(model, join=store if rank > 3 else None) as local:
        while len(local.ranks) < 6:
            store.set("begun", "")
            time.sleep(0.05)
            train(model, local._optimizer, rank, [local.steps])
    return [line for line in logged if "asks again" in line]


def test_a_site_asks_again_after_an_error_of_one_rank_in_its_first_meeting() -> None:
    found = ranks.run(asks_again, 6, environ=ranks.UDP)
    assert found[:4] == [[]] * 4
    for lines in found[4:]:
        assert len(lines) == 1, lines
        assert "injected" in lines[0], lines


def test_one_rank_with_an_argument_that_is_out_of_range_keeps_its_site_out() -> None:
    """It finds that before it asks the job."""
    for text in ranks.run(one_wrong, 6, timeout_s=60.0)[4:]:
        assert "min_sites=None: a site joins as one of min_sites=" in text, text


def one_wrong(rank: int, size: int) -> str:
    return refused(rank, size, ("DDP", "DDP"), 2, {"min_sites": None} if rank == 5 else {})


def fails_once(rank: int, size: int) -> tuple[str, list[str]]:
    """One rank of the site that joins has an error which is not commlayer's; the others train until both have left."""
    store, logged = ranks.store(), ranks.logged()

    def met(self: Rounds, sync: Any) -> Any:
        raise OSError("injected")

    model = found_by_one(rank, met)
    try:
        with local_of(model, join=store if rank > 3 else None) as local:
            while not all_know(local, store, size):
                store.set("begun", "")
                time.sleep(0.02)
                train(model, local._optimizer, rank, [local.steps])
    except commlayer.CommError as error:
        store.set(f"refused {rank}", "")
        return str(error), [line for line in logged if "asks again" in line]
    return "", []


def test_a_fault_of_one_rank_is_not_tried_again() -> None:
    found = ranks.run(fails_once, 6, environ=ranks.UDP)
    assert found[:4] == [("", [])] * 4
    assert found[4:] == [("OSError: injected", [])] * 2


def ends_as_it_joins(rank: int, size: int) -> str:
    """The training ends before the site has its state, and one of its ranks does not hear of the end, as its Store does
    not answer. Returns the kind of the error."""
    store: Any = ranks.store()
    model = found_by_one(rank, Rounds._meet)
    close = Rounds._close

    def without_a_store(self: Rounds) -> None:
        close(self)
        raise commlayer.CommError("no Store")

    if rank > 3:
        Rounds._pump = lambda *_, **__: False  # type: ignore[method-assign]
    if rank == 5:
        Rounds._close = without_a_store  # type: ignore[method-assign]
    try:
        with local_of(model, join=store if rank > 3 else None) as local:
            while len(local._training.living.members) < 3:  # type: ignore[union-attr]
                store.set("begun", "")
                time.sleep(0.02)
                train(model, local._optimizer, rank, [local.steps])
    except commlayer.CommError as error:
        return type(error).__name__
    return ""


def test_all_ranks_of_a_site_end_alike_where_the_training_ends_as_it_joins() -> None:
    """They ask again, all or none."""
    assert ranks.run(ends_as_it_joins, 6, environ=ranks.UDP) == [""] * 4 + ["ClosedError"] * 2


def dies_before_with(rank: int, size: int, backend: str) -> str:
    store: Any = ranks.store()
    part = dist.PrefixStore("site", store)
    dist.init_process_group(backend, store=part, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    model = model_of("DDP", init_device_mesh("cpu", (1, size), mesh_dim_names=("site", "rank"))["rank"])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(commlayer.PeerLostError) as caught, local_of(model, join=store):
        pass
    return str(caught.value)


@pytest.mark.parametrize("backend", ["commlayer", "gloo"])
def test_a_rank_that_dies_before_its_site_asks_is_named(backend: str) -> None:
    """Long before the timeout of the site's WORLD."""
    found = ranks.results(ranks.outcomes(dies_before_with, 3, backend, environ=ranks.UDP), {1})
    for rank in (0, 2):
        named = "rank(s) 1 of its group, 0, 1, 2, ended before `with`" if backend == "gloo" else "rank 1"
        assert named in found[rank], found
