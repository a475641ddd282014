"""Sites of several ranks within `LocalSteps(min_sites=...)`: a site goes as a whole, and the others go on, with one
state at all places."""

from __future__ import annotations

import os
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
from tests.process import local_plan
from tests.process.local_deaths import check
from tests.process.local_plan import Plan
from tests.process.test_local_errors import Stopped, begin, check_refused
from tests.process.test_local_state import EXACT
from tests.process.test_local_steps import Net, train

LAYOUTS = ("DDP", "FSDP2")


def of_two(layout: str, **given: Any) -> Plan:
    """Three sites of two ranks: processes 0 and 1, 2 and 3, 4 and 5."""
    return Plan(sites=3, layout=layout, width=2, **given)


def taken(plan: Plan) -> dict[int, list[int]]:
    """The turns of the syncs whose outcome a process had from another site."""
    return {process: report.taken for process, report in check(plan, environ=ranks.UDP).items()}


@pytest.mark.parametrize(
    "wire", [pytest.param(ranks.UDP, id="udp"), pytest.param({}, id="shm", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", [1000, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1001, 1002))])
def test_drawn_deaths(seed: int, wire: dict[str, str]) -> None:
    check(local_plan.random_site_plan(seed), environ=wire)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sync_that_one_site_has_is_applied_at_all_places(layout: str) -> None:
    """Process 3 learns of the death of 4, and not of the average; its mate has that. The first site has it."""
    plan = of_two(layout, deaf=((3, 3),), kills=((4, 4, 0.0),), has_buffers=True)
    assert taken(plan) == {0: [], 1: [], 2: [3], 3: [3]}


def test_a_sync_that_no_site_has_at_all_places_is_sent_again() -> None:
    """Each place has one rank that knows the average, but no site knows it as a whole."""
    found = check(of_two("DDP", deaf=((0, 3), (3, 3)), kills=((4, 4, 0.0),)), environ=ranks.UDP)
    assert [report.taken for report in found.values()] == [[]] * 4
    assert found[0].syncs[3].members == (0, 1)


def test_deaths_after_the_last_sync_cost_nothing_but_their_sites() -> None:
    assert sorted(check(of_two("DDP", late=(1, 4)))) == [2, 3]


def test_a_rank_dies_when_the_others_meet_after_a_death() -> None:
    assert sorted(check(of_two("DDP", kills=((4, 4, 0.0),), meeting=1), environ=ranks.UDP)) == [2, 3]


def test_both_ranks_of_a_site_die() -> None:
    assert sorted(check(of_two("FSDP2", kills=((2, 3, 0.0), (3, 3, 0.0))), environ=ranks.UDP)) == [0, 1, 4, 5]


def site_model(layout: str, rank: int, sites: int, backend: str = "commlayer") -> Any:
    """A model of a site of two ranks (HSDP: four), and the ranks of its site."""
    shape = (sites, 2, 2) if layout == "HSDP" else (sites, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("site", "replica", "shard")[: len(shape)])
    of_site = mesh["replica", "shard"] if layout == "HSDP" else mesh["replica"]
    if layout == "DDP":
        within: Any = {"backend": backend, "timeout": timedelta(seconds=30)}
        groups = [dist.new_group([2 * site, 2 * site + 1], **within) for site in range(sites)]
        return DistributedDataParallel(Net(), process_group=groups[rank // 2])
    model: Any = Net()
    fully_shard(model, mesh=of_site)
    return model


Error = type[BaseException] | tuple[type[BaseException], ...]


def trained(
    rank: int,
    model: Any,
    before: Callable[[Any, int], Any],
    *,
    min_sites: int = 1,
    steps: int = 12,
    error: Error = commlayer.PeerLostError,
    **given: Any,
) -> str:
    """Calls `before` with the LocalSteps and the number of each step. Returns "went on", or the text of the `error`."""
    try:
        with begin(model, min_sites=min_sites, **given) as local:
            for step in range(steps):
                before(local, step)
                train(model, local._optimizer, rank, [step])
    except error as found:
        return str(found)
    return "went on"


def dies_at(rank: int, *when: tuple[int, int]) -> Callable[[Any, int], None]:
    """For `trained`: these ranks die before these steps."""
    return lambda _, step: die() if (rank, step) in when else None


WHERE = ("the forward pass", "a step", "the end")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(rank: int, size: int, layout: str, where: str, backend: str) -> str:
    """The last rank dies there."""
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    model = site_model(layout, rank, 2, backend)
    local = begin(model, min_sites=1)
    try:
        with local:
            if rank == size - 1 and where == "the end":
                vars(local._training.rounds)["leave"] = die
            for step in range(12):
                if (rank, step) == (size - 1, 6) and where == "the forward pass":
                    die()
                if (rank, step) == (size - 1, 6) and where == "a step":
                    local._optimizer.register_step_pre_hook(die)
                train(model, local._optimizer, rank, [step])
            assert local.ranks in (list(range(size)), list(range(size // 2)))
    except commlayer.PeerLostError as error:
        return str(error)
    assert local.ranks == list(range(size // 2))
    assert local.rank in local.ranks
    return "went on"


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("DDP", "gloo"),
        ("FSDP2", "commlayer"),
        *(pytest.param(layout, "commlayer", marks=pytest.mark.slow) for layout in ("DDP", "HSDP")),
    ],
)
@pytest.mark.parametrize("where", WHERE)
def test_the_others_of_a_site_name_the_dead_one(layout: str, where: str, backend: str) -> None:
    size = 8 if layout == "HSDP" else 4
    found = ranks.results(ranks.outcomes(dies, size, layout, where, backend, environ=ranks.UDP), {size - 1})
    assert found[: size // 2] == ["went on"] * (size // 2)
    mates = ", ".join(map(str, range(size // 2, size)))
    for text in found[size // 2 : -1]:
        assert f"rank(s) {size - 1} of its site, {mates}, died or ended, and a site cannot train without" in text
        if where != "the end":  # then they may have ended, too
            others = ", ".join(map(str, range(size // 2)))
            assert f"rank(s) {others} go on without it, if they are enough; end this process" in text


def stops(rank: int, size: int, layout: str, backend: str) -> str:
    """The last rank raises an exception, and lives on for a while."""
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    model = site_model(layout, rank, 2, backend)

    def before(local: Any, step: int) -> None:
        if (rank, step) == (size - 1, 7):
            local._optimizer.register_step_pre_hook(stop)

    found = trained(rank, model, before, error=(commlayer.PeerLostError, Stopped))
    if rank > 1 and found != "went on":
        ranks.meet("stopped", 2)
    return found


def stop(*_: Any) -> None:
    raise Stopped("no data")


@pytest.mark.parametrize(("layout", "backend"), [("DDP", "commlayer"), ("DDP", "gloo"), ("FSDP2", "commlayer")])
def test_the_others_of_a_site_get_the_text_of_an_exception(layout: str, backend: str) -> None:
    """By gloo, too, where they wait in `step()`: what they tell each other about a sync goes another way."""
    found = ranks.run(stops, 4, layout, backend, environ=ranks.UDP)
    assert found[:2] == ["went on"] * 2
    assert "rank 3 of its site, 2, 3, gave up (Stopped: no data), and a site cannot train without" in found[2]
    assert found[3] == "no data"


def hangs(rank: int, size: int) -> str:
    """Rank 3 does not come to a sync within the timeout; its mate waits for it in DDP."""
    ranks.init(rank, size, timeout=timedelta(seconds=3))
    return trained(rank, site_model("DDP", rank, 3), lambda _, step: time.sleep(8.0 * ((rank, step) == (3, 6))))


def test_a_rank_that_hangs_costs_its_site() -> None:
    found = ranks.run(hangs, 6, environ=ranks.UDP)
    assert [found[rank] for rank in (0, 1, 4, 5)] == ["went on"] * 4, found
    for rank in (2, 3):  # as it has found, or as its mate has told
        assert "the other sites took this one for dead and have gone on without it" in found[rank], found


def dies_in_exact_steps(rank: int, size: int) -> str:
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    return trained(rank, site_model("DDP", rank, 2), dies_at(rank, (3, 6)), exact_steps=50)


def test_a_death_in_exact_steps_is_no_fault_of_the_other_site() -> None:
    """Both ranks of it get the same error, and no advice to go on: nobody does."""
    found = ranks.results(ranks.outcomes(dies_in_exact_steps, 4, environ=ranks.UDP), {3})
    for rank in (0, 1):
        assert "rank 3" in found[rank], found
        assert "gave up" not in found[rank], found
    assert "rank(s) 3 of its site, 2, 3, died or ended" in found[2], found
    assert "can go on" not in found[2], found
    assert "start the job again from a checkpoint" in found[2], found


def fails_alone(rank: int, size: int) -> str:
    """The last rank finds an error of its own, of the kind that torch raises. Its mate hears of it long before the
    peer timeout, which would be too long for this test."""
    ranks.init(rank, size, timeout=timedelta(seconds=20))

    def before(_: Any, step: int) -> None:
        if (rank, step) == (3, 6):
            raise RuntimeError("out of memory")

    return trained(rank, site_model("DDP", rank, 2), before, error=RuntimeError)


def test_an_error_of_one_rank_leaves_with_at_once() -> None:
    environ = {**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "300"}
    found = ranks.run(fails_alone, 4, environ=environ, timeout_s=60.0)
    assert found[:2] == ["went on"] * 2
    assert "rank 3 of its site, 2, 3, gave up (RuntimeError: out of memory)" in found[2]
    assert found[3] == "out of memory"


def too_few(rank: int, size: int) -> str:
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    return trained(rank, site_model("DDP", rank, 3), dies_at(rank, (4, 6), (3, 12)), min_sites=2, steps=24)


def test_too_few_sites_end_the_training() -> None:
    found = ranks.results(ranks.outcomes(too_few, 6, environ=ranks.UDP), {3, 4})
    for rank in (0, 1):
        assert "[0, 1] are fewer than min_sites=2 sites of 2 ranks; restore a checkpoint" in found[rank], found
    assert "rank(s) 3 of its site" in found[2]


def again(rank: int, size: int) -> tuple[str, list[float]]:
    """After a death the ranks of the sites that live train on, in another `LocalSteps`."""
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    model = site_model("DDP", rank, 3)
    try:
        with begin(model, min_sites=1) as local:
            for step in range(12):
                if (rank, step) == (2, 6):
                    die()
                train(model, local._optimizer, rank, [step])
    except commlayer.PeerLostError:
        return "gone", []
    peers = dist.new_group(local.ranks[rank % 2 :: 2], use_local_synchronization=True)
    with begin(model, min_sites=1, group=peers) as local:
        train(model, local._optimizer, rank, range(9))
        assert local.ranks == [0, 1, 4, 5]
    return "went on", [float(each.sum()) for each in model.parameters()]


def test_the_sites_that_live_train_on_in_another_local_steps() -> None:
    found = ranks.results(ranks.outcomes(again, 6, environ=ranks.UDP), {2})
    assert found[3][0] == "gone"
    assert found[0] == found[1] == found[4] == found[5]
    assert found[0][0] == "went on"


def bits(rank: int, size: int, layout: str, min_sites: int | None) -> list[float]:
    ranks.init(rank, size)
    model = site_model(layout, rank, 2)
    with begin(model, min_sites=min_sites, codec="int4-int8", outer=(0.7, 0.6)) as local:
        for step in range(14):
            train(model, local._optimizer, rank, [step])
    every: list[Any] = list(model.parameters())
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in every]
    return torch.cat([part.detach().flatten() for part in parts]).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_nobody_dies_the_bits_are_those_of_a_training_without_min_sites(layout: str) -> None:
    assert ranks.run(bits, 4, layout, 1, environ=EXACT) == ranks.run(bits, 4, layout, None, environ=EXACT)


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_wrong_numbers_of_sites(rank: int, size: int) -> None:
    sites = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(Net(), process_group=sites[rank // 2])
    for wrong in (0, 3, "2"):
        check_refused(r"LocalSteps\(min_sites=.*\): use a whole number, 1 to 2", model, min_sites=wrong)
    check_refused("min_sites differs: None on rank", model, min_sites=1 if rank == 3 else None)
    with begin(model, min_sites=2) as local:
        train(model, local._optimizer, rank, range(3))
        assert isinstance(local._training.rounds, Rounds)
        assert local.ranks == [0, 1, 2, 3]


@ranks.on(6, ranks.run_job, environ=ranks.NETWORK)
def test_ranks_of_sites_whose_numbers_are_mixed(rank: int, size: int) -> None:
    """The first site is that with the first rank of the first place, at all places."""
    of_sites = [[4, 1], [0, 5], [2, 3]]
    groups = [dist.new_group(sorted(ranks_of)) for ranks_of in of_sites]
    mine = next(at for at, ranks_of in enumerate(of_sites) if rank in ranks_of)
    model = DistributedDataParallel(Net(), process_group=groups[mine])
    with begin(model, min_sites=2) as local:
        train(model, local._optimizer, rank, range(9))
        assert local.ranks == [0, 5, 1, 4, 2, 3]
