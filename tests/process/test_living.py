"""Sites that die within `LocalSteps(min_sites=...)`: the others go on, with one state."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import commlayer
from commlayer.frontend.group import party
from commlayer.frontend.local.meeting import on_all
from tests import ranks
from tests.process import local_plan
from tests.process.local_deaths import check
from tests.process.local_plan import SIZE, Plan
from tests.process.test_local_errors import Stopped, begin, check_refused, run
from tests.process.test_local_steps import Net, train


@pytest.mark.parametrize("wire", [ranks.UDP, {}], ids=["udp", "shm"])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_deaths(seed: int, wire: dict[str, str]) -> None:
    check(local_plan.random_plan(1000 + seed), environ=wire)


def taken(plan: Plan) -> list[int]:
    """The turns of the syncs whose outcome a site had from another one."""
    return [turn for report in check(plan, environ=ranks.UDP).values() for turn in report.taken]


@pytest.mark.parametrize("codec", ["none", "int4-int8"])
def test_a_sync_that_one_site_has_is_applied_by_all(codec: str) -> None:
    """Rank 2 dies when it has contributed to sync 3. Rank 1 learns of the death, and not of the average."""
    plan = Plan(codec=codec, deaf=((1, 3),), kills=((2, 4, 0.0),), has_buffers=True)
    assert taken(plan) == [3]


def test_a_sync_that_no_site_has_is_sent_again() -> None:
    assert taken(Plan(kills=((2, 4, 0.0),), deaf=((0, 3), (1, 3), (3, 3)))) == []


def test_a_death_after_the_last_sync_costs_nothing() -> None:
    assert taken(Plan(late=(1, 3))) == []


def test_a_site_dies_when_the_others_meet_after_a_death() -> None:
    assert sorted(check(Plan(kills=((2, 4, 0.0),), meeting=1), environ=ranks.UDP)) == [0, 3]


def too_few(rank: int, size: int) -> str:
    def die(step: int, _: Any) -> None:
        if rank > 1 and step == 3 * rank:
            os.kill(os.getpid(), signal.SIGKILL)

    ranks.init(rank, size)
    begun_s = time.monotonic()
    with pytest.raises(commlayer.PeerLostError, match="are fewer than min_sites=3; restore a checkpoint") as error:
        run(Net(), rank, 40, die, min_sites=3)
    assert error.value.culprit in (2, 3)
    assert time.monotonic() - begun_s < 15.0
    return "PeerLostError"


def test_too_few_sites_end_the_training() -> None:
    found = ranks.outcomes(too_few, SIZE, environ=ranks.UDP)
    assert [found[rank].result for rank in (0, 1)] == ["PeerLostError"] * 2, found


def frozen(rank: int, size: int, is_here: bool) -> str:
    """Rank 1 stops: for the others, it is a process of another host, or of this one. When it wakes, they have gone
    on."""
    if not is_here:
        vars(party)["host_key"] = lambda: f"host {rank}"

    def freeze(step: int, _: Any) -> None:
        if (rank, step) == (1, 3):
            if os.fork() == 0:
                time.sleep(7.0)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

    ranks.init(rank, size, timeout=timedelta(seconds=3 if is_here else 30))
    try:
        run(Net(), rank, 12, freeze, min_sites=1)
    except commlayer.PeerLostError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("is_here", [False, True], ids=["another host", "this host"])
def test_a_frozen_site_learns_that_the_others_went_on(is_here: bool) -> None:
    environ = {**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1" if is_here else "2"}
    found = ranks.results(ranks.outcomes(frozen, 3, is_here, environ=environ), ())
    assert found[0] == found[2] == "went on", found
    assert "gone on without it; end this process" in found[1], found


def before(rank: int, size: int) -> str:
    ranks.init(rank, size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(commlayer.PeerLostError, match="rank 1"), begin(Net(), min_sites=1):
        pass
    return "PeerLostError"


def again(rank: int, size: int) -> str:
    """After a death the group still has the dead rank; one of those that live does not."""

    def die(step: int, _: Any) -> None:
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    ranks.init(rank, size)
    run(Net(), rank, 12, die, min_sites=1)
    with pytest.raises(commlayer.PeerLostError, match="rank 1"), begin(Net(), min_sites=1):
        pass
    left = dist.new_group([0, 2], use_local_synchronization=True)
    run(Net(), rank, 12, die, min_sites=1, group=left)
    return "PeerLostError"


@pytest.mark.parametrize("body", [before, again])
def test_a_death_before_the_training_is_found_when_it_begins(body: Any) -> None:
    begun_s = time.monotonic()
    found = ranks.outcomes(body, 3, environ=ranks.UDP)
    assert [found[rank].result for rank in (0, 2)] == ["PeerLostError"] * 2, found
    assert time.monotonic() - begun_s < 30.0


def named(rank: int, size: int) -> None:
    def stop(step: int, _: Any) -> None:
        if (rank, step) == (3, 5):
            raise Stopped

    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    texts = ranks.logged()
    with contextlib.suppress(Stopped):
        run(Net(), rank, 12, stop, group=between, min_sites=1)
    if rank == 1:
        assert any("goes on with the sites of rank(s) [1], without [3]" in text for text in texts), texts


def test_ranks_are_those_of_the_job() -> None:
    ranks.run_job(named, 4, environ=ranks.NETWORK)


def fewer(rank: int, size: int) -> Any:
    """Rank 1 dies; the others save, and go on from there without it."""
    ranks.init(rank, size)
    state: dict[str, Any] = {}
    with begin(model := Net(), min_sites=1, uneven=True) as local:
        assert local.ranks == [0, 1, 2]
        step = 0
        while local.trained < 60:
            if (rank, step) == (1, 6):
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, local._optimizer, rank, [step])
            step += 1
            if not state and local.trained >= 30:
                state = copy.deepcopy({"model": model.state_dict(), "local": local.state_dict()})
        trained = local.trained
    left = dist.new_group(local.ranks, use_local_synchronization=True)
    again = begin(restored := Net(), group=left, uneven=True)
    restored.load_state_dict(state["model"])
    again.load_state_dict(state["local"])
    with again:
        while again.trained < trained:
            train(restored, again._optimizer, rank, [step])
    return local.ranks, [parameter.tolist() for parameter in restored.parameters()]


def test_a_checkpoint_goes_on_with_fewer_sites() -> None:
    found = ranks.results(ranks.outcomes(fewer, 3, environ=ranks.UDP), {1})
    assert found[0][0] == [0, 2]
    assert found[0] == found[2]


def hanging(rank: int, size: int) -> str:
    """Rank 1 lives, and does not come to a sync within the timeout."""

    def hang(step: int, _: Any) -> None:
        if (rank, step) == (1, 3):
            time.sleep(6.0)

    ranks.init(rank, size, timeout=timedelta(seconds=3))
    try:
        run(Net(), rank, 12, hang, min_sites=2)
    except commlayer.PeerLostError as error:
        return str(error)
    return "went on"


def test_a_site_that_hangs_is_taken_for_dead() -> None:
    found = ranks.run(hanging, 3, environ=ranks.UDP)
    assert found[0] == found[2] == "went on", found
    assert "gone on without it; end this process" in found[1], found


def early(rank: int, size: int) -> str:
    def die(step: int, _: Any) -> None:
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)

    ranks.init(rank, size)
    with pytest.raises(commlayer.PeerLostError, match="rank 1"):
        run(Net(), rank, 12, die, min_sites=1, exact_steps=5)
    return "PeerLostError"


def test_a_death_in_exact_steps_ends_the_training() -> None:
    found = ranks.outcomes(early, 3, environ=ranks.UDP)
    assert [found[rank].result for rank in (0, 2)] == ["PeerLostError"] * 2, found


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_wrong_numbers_of_sites(rank: int, size: int) -> None:
    for wrong in (0, 3, "2"):
        check_refused(r"LocalSteps\(min_sites=.*\): use a whole number, 1 to 2", Net(), min_sites=wrong)
    check_refused("min_sites differs: None on rank 0, 1 on rank 1", Net(), min_sites=1 if rank else None)
    with begin(Net(), min_sites=2) as local:
        train(local._model, local._optimizer, rank, range(3))


def not_all_see(rank: int, size: int) -> str:
    """Rank 0 finds an error that all find in a sync; rank 1 has found a death there instead."""
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    store: Any = ranks.store()
    try:
        with begin(model := Net(), min_sites=1) as local:
            rounds: Any = local._training.rounds
            outcome = rounds._outcome
            errors: list[commlayer.CommError] = [commlayer.PeerLostError("another rank died")]
            if rank == 0:
                errors = [on_all(commlayer.CommError("not finite"), 0)]

            def ended(sync: Any, **given: Any) -> Any:
                found = outcome(sync, **given)
                if sync.head.turn == 3 and errors:
                    raise errors.pop()
                return found

            rounds._outcome = ended
            train(model, local._optimizer, rank, range(24))
            assert local.ranks == [1]
    except commlayer.CommError as error:
        store.wait(["went on"], timedelta(seconds=15))
        return str(error)
    store.set("went on", "")
    return "went on"


def test_a_site_that_has_not_seen_an_error_of_all_goes_on() -> None:
    """The process of the other one lives, and does not come to the meeting."""
    assert ranks.run(not_all_see, 2, environ=ranks.UDP) == ["not finite", "went on"]
