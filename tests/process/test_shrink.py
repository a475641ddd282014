"""`dist.shrink_group`: the ranks of a group go on without some of them, dead or alive."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks

if not hasattr(dist, "shrink_group"):
    pytest.skip("torch 2.13 has shrink_group", allow_module_level=True)

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1
FLAGS = pytest.mark.parametrize("flags", [SHRINK_DEFAULT, SHRINK_ABORT], ids=["default", "abort"])


def total(group: Any = None, value: float | None = None) -> float:
    """The sum over the ranks of 10 ** (their rank in the first WORLD)."""
    tensor = torch.full((1000,), 10.0 ** float(os.environ["FIRST_RANK"]) if value is None else value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def begin(rank: int, size: int, **options: Any) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    ranks.init(rank, size, **options)


def check_world(first: list[int]) -> None:
    """Every kind of operation on a WORLD of these ranks of the first one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (first[rank], size) == (int(os.environ["FIRST_RANK"]), len(first))
    assert isinstance(dist.group.WORLD, CommProcessGroup)
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert total() == sum(10.0**member for member in first)
    after, before = torch.zeros(3), torch.full((3,), float(rank))
    work = dist.irecv(after, (rank - 1) % size) if size > 1 else None
    if work is not None:
        dist.send(before, (rank + 1) % size)
        work.wait()
        assert after[0].item() == (rank - 1) % size
    group = dist.new_group(sorted({0, size - 1}))
    if rank in (0, size - 1):
        assert total(group) == sum(10.0**member for member in {first[0], first[-1]})
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(20, 3))
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    for _ in range(3):
        model(torch.randn(4, 20)).square().mean().backward()
        gradients = [torch.zeros(60) for _ in range(size)]
        dist.all_gather(gradients, model.module.weight.grad.flatten())
        assert all(gradient.equal(gradients[0]) for gradient in gradients)


@FLAGS
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_an_idle_world_goes_on_without_a_rank(rank: int, size: int, flags: int) -> None:
    begin(rank, size)
    assert total() == 1111.0
    other = dist.new_group([0, 1, 3])
    if rank == 2:
        ranks.store().wait(["shrunk"])
        with pytest.raises(commlayer.CommError, match="have excluded this rank and gone on without it"):
            total()
        with pytest.raises(commlayer.MismatchError, match="have excluded this rank"):
            dist.shrink_group([0])
        dist.destroy_process_group()
        return
    shrunk = dist.shrink_group([2], shrink_flags=flags)
    ranks.store().set("shrunk", "")
    assert shrunk is dist.group.WORLD
    with pytest.raises(commlayer.CommError):
        other.allreduce([torch.ones(1)]).wait()
    check_world([0, 1, 3])
    dist.destroy_process_group()


@FLAGS
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_operations_in_flight_end_first_or_fail(rank: int, size: int, flags: int) -> None:
    begin(rank, size)
    assert total() == 1111.0
    if rank == 3:
        if flags == SHRINK_DEFAULT:
            ranks.store().wait(["waiting: all"])
            assert total() == 1111.0
        ranks.store().wait(["shrunk"])
        dist.destroy_process_group()
        return
    tensor = torch.full((1000,), 10.0**rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    ranks.meet("waiting", 3)
    dist.shrink_group([3], shrink_flags=flags)
    ranks.store().set("shrunk", "")
    assert work.is_completed()
    if flags == SHRINK_DEFAULT:
        work.wait()
        assert tensor[0].item() == 1111.0
    else:
        with pytest.raises(commlayer.AbortedError):
            work.wait()
    check_world([0, 1, 2])
    dist.destroy_process_group()


def dies(rank: int, victims: list[int]) -> bool:
    """Forks a victim: True in its parent, once the child has been killed."""
    if rank in victims and (child := os.fork()) != 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return True
    return False


@pytest.mark.parametrize("victims", [[0], [2], [1, 3]], ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@FLAGS
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_the_others_go_on_without_killed_ranks(
    rank: int, size: int, victims: list[int], known: bool, flags: int
) -> None:
    if dies(rank, victims):
        return
    begin(rank, size, timeout=timedelta(seconds=20))
    assert total() == 1111.0
    ranks.meet("begun", size)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    if known:
        with pytest.raises(commlayer.PeerLostError):
            list(map(total, [None] * 1000))
    dist.shrink_group(victims, shrink_flags=flags)
    check_world([member for member in range(size) if member not in victims])
    dist.destroy_process_group()


@FLAGS
@ranks.on(4)
def test_a_world_shrinks_until_one_rank_is_left(rank: int, size: int, flags: int) -> None:
    begin(rank, size)
    left = list(range(size))
    for out in (1, 0, 1):  # ranks of the present WORLD
        assert total() == sum(10.0**member for member in left)
        if left[out] == rank:
            ranks.store().wait(["end"])
            dist.destroy_process_group()
            return
        dist.shrink_group([out], shrink_flags=flags)
        del left[out]
        check_world(left)
    assert left == [2]
    ranks.store().set("end", "")
    dist.destroy_process_group()


@FLAGS
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_a_subgroup_shrinks_twice_and_world_stays(rank: int, size: int, flags: int) -> None:
    begin(rank, size)
    options = commlayer.Options(commlayer.Policy(deterministic=True, priority=2))
    group = dist.new_group([3, 1, 2], pg_options=options, timeout=timedelta(seconds=17))
    if rank > 0:
        assert total(group) == 1110.0
    if rank > 1:
        shrunk: Any = dist.shrink_group([0], group, flags)  # rank 1 of the job
        assert dist.get_process_group_ranks(shrunk) == [2, 3]
        assert (shrunk.policy, shrunk.timeout) == (options.policy, timedelta(seconds=17))
        assert total(shrunk) == 1100.0
        with pytest.raises((ValueError, commlayer.CommError)):
            total(group)
        if rank == 3:
            changed = commlayer.Options(commlayer.Policy(priority=1))
            last: Any = dist.shrink_group([0], shrunk, shrink_flags=flags, pg_options=changed)
            assert (last.size(), last.policy) == (1, changed.policy)
            assert total(last) == 1000.0
    assert total() == 1111.0
    ranks.meet("end", size)
    dist.destroy_process_group()


@ranks.on(4)
def test_wrong_arguments_are_named_and_change_nothing(rank: int, size: int) -> None:
    begin(rank, size)
    for wrong, kind, text in (
        ([], ValueError, "cannot be empty"),
        ((1,), TypeError, "must be a list"),
        ([4], ValueError, "out of bounds"),
        ([-1], ValueError, "out of bounds"),
        (["1"], TypeError, "must be integers"),
        ([(rank + 1) % size] * 2, ValueError, "Duplicate"),
        ([0, 1, 2, 3], ValueError, "all 4 ranks"),
        ([rank], RuntimeError, "should not call shrink_group"),
    ):
        with pytest.raises(kind, match=text):
            dist.shrink_group(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shrink_flags"):
        dist.shrink_group([(rank + 1) % size], shrink_flags=7)
    with pytest.raises(commlayer.ConfigError, match="pg_options"):
        dist.shrink_group([(rank + 1) % size], pg_options="fast")
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="size 1"):
        dist.shrink_group([0], alone)
    assert total() == 1111.0
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("excluded", "flags"),
    [
        ([[3], [3], [1], None], [0, 0, 0, 0]),
        ([[3], [2], [3], [2]], [0, 0, 0, 0]),
        ([[3], [3], [3], None], [0, 1, 0, 0]),
        ([[3], [2, 3], [3], None], [1, 1, 1, 0]),
    ],
    ids=str,
)
@ranks.on(4)
def test_ranks_that_disagree_get_the_same_error_and_may_try_again(
    rank: int, size: int, excluded: list[list[int] | None], flags: list[int]
) -> None:
    begin(rank, size)
    own = excluded[rank]
    if own is not None:
        with pytest.raises(commlayer.MismatchError, match="pass the same ranks and the same flags") as caught:
            dist.shrink_group(own, shrink_flags=flags[rank])
        told = str(caught.value).partition("shrink_group: ")[2]
        assert told.count("excludes") == 2
        ranks.store().set(f"told {rank}", told)
        assert ranks.store().get("told 0").decode() == told
    ranks.meet("told", size)
    assert total() == 1111.0
    if rank == 3:
        ranks.store().wait(["end"])
    else:
        dist.shrink_group([3])
        check_world([0, 1, 2])
        ranks.store().set("end", "")
    dist.destroy_process_group()


def test_of_ranks_that_exclude_each_other_one_at_most_goes_on() -> None:
    """The first to ask goes on alone, unless another one asks before it has counted itself: then all disagree."""
    ended = sorted(ranks.run(exclude_all_others, 3))
    assert ended in (["excluded", "excluded", "went on"], ["disagrees"] * 3)


def exclude_all_others(rank: int, size: int) -> str:
    begin(rank, size)
    try:
        dist.shrink_group([member for member in range(size) if member != rank])
    except commlayer.MismatchError as error:
        told = str(error)
        assert "have excluded this rank" in told or "pass the same ranks" in told
        return "disagrees" if "pass the same ranks" in told else "excluded"
    finally:
        ranks.meet("end", size)
    assert total() == 10.0**rank
    return "went on"


@ranks.on(4)
def test_a_rank_that_does_not_come_is_named_on_all(rank: int, size: int) -> None:
    begin(rank, size)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5))  # not that of the start, on a busy machine
    for life in range(2):
        if rank == 1:
            ranks.store().wait([f"waited {life}"])
        if rank != 3:
            late = r"rank\(s\) 1 did not call it within 1.5 s"
            with pytest.raises(commlayer.OperationTimeoutError, match=late) as caught:
                dist.shrink_group([3])
            assert (caught.value.culprit, caught.value.rank) == (1, rank)
            ranks.store().set(f"waited {life}", "")
        ranks.meet(f"late {life}", size)
    dist.destroy_process_group()


@FLAGS
@pytest.mark.parametrize("of_world", [True, False], ids=["world", "subgroup"])
@ranks.on(4)
def test_a_rank_that_missed_an_attempt_makes_the_same_group(rank: int, size: int, of_world: bool, flags: int) -> None:
    begin(rank, size)
    group: Any = dist.group.WORLD if of_world else dist.new_group()
    if rank in (0, 1):
        with pytest.raises(commlayer.MismatchError, match="pass the same ranks"):
            dist.shrink_group([[3], [2, 3]][rank], group, flags)
    if rank == 2:
        while not group._exclusion._store.check(["1/proposal"]):
            time.sleep(0.01)
    if rank < 3:
        shrunk = dist.shrink_group([3], group, flags)
        assert total(shrunk) == 111.0
    ranks.meet("end", size)
    dist.destroy_process_group()


@ranks.on(4)
def test_a_rank_that_should_stay_and_dies_is_named_on_all(rank: int, size: int) -> None:
    if dies(rank, [1, 3]):
        return
    begin(rank, size)
    assert total() == 1111.0
    ranks.meet("begun", size)
    if rank in (1, 3):
        if rank == 1:
            ranks.store().wait(["lost"])
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.store().set("lost", "")
    with pytest.raises(commlayer.PeerLostError, match=r"rank\(s\) 1 should stay, and died") as caught:
        dist.shrink_group([3])
    assert (caught.value.culprit, caught.value.operation) == (1, "shrink_group")
    dist.shrink_group([1, 3])
    check_world([0, 2])
    dist.destroy_process_group()


@ranks.on(2)
def test_without_its_store_a_group_does_not_shrink(rank: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 1 else None
    if store is not None:
        ranks.store().set("port", str(store.port))
    port = int(ranks.store().get("port"))
    begin(rank, size, store=dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20)))
    assert total() == 11.0
    if store is not None:
        del store
        os._exit(0)
    with pytest.raises(commlayer.PeerLostError):
        list(map(total, [None] * 1000))
    with pytest.raises(commlayer.CommError, match="the job's Store does not answer"):
        dist.shrink_group([1])


@FLAGS
@ranks.on(3)
def test_a_model_goes_on_with_the_shrunk_world(rank: int, size: int, flags: int) -> None:
    begin(rank, size)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(6, 1, bias=False))
    state = commlayer.HookState(commlayer.Policy(codec="int8"))
    model.register_comm_hook(state, commlayer.allreduce_hook)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(torch.full((1, 6), float(rank))).sum().backward()
        return model.module.weight.grad  # type: ignore[no-any-return]

    for _ in range(3):
        assert gradient().allclose(torch.ones(6))
    if rank == 0:
        ranks.store().wait(["end"])
        dist.destroy_process_group()
        return
    model._update_process_group(dist.shrink_group([0], shrink_flags=flags))
    for _ in range(3):
        assert gradient().allclose(torch.full((6,), 1.5))
    ranks.store().set("end", "")
    dist.destroy_process_group()
