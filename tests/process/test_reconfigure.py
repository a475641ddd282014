"""`dist._reconfigure`, since torch 2.14: a WORLD gets other members in place. The rules of torch's contract.

torch's own tests of it (test/distributed/test_c10d_fault_tolerance.py) are not in its wheel; docs/install.md has what
they say.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.frontend.group.gathering import MemberHandle
from tests import ranks

torch_dist: Any = dist
"""Torch 2.13 and its stubs lack these functions."""
HAS_IT = hasattr(dist, "_reconfigure")
since_214 = pytest.mark.skipif(not HAS_IT, reason="torch 2.14 has dist._reconfigure")


def test_the_probe_finds_reconfigure_where_torch_has_it() -> None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (release >= (2, 14)) == HAS_IT


def begin(rank: int, size: int, **options: Any) -> None:
    os.environ["FIRST_RANK"] = str(rank)
    os.environ.setdefault("COMMLAYER_PEER_TIMEOUT_S", "1")
    ranks.init(rank, size, enable_reconfigure=True, **options)


def exchange(part: str, size: int) -> list[str]:
    """The present handles of all processes, in the order of their first ranks."""
    store, first = ranks.store(), int(os.environ["FIRST_RANK"])
    store.set(f"{part} {first}", torch_dist._get_reconfigure_handle())
    return [store.get(f"{part} {member}").decode() for member in range(size)]


def reconfigure(uuid: int, handles: Sequence[str] | set[str], **options: Any) -> None:
    work = torch_dist._reconfigure(uuid, handles, **options)
    assert work.wait() is not False
    assert work.is_completed()


def total(value: float | None = None, group: Any = None) -> float:
    tensor = torch.full((1000,), 10.0 ** float(os.environ["FIRST_RANK"]) if value is None else value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def check_world(first: Sequence[int]) -> None:
    """Every kind of operation on a WORLD of these processes, by their first ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (first[rank], size) == (int(os.environ["FIRST_RANK"]), len(first))
    assert isinstance(dist.group.WORLD, CommProcessGroup)
    assert (dist.group.WORLD.rank(), dist.group.WORLD.size()) == (rank, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert total() == sum(10.0**member for member in first)
    root = torch.full((3,), float(first[rank]))
    dist.broadcast(root, group_src=size - 1)
    assert root[0].item() == first[-1]
    sparse = torch.eye(3).to_sparse()  # gloo's
    dist.all_reduce(sparse)
    assert sparse.to_dense()[0, 0].item() == size
    if size > 1:
        after = torch.zeros(3)
        work = dist.irecv(after, (rank - 1) % size)
        dist.send(torch.full((3,), float(rank)), (rank + 1) % size)
        assert work is not None
        work.wait()
        assert after[0].item() == (rank - 1) % size
    group = dist.new_group(sorted({0, size - 1}))
    if rank in (0, size - 1):
        assert total(group=group) == sum(10.0**member for member in {first[0], first[-1]})


def made(rank: int, size: int, uuid: int = 1, **options: Any) -> list[str]:
    """A first WORLD of all; returns the handles that they have in it."""
    begin(rank, size, **options)
    reconfigure(uuid, exchange("made", size))
    assert total() == sum(10.0**member for member in range(size))
    return exchange("in it", size)


@since_214
@ranks.on(2)
def test_before_the_first_call_there_are_no_members(rank: int, size: int) -> None:
    begin(rank, size)
    world: Any = dist.group.WORLD
    assert torch_dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    for call in (total, dist.barrier, lambda: world.who, lambda: world.hosts):
        with pytest.raises(commlayer.ClosedError, match=r"no members yet.*call dist\._reconfigure"):
            call()
    assert not hasattr(world, "hosts")
    world.abort()
    if rank == 1:
        dist.destroy_process_group()
        with pytest.raises(commlayer.ClosedError, match="destroyed"):
            world.get_reconfigure_handle()
        return
    reconfigure(1, [torch_dist._get_reconfigure_handle()])
    check_world([0])
    dist.destroy_process_group()


@since_214
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_list_gives_the_ranks(rank: int, size: int) -> None:
    begin(rank, size)
    handles = exchange("first", size)
    reconfigure(7, [handles[member] for member in (2, 0, 1)])
    check_world([2, 0, 1])
    dist.destroy_process_group()


@since_214
@ranks.on(3)
def test_processes_of_a_set_keep_the_order_of_their_ranks(rank: int, size: int) -> None:
    begin(rank, size)
    reconfigure(1, set(exchange("first", size)))
    check_world([0, 1, 2])
    handles = exchange("second", size)
    reconfigure(2, [handles[member] for member in (1, 2, 0)])
    reconfigure(3, set(exchange("third", size)))
    check_world([1, 2, 0])
    dist.destroy_process_group()


@since_214
@pytest.mark.parametrize("out", [0, 1, 2])
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_world_shrinks_and_the_one_left_out_learns_it(rank: int, size: int, out: int) -> None:
    handles = made(rank, size)
    if rank == out:
        with pytest.raises(commlayer.CommError, match="reconfigured its WORLD") as caught:
            list(map(total, [1.0] * 100000))
        assert isinstance(caught.value, (commlayer.AbortedError, commlayer.PeerLostError))
        ranks.store().wait(["done"])
    else:
        reconfigure(2, [handle for member, handle in enumerate(handles) if member != out])
        check_world([member for member in range(size) if member != out])
        ranks.store().set("done", "")
    dist.destroy_process_group()


@since_214
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_a_world_grows(rank: int, size: int) -> None:
    begin(rank, size)
    handles = exchange("first", size)
    if rank < 2:
        reconfigure(1, handles[:2])
        check_world([0, 1])
    handles = exchange("second", size)
    reconfigure(2, handles)
    check_world([0, 1, 2, 3])
    dist.destroy_process_group()


@since_214
@ranks.WIRES
@ranks.on(4, environ="wire")
def test_a_world_loses_and_gains_members_at_once(rank: int, size: int) -> None:
    begin(rank, size)
    handles = exchange("first", size)
    if rank < 3:
        reconfigure(1, handles[:3])
        check_world([0, 1, 2])
    handles = exchange("second", size)
    if rank == 1:
        ranks.store().wait(["done"])
    else:
        reconfigure(2, [handles[member] for member in (3, 0, 2)])
        check_world([3, 0, 2])
        ranks.store().set("done", "")
    dist.destroy_process_group()


@since_214
@ranks.on(4)
def test_worlds_apart_work_side_by_side_and_merge(rank: int, size: int) -> None:
    """The groups in both have the same names and ranks, and one Store."""
    begin(rank, size)
    handles = exchange("first", size)
    half = [0, 1] if rank < 2 else [2, 3]
    reconfigure(1 + rank // 2, [handles[member] for member in half])
    for _ in range(3):
        check_world(half)
    reconfigure(3, exchange("second", size))
    check_world([0, 1, 2, 3])
    reconfigure(4 + rank, [torch_dist._get_reconfigure_handle()])
    check_world([rank])
    reconfigure(10, exchange("third", size))
    check_world([0, 1, 2, 3])
    dist.destroy_process_group()


@since_214
@ranks.on(2)
def test_the_same_members_again_and_again_leave_nothing_behind(rank: int, size: int) -> None:
    made(rank, size)
    counts = []
    for life in range(12):
        reconfigure(100 + life, exchange(f"life {life}", size))
        assert total() == 11.0
        counts.append([sum(1 for _ in Path("/proc/self", what).iterdir()) for what in ("fd", "task")])
    assert all(last <= early for last, early in zip(counts[-1], counts[3], strict=True)), counts
    dist.destroy_process_group()


@since_214
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_operations_in_flight_fail_on_all_members(rank: int, size: int) -> None:
    handles = made(rank, size)
    if rank == 2:
        ranks.store().wait(["done"])
        dist.destroy_process_group()
        return
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    message = dist.irecv(torch.zeros(3), 1 - rank, tag=5)
    assert work is not None
    assert message is not None
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    ranks.meet("in flight", 2)
    reconfigure(2, handles[:2])
    waiting.join(10)
    assert [type(error) for error in caught] == [commlayer.AbortedError]
    with pytest.raises(commlayer.AbortedError):
        message.wait()
    check_world([0, 1])
    ranks.store().set("done", "")
    dist.destroy_process_group()


@since_214
@ranks.on(2)
def test_an_aborted_world_comes_back(rank: int, size: int) -> None:
    made(rank, size)
    world: Any = dist.group.WORLD
    world.abort()
    with pytest.raises(commlayer.CommError):
        total()
    reconfigure(2, exchange("aborted", size))
    check_world([0, 1])
    dist.destroy_process_group()


@since_214
@ranks.on(3)
def test_other_groups_are_gone(rank: int, size: int) -> None:
    made(rank, size)
    group: Any = dist.new_group([0, 2])
    reconfigure(2, exchange("again", size))
    if rank != 1:
        with pytest.raises((ValueError, commlayer.CommError)):
            total(group=group)
    check_world([0, 1, 2])
    dist.destroy_process_group()


def dies(rank: int, victim: int) -> bool:
    """Forks the victim: True in its parent, once the child has been killed."""
    if rank == victim and (child := os.fork()) != 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return True
    return False


@since_214
@pytest.mark.parametrize("victim", [0, 2])
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_the_others_go_on_without_a_killed_one(rank: int, size: int, victim: int) -> None:
    if dies(rank, victim):
        return
    handles = made(rank, size)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    staying = [member for member in range(size) if member != victim]
    reconfigure(2, [handles[member] for member in staying])
    check_world(staying)
    dist.destroy_process_group()


@since_214
@pytest.mark.parametrize("moment", ["before", "within", "meeting"])
@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_member_that_dies_is_named_on_all_within_seconds(rank: int, size: int, moment: str) -> None:
    if dies(rank, 1):
        return
    handles = made(rank, size)
    if rank == 1:
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "within":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            reconfigure(2, handles)
        vars(dist.group.WORLD)["_leave"] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        reconfigure(2, handles)
    if moment == "within" and rank == 2:
        time.sleep(2)
    begun_s = time.monotonic()
    with pytest.raises(commlayer.PeerLostError, match=r"rank\(s\) 1 \(process \d+ on .*\) died") as caught:
        reconfigure(2, handles)
    assert time.monotonic() - begun_s < 15
    assert (caught.value.culprit, caught.value.operation) == (1, "reconfigure")
    if moment != "meeting":  # nobody had left the WORLD
        assert dist.get_world_size() == 3
    reconfigure(3, [handles[0], handles[2]])
    check_world([0, 2])
    dist.destroy_process_group()


@since_214
@ranks.on(3)
def test_a_member_that_does_not_come_is_named_and_the_world_stays(rank: int, size: int) -> None:
    handles = made(rank, size)
    if rank == 1:
        ranks.store().wait(["late 0", "late 2"])
    late = r"rank\(s\) 1 \(process \d+ on .*\) did not call it within 1.5 s"
    with pytest.raises(commlayer.OperationTimeoutError, match=late) as caught:
        reconfigure(2, handles, timeout=timedelta(seconds=1.5))
    assert (caught.value.culprit, caught.value.rank) == (1, rank)
    ranks.store().set(f"late {rank}", "")
    assert total() == 111.0
    reconfigure(3, handles)
    check_world([0, 1, 2])
    dist.destroy_process_group()


@since_214
@pytest.mark.parametrize(
    ("asked", "uuids", "text"),
    [
        ([[0, 1, 2], [0, 1, 2], [0, 2]], [2, 2, 2], "pass the same handles on all members"),
        ([[0, 1, 2], [2, 1, 0], [0, 1, 2]], [2, 2, 2], "in another order"),
        ([[0, 1, 2], [0, 1, 2], [0, 1, 2]], [2, 2, 3], "with uuid"),
        ([[0, 1], [1, 2], [2, 0]], [2, 2, 2], "pass the same handles on all members"),
    ],
    ids=["members", "order", "uuid", "ring"],
)
@ranks.on(3)
def test_members_that_disagree_all_get_an_error_and_may_try_again(
    rank: int, size: int, asked: list[list[int]], uuids: list[int], text: str
) -> None:
    handles = made(rank, size)
    with pytest.raises(commlayer.MismatchError, match=text):
        reconfigure(uuids[rank], [handles[member] for member in asked[rank]])
    ranks.meet("told", size)
    assert total() == 111.0
    reconfigure(9, handles)
    check_world([0, 1, 2])
    dist.destroy_process_group()


@since_214
@ranks.on(4)
def test_a_member_of_another_party_gets_an_error_at_once(rank: int, size: int) -> None:
    """Split brain: 0 and 1 go on without 2 and 3, who still count on them."""
    handles = made(rank, size)
    if rank < 2:
        reconfigure(2, handles[:2])
        ranks.store().set(f"gone on {rank}", "")
        check_world([0, 1])
    else:
        ranks.store().wait(["gone on 0", "gone on 1"])
        with pytest.raises(commlayer.MismatchError, match=r"rank\(s\) 0 .* has gone on with uuid 2"):
            reconfigure(3, handles)
        with pytest.raises(commlayer.MismatchError, match="uuid 2 was already used by a WORLD of 2 other members"):
            reconfigure(2, handles[2:])
        reconfigure(4, handles[2:])
        check_world([2, 3])
    ranks.meet("end", size)
    dist.destroy_process_group()


@since_214
@ranks.on(2)
def test_wrong_arguments_are_named_and_change_nothing(rank: int, size: int) -> None:
    begin(rank, size)
    former = torch_dist._get_reconfigure_handle()
    reconfigure(1, exchange("made", size))
    own = torch_dist._get_reconfigure_handle()
    handles = exchange("in it", size)
    elsewhere = str(dataclasses.replace(MemberHandle.read(handles[1 - rank]), store="another"))
    short = "commlayer:" + json.dumps([1, 2])
    for wrong, text in (
        ([], "pass the handle of each member"),
        (set(), "pass the handle of each member"),
        ([own, "gloo:1:2:3:"], r"'gloo:1:2:3:'.*no handle of commlayer"),
        ([own, "commlayer:{"], "no handle of commlayer"),
        ([own, short], "no handle of commlayer"),
        ([own, own], "is there twice"),
        ([own, former], "is there twice"),
        ([former], "a former handle of this process"),
        ([handles[1 - rank]], "the one of this process is absent"),
        ([own, elsewhere], "has another Store"),
    ):
        with pytest.raises(commlayer.ConfigError, match=text):
            reconfigure(2, wrong)
    with pytest.raises(commlayer.ConfigError, match=r"hints=.*fast.*knows none"):
        reconfigure(2, handles, hints={"fast": "1"})
    with pytest.raises(RuntimeError, match="uuid=1 was already used"):
        reconfigure(1, handles)
    with pytest.raises(commlayer.ConfigError, match="reconfigurable"):
        dist.shrink_group([1 - rank])
    assert total() == 11.0
    reconfigure(2, handles)  # no attempt has used it
    check_world([0, 1])
    dist.destroy_process_group()


@since_214
@ranks.on(2)
def test_another_world_cannot(rank: int, size: int) -> None:
    ranks.init(rank, size)
    os.environ["FIRST_RANK"] = str(rank)
    assert not torch_dist._supports_reconfigure()
    for call in (torch_dist._get_reconfigure_handle, lambda: torch_dist._reconfigure(1, ["gloo:0:-1:0:"])):
        with pytest.raises(commlayer.ConfigError, match="enable_reconfigure=True"):
            call()
    assert (total(), dist.get_world_size()) == (11.0, 2)
    dist.destroy_process_group()


@since_214
@ranks.on(2, environ={"COMMLAYER_DISABLE": "1"})
def test_without_the_engine_gloo_does_it(rank: int, size: int) -> None:
    begin(rank, size)
    reconfigure(1, exchange("made", size))
    assert total() == 11.0
    reconfigure(2 + rank, [torch_dist._get_reconfigure_handle()])
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@since_214
@ranks.on(2)
def test_without_its_store_a_world_stays(rank: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 1 else None
    if store is not None:
        ranks.store().set("port", str(store.port))
    port = int(ranks.store().get("port"))
    handles = made(rank, size, store=dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20)))
    ranks.meet("made", size)
    if store is not None:
        del store
        os._exit(0)
    with pytest.raises(commlayer.CommError, match="the job's Store does not answer"):
        reconfigure(2, handles[:1])


@since_214
@ranks.on(3)
def test_a_model_goes_on_with_the_members_that_stay(rank: int, size: int) -> None:
    handles = made(rank, size)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(6, 1, bias=False))
    model.register_comm_hook(commlayer.HookState(commlayer.Policy(codec="int8")), commlayer.allreduce_hook)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(torch.full((1, 6), float(rank))).sum().backward()
        return model.module.weight.grad  # type: ignore[no-any-return]

    for _ in range(3):
        assert gradient().allclose(torch.ones(6))
    if rank == 0:
        ranks.store().wait(["end"])
    else:
        reconfigure(2, handles[1:])
        model._update_process_group(dist.group.WORLD)
        for _ in range(3):
            assert gradient().allclose(torch.full((6,), 1.5))
        ranks.store().set("end", "")
    dist.destroy_process_group()
