"""`LocalSteps(quorum=...)`: a site whose loop is late is left out of a sync, and none of its steps is lost."""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.group import kept
from commlayer.frontend.local import grace
from tests import ranks
from tests.process import local_plan
from tests.process.local_deaths import by_fragment, check, left_out
from tests.process.local_plan import Plan
from tests.process.test_local_errors import Stopped, begin, check_refused, run
from tests.process.test_local_steps import Given, Net, equal_on_all, train
from tests.world import until

IN_ORDER = {**ranks.NETWORK, "COMMLAYER_DETERMINISTIC": "1"}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"codec": "int4-int8", "outer": (0.7, 0.6)},
        {"weights": (1, 2, 0, 3)},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"is_uneven": True}, {"delay": 0}, {"delay": 1})),
    ],
    ids=str,
)
def test_sites_that_are_late_lose_no_step(more: dict[str, Any]) -> None:
    """One is late in a sync, another in several in a row, and two at once; on a busy machine others, too. `check` adds
    up what all have sent."""
    away = ((1, 2), (2, 4), (2, 5), (2, 6), (1, 8), (3, 8))
    found = check(Plan(quorum=1, away=away, has_buffers=True, steps=28, **more), environ=ranks.UDP)
    assert len(found) == 4
    assert any(report.missed for report in found.values())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drawn_programs(seed: int) -> None:
    """With sites that die, join and are late."""
    check(local_plan.late(local_plan.random_plan(7000 + seed)), environ=ranks.UDP)


def test_no_more_sites_are_late_than_the_quorum_permits() -> None:
    found = check(Plan(quorum=3, away=((1, 3), (2, 3), (3, 3)), steps=12), environ=ranks.UDP)
    assert len([site for site, turn in left_out(found[0]) if turn == 3]) == 1


def test_a_site_dies_while_another_one_is_late() -> None:
    """Its thread comes to the meeting of those that live."""
    found = check(Plan(quorum=1, away=((1, 3), (1, 4)), kills=((2, 3, 0.0),)), environ=ranks.UDP)
    assert sorted(found) == [0, 1, 3]
    assert found[1].missed


def slow_after_a_death(rank: int, size: int) -> tuple[str, list[int]]:
    """Rank 2 dies when a sync begins. Rank 1 then makes a slow step, long before the others apply that sync."""
    vars(grace).update(TURNS_LEAST=1)
    ranks.init(rank, size, timeout=timedelta(seconds=1))

    def before(step: int, _: Any) -> None:
        if (rank, step) == (2, 19):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6 if (rank, step) == (1, 22) else 0.01 if step < 19 else 0.2)

    with begin(Net(), every=20, quorum=1, min_sites=1) as local:
        for step in range(32):
            before(step, local)
            train(local._model, local._optimizer, rank, [step])
        return local.explain(), local.ranks


def test_a_slow_step_after_a_death_is_no_meeting() -> None:
    """The thread would wait there for the others, who come a turn later."""
    ended = ranks.outcomes(slow_after_a_death, 3, environ={**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "0.5"})
    for text, living in ranks.results(ended, {2})[:2]:
        assert living == [0, 1]
        assert "a grace of" in text


@pytest.mark.slow
def test_a_site_joins_while_another_one_is_late() -> None:
    found = check(Plan(quorum=1, away=((1, 4), (1, 5), (1, 6)), joins=(1,), waits=True, steps=40), environ=ranks.UDP)
    assert found[4].number == 4
    assert found[1].missed


def inviter_is_away(rank: int, size: int) -> list[int]:
    """The last rank joins while the loop of the first one, which invites, waits for that."""
    quick()
    store: Any = ranks.store()
    joins, end = rank == size - 1, math.inf
    if joins:
        store.wait(["away"])
    else:
        ranks.init(rank, size - 1, timeout=timedelta(seconds=300))
    with begin(Net(), quorum=1, min_sites=1, join=store if joins else None) as local:
        store.set("joined" if joins else "begun", "")
        while local.trained < end:
            if rank == 0 and local.steps == 9:
                store.set("away", "")
                store.wait(["joined"])
            if end == math.inf and store.check(["joined"]):
                end = float(store.compare_set("end", "", str(local.trained + 100)))
            time.sleep(0.01)
            train(local._model, local._optimizer, rank, [local.steps])
        return local.ranks


def test_a_site_joins_while_the_one_that_invites_is_late() -> None:
    """Another one sends it the state."""
    assert ranks.run(inviter_is_away, 4, environ=ranks.UDP) == [[0, 1, 2, 3]] * 4


def local_of(model: Any, momentum: float = 0.9, **given: Any) -> commlayer.LocalSteps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return commlayer.LocalSteps(model, optimizer, **{"every": 4, "fragments": 2, "outer": (0.7, 0.6), **given})


@pytest.mark.parametrize("delay", [0, 2])
@ranks.on(3, ranks.run_job, environ=IN_ORDER)
def test_a_level_job_has_the_bits_of_one_without_a_quorum(rank: int, size: int, delay: int) -> None:
    """The grace is long, so that no site is late on a busy machine."""
    vars(grace).update(SECONDS_LEAST=30.0)
    found = []
    for quorum in (None, 1):
        with local_of(model := Given(), delay=delay, quorum=quorum) as local:
            for step in range(40):
                model.step(local._optimizer, rank, step)
            assert quorum is None or "left out of 0 syncs" in local.explain()
        found.append(model.values())
    assert torch.equal(*found)


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_a_site_of_several_ranks_is_late_as_a_whole(layout: str) -> None:
    """One loop is away, and the others of its site wait for it in the next pass. `check` compares the places. On a busy
    machine a step may take turns: then the loop is not away at each of these."""
    away = ((2, 2), (5, 4), (5, 5), (5, 6), (0, 8), (4, 8))
    plan = Plan(sites=3, layout=layout, width=2, quorum=1, away=away, has_buffers=True, steps=28)
    found = check(plan, environ=ranks.UDP)
    assert len(found) == 6
    assert any(report.missed for report in found.values())


@ranks.on(4, environ=ranks.NETWORK)
def test_a_rank_that_is_away_before_its_step_is_waited_for(rank: int, size: int) -> None:
    """Its neighbour has made that step, and waits in DDP: no thread may act for the two of them."""
    quick()
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "rank"))
    model = DistributedDataParallel(nn.Linear(8, 4), process_group=mesh.get_group("rank"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with commlayer.LocalSteps(model, optimizer, every=8, quorum=1) as local:
        while local.trained < 120:
            model(torch.ones(2, 8)).square().mean().backward()
            if rank == 2 and local.steps in (17, 18, 19, 20):
                time.sleep(0.5)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    assert equal_on_all(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    dist.destroy_process_group()


def test_a_rank_dies_while_another_site_is_late() -> None:
    plan = Plan(sites=3, layout="DDP", width=2, quorum=1, away=((1, 3), (1, 4)), kills=((4, 3, 0.0),))
    found = check(plan, environ=ranks.UDP)
    assert sorted(found) == [0, 1, 2, 3]
    assert found[1].missed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_drawn_programs_of_sites_of_several_ranks(seed: int) -> None:
    check(local_plan.late(local_plan.random_site_plan(7000 + seed)), environ=ranks.UDP)


@pytest.mark.parametrize("is_in_store", [False, True])
def test_a_loop_that_waits_for_the_store_does_not_hold_a_meeting_up(is_in_store: bool) -> None:
    found = ranks.outcomes(waits_in_store, 3, is_in_store, environ=ranks.UDP)
    assert ranks.results(found, {2})[:2] == [[0, 1]] * 2


def waits_in_store(rank: int, size: int, is_in_store: bool) -> list[int]:
    """Rank 2 dies while the loop of rank 1 is away. Rank 1 comes back once rank 0 trains on without rank 2."""
    quick()
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    store = dist.distributed_c10d._get_default_store()
    told: Any = ranks.store()
    with begin(Net(), every=4, quorum=1, min_sites=1) as local:
        for step in range(40):
            if (rank, step) == (2, 20):
                os.kill(os.getpid(), signal.SIGKILL)
            if (rank, step) == (1, 18):
                if is_in_store:
                    store.wait(["went on"], timedelta(seconds=15))
                until(lambda: told.check(["went on"]))
            train(local._model, local._optimizer, rank, [step])
            if rank == 0 and local.ranks == [0, 1] and step > 20:
                store.set("went on", "")
                told.set("went on", "")
        return local.ranks


def away(local: commlayer.LocalSteps, turns: Collection[int]) -> None:
    """The loop does not come until these turns have begun without it."""
    until(lambda: local.syncs not in turns)


def quick() -> None:
    vars(grace).update(TURNS_LEAST=1, TIMES=0.0, STEPS=0, SECONDS_LEAST=0.02)


def sent(
    rank: int, local: commlayer.LocalSteps, model: Given, steps: range, *, early: bool = False
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Trains, and saves after the sync with which `trained` passes 24; `early`: when the third sync has begun, on rank
    1 after its thread has begun more. Returns what was saved, the sum of this site's steps, and that of its changes
    that were counted."""
    total, saved = torch.zeros_like(model.values()), dict[str, Any]()
    counted = by_fragment(total, Plan(fragments=2))
    with local:
        shared = local._training.rounds.shared  # type: ignore[union-attr]  # steps are local from the first one on
        apply = shared.apply

        def watched(outcome: Any, own: Any = 0.0) -> None:
            counted[shared.syncs % 2] += own
            apply(outcome, own)

        shared.apply = watched  # type: ignore[method-assign]

        def state(step: int) -> dict[str, Any]:
            own = {"model": model.state_dict(), "local": local.state_dict(), "step": step, "trained": local.trained}
            return copy.deepcopy({**own, "total": total, "counted": counted})

        for step in steps:
            if rank == 1 and not steps.start:
                away(local, range(3, 8))
            if early and not saved and (local.syncs == 3 or (rank == 1 and local.syncs == 8)):
                saved = state(step)
            total -= 0.05 * model.step(local._optimizer, rank, step)
            if local.passed(24.0) and not saved:
                saved = state(step + 1)
    assert equal_on_all(model.values())
    return saved, total, torch.cat(counted)


@pytest.mark.parametrize("early", [False, True])
@ranks.on(3, ranks.run_job, environ=IN_ORDER)
def test_all_save_after_the_same_sync(rank: int, size: int, early: bool) -> None:
    """Rank 1 has to apply several syncs at once, and stops at that after which the others save; or it saves before it
    applies one. A training that goes on from there counts each step of a site once, too."""
    quick()
    given: dict[str, Any] = {"outer": (1.0, 0.0), "codec": "none", "quorum": 1, "momentum": 0.0}
    saved, _, _ = sent(rank, local_of(model := Given(), **given), model, range(24), early=early)
    assert equal_on_all(torch.tensor([saved["trained"], saved["local"]["rounds"]["trained"]]))
    assert (saved["local"]["rounds"]["sync"] is not None) == (early or rank != 1)
    again = local_of(model := Given(), **given)
    model.load_state_dict(saved["model"])
    again.load_state_dict(saved["local"])
    _, total, counted = sent(rank, again, model, range(saved["step"], 24))
    made = torch.cat(by_fragment(saved["total"] + total, Plan(fragments=2)))
    assert torch.allclose(torch.cat(saved["counted"]) + counted, made, atol=1e-4)


def marks(
    rank: int, size: int, given: dict[str, Any], numbers: tuple[float, ...], turns: int
) -> list[tuple[float, int]]:
    """What `trained` and the syncs in the model are where the first number is passed."""
    quick()
    found = []
    with local_of(model := Given(), quorum=1, **given) as local:
        step = 0
        while local.trained < 36:
            if rank == 1 and step % 3 == 2:
                turn = local.syncs
                until(lambda: local.syncs >= turn + turns or local.trained > 20)  # noqa: B023  # called here
            model.step(local._optimizer, rank, step)
            step += 1
            passed = [local.passed(number) for number in numbers]
            if passed[0]:
                found.append((local.trained, local._training.rounds.shared.syncs))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("given", "numbers", "turns"),
    [({"every": 1, "fragments": 1}, (6.0,), 1), ({}, (6.0, 30.0), 2)],
    ids=["without a delay", "two numbers"],
)
def test_a_mark_is_passed_after_the_same_sync(given: dict[str, Any], numbers: tuple[float, ...], turns: int) -> None:
    first, second = ranks.run_job(marks, 2, given, numbers, turns, environ=ranks.NETWORK)
    assert first[:2] == second[:2]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_signal_handler_must_not_save_within_a_step(rank: int, size: int) -> None:
    """It would wait for the step, and the step for it."""
    with local_of(model := Given(), quorum=1) as local:
        for step in range(4):
            model.step(local._optimizer, rank, step)
        with (
            pytest.raises(commlayer.ConfigError, match="call it between steps"),
            local._training.rounds.stand_in.loop(is_step=True),  # type: ignore[union-attr]
        ):
            local.state_dict()
        assert local.state_dict()["rounds"]


def test_a_site_joins_fewer_than_the_quorum() -> None:
    kills = ((1, 2, 0.0), (2, 2, 0.0), (3, 2, 0.0))
    found = check(Plan(quorum=3, kills=kills, joins=(5,), waits=True, steps=24), environ=ranks.UDP)
    assert found[4].number == 4


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_outcomes_are_kept_up_to_a_limit(rank: int, size: int) -> None:
    """Then the others wait for the loop."""
    quick()
    vars(kept).update(KEPT_BYTES=0, KEPT_LEAST=2)
    with local_of(model := Given(), quorum=1) as local:
        for step in range(20):
            if rank == 1 and local.syncs == 3:
                until(lambda: local.syncs > 3)
                time.sleep(0.3)
                assert local.syncs <= 3 + 2  # two are kept, of which one is its own
            model.step(local._optimizer, rank, step)
    assert equal_on_all(model.values())


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_the_last_syncs_wait_for_a_loop(rank: int, size: int) -> None:
    """When all others leave, the thread begins at most one sync more."""
    quick()
    with local_of(model := Given(), quorum=1) as local:
        for step in range(12):
            if (rank, step) == (1, 11):
                time.sleep(1.0)
            model.step(local._optimizer, rank, step)
        assert rank == 0 or local.syncs < 9
    assert equal_on_all(model.values())


def stopped(rank: int, size: int, min_sites: int | None) -> str:
    def stop(step: int, local: Any) -> None:
        if (rank, step) == (1, 10):
            away(local, (4, 5))
            raise Stopped

    quick()
    ranks.init(rank, size)
    try:
        run(Net(), rank, 30, stop, quorum=1, min_sites=min_sites)
    except (Stopped, commlayer.AbortedError) as error:
        return type(error).__name__
    assert not {thread.name for thread in threading.enumerate()} & {"commlayer-bell"}
    return "trained"


@pytest.mark.parametrize(("min_sites", "others"), [(None, "AbortedError"), (1, "trained")])
def test_an_exception_while_a_thread_stands_in(min_sites: int | None, others: str) -> None:
    assert ranks.run(stopped, 3, min_sites, environ=ranks.UDP) == [others, "Stopped", others]


def stopped_in_an_agreement(rank: int, size: int) -> str:
    """Rank 2 dies, and rank 0 finds that. Rank 1's thread waits with it for rank 3. Then rank 1's loop ends."""
    quick()
    if rank == 3:
        vars(grace).update(SECONDS_LEAST=100.0)
    ranks.init(rank, size, timeout=timedelta(seconds=20))

    def stop(step: int, local: Any) -> None:
        if (rank, step) == (2, 11):
            until(lambda: ranks.store().check(["away"]))
            os.kill(os.getpid(), signal.SIGKILL)
        # By rank 1's step, not by its own: if a site was late, rank 1 cannot make this step without a later one here.
        if rank == 3 and (step == 20 or ranks.store().check(["away"])):
            ranks.store().wait(["stopped"])
        if (rank, step) == (1, 12):
            ranks.store().set("away", "")
            until(lambda: local._training.rounds._living.party.store("agreement 0").check(["1"]))  # its thread has come
            raise Stopped

    try:
        run(Net(), rank, 24, stop, min_sites=1, quorum=1)
    except Stopped:
        left = {thread.name for thread in threading.enumerate()}
        ranks.store().set("stopped", "")
        return "left" if "commlayer-bell" in left else "stopped"
    return "trained"


def test_an_exception_while_a_thread_waits_for_other_sites() -> None:
    """It ends with the training: else it would make another group, or abort the process at its end."""
    ended = ranks.outcomes(stopped_in_an_agreement, 4, environ={**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert ranks.results(ended, {2}) == ["trained", "stopped", None, "trained"]


def hanging(rank: int, size: int) -> str:
    """The loop of rank 1 is away for longer than the timeout."""

    def hang(step: int, _: Any) -> None:
        if (rank, step) == (1, 10):
            time.sleep(5.0)

    quick()
    ranks.init(rank, size, timeout=timedelta(seconds=1))
    try:
        run(Net(), rank, 100, paced(hang), min_sites=2, quorum=1)
    except commlayer.PeerLostError as error:
        return str(error)
    return "went on"


def paced(then: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Steps take 20 ms."""

    def before(step: int, local: Any) -> None:
        time.sleep(0.02)
        then(step, local)

    return before


def test_a_loop_that_hangs_is_taken_for_dead() -> None:
    found = ranks.run(hanging, 3, environ=ranks.UDP)
    assert found[0] == found[2] == "went on", found
    assert "gone on without it; end this process" in found[1], found


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_wrong_numbers_of_sites(rank: int, size: int) -> None:
    for wrong in (0, 3, "2", True):
        check_refused(r"LocalSteps\(quorum=.*\): use a whole number, 1 to 2", Net(), quorum=wrong)
    check_refused("quorum differs: None on rank 0, 1 on rank 1", Net(), quorum=1 if rank else None)
    with local_of(model := Net(), quorum=2) as local:
        train(model, local._optimizer, rank, range(3))
        with pytest.raises(commlayer.ConfigError, match=r"passed\(0\): give a number of samples"):
            local.passed(0)
