"""The process group on a transport without an engine: its own operations, and those that fall through to gloo."""

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.device_mesh import init_device_mesh

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from tests import conformance, fake_transport, ranks
from tests.fake_transport import on_fake


def world() -> Any:
    """The commlayer group of this process."""
    group = dist.group.WORLD
    assert isinstance(group, CommProcessGroup)
    return group


def engine() -> fake_transport.FakeGroup:
    """Its transport."""
    fake: fake_transport.FakeGroup = world()._native
    return fake


def called() -> list[str]:
    """The collectives that reached the transport since the last call of this."""
    names = [call.collective for call, _, _ in engine().operations]
    engine().operations.clear()
    return names


def _conformance(rank: int, size: int) -> None:
    for number, case in enumerate(conformance.cases(5000)):
        conformance.check(case, async_op=number % 2 == 1)  # test_backend_native.py has the others
        assert called() or case.numel == 0 or size == 1, case


@pytest.mark.parametrize("size", [1, 3])
def test_every_case_of_the_table_is_ours_and_right(size: int) -> None:
    on_fake(_conformance, size)


@ranks.on(2, on_fake)
def test_all_overloads_of_torch_are_accepted(rank: int, size: int) -> None:
    group = world()
    tensor = torch.ones(4)
    group.allreduce(tensor).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    group.allreduce(tensor, op=dist.ReduceOp.SUM, timeout=timedelta(seconds=9)).wait()
    assert tensor.tolist() == [4.0] * 4
    group.broadcast(tensor * (rank + 1), 1).wait()
    group.broadcast(tensor, root=0, timeout=timedelta(seconds=9)).wait()
    outputs = [torch.empty(4), torch.empty(4)]
    group.allgather(outputs, tensor).wait()
    group.allgather([outputs], [tensor]).wait()
    group.allgather(outputs, tensor, timedelta(seconds=9)).wait()
    assert torch.equal(torch.cat(outputs), torch.cat([tensor, tensor]))
    group.reduce_scatter(tensor, outputs).wait()
    group.reduce_scatter([tensor], [outputs], opts=dist.ReduceScatterOptions()).wait()
    group.reduce_scatter(tensor, outputs, dist.ReduceOp.SUM, timedelta(seconds=9)).wait()
    assert tensor.tolist() == [8.0] * 4
    group.barrier().wait()
    group.barrier(timedelta(seconds=9)).wait()
    timeouts = [timeout_s for _, timeout_s, _ in engine().operations]
    assert sorted(timeouts) == [9.0] * 5 + [30.0] * 8
    assert len(called()) == 13
    tensor = torch.full((4,), float(rank + 1))
    group.reduce(tensor, 1, dist.ReduceOp.MAX, timedelta(seconds=9)).wait()
    group.reduce(tensor, 0).wait()
    group.reduce([tensor]).wait()
    assert tensor.tolist() == [5.0 if rank == 0 else 2.0] * 4
    group.gather(outputs if rank == 1 else [], tensor, 1).wait()
    group.gather([outputs] if rank == 0 else [], [tensor], dist.GatherOptions()).wait()
    group.scatter(tensor, outputs if rank == 0 else [], 0, timedelta(seconds=9)).wait()
    group.scatter([tensor], [outputs] if rank == 0 else [], opts=dist.ScatterOptions()).wait()
    assert tensor.tolist() == [5.0 if rank == 0 else 2.0] * 4
    group.alltoall(outputs, [tensor, tensor]).wait()
    group.alltoall_base(torch.cat(outputs), torch.cat(outputs), [], []).wait()
    group.all_to_all_single(torch.empty(4), tensor, [2, 2], [2, 2], timedelta(seconds=9)).wait()
    group.allgather_coalesced([[tensor], [outputs[0]]], [outputs[1]]).wait()
    timeouts = [timeout_s for _, timeout_s, _ in engine().operations]
    assert sorted(timeouts) == [9.0] * 3 + [30.0] * 8


@ranks.on(2, on_fake)
def test_the_names_of_earlier_torch_reach_us(rank: int, size: int) -> None:
    group = world()
    shard, whole = torch.full((2,), float(rank)), torch.empty(4)
    group._allgather_base(whole, shard).wait()
    group.allgather_into_tensor_coalesced([whole, whole.clone()], [shard, shard]).wait()
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]
    exchanged = torch.empty(4)
    group.alltoall_base(exchanged, whole, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1]).wait()
    assert exchanged.tolist() == ([0.0, 0.0, 0.0, 1.0] if rank == 0 else [0.0, 1.0, 1.0, 1.0])
    assert called() == ["all_gather"] * 3 + ["delivery"]
    group._reduce_scatter_base(shard, whole).wait()
    group.reduce_scatter_tensor_coalesced([shard, torch.empty(2)], [whole, whole]).wait()
    assert shard.tolist() == [2.0 * rank] * 2
    assert called() == ["reduce_scatter"] * 3


@ranks.on(2, on_fake)
def test_functional_collectives_reach_us(rank: int, size: int) -> None:
    group = world()
    tensor = torch.full((4,), rank + 1.0)
    assert funcol.all_reduce(tensor, "avg", group).tolist() == [1.5] * 4
    assert funcol.all_gather_tensor(tensor, 0, group).tolist() == [1.0] * 4 + [2.0] * 4
    assert funcol.reduce_scatter_tensor(tensor, "sum", 0, group).tolist() == [3.0] * 2
    assert funcol.broadcast(tensor, 1, group).tolist() == [2.0] * 4
    first, second = funcol.all_reduce_coalesced([tensor, tensor * 2], "sum", group)
    assert (first.tolist(), second.tolist()) == ([3.0] * 4, [6.0] * 4)
    first, second = funcol.all_gather_into_tensor_coalesced([tensor, tensor * 2], group)
    assert second.tolist() == [2.0] * 4 + [4.0] * 4
    assert called() == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_reduce"] + ["all_gather"] * 2
    sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    exchanged = funcol.all_to_all_single(tensor, received, sent, group)
    assert exchanged.tolist() == [1.0] * received[0] + [2.0] * received[1]
    assert called() == ["delivery"]


@ranks.on(2, on_fake)
def test_other_operations_fall_through_to_gloo(rank: int, size: int) -> None:
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.eye(3) * size)
    assert called() == []
    world().monitored_barrier(timedelta(seconds=20))
    if not hasattr(dist.Backend, "_ensure_backend_registered"):  # torch before 2.14
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()  # torch asks for the backend's name: the group's own method is the way
    else:
        dist.monitored_barrier()  # any group with a backend for CPU tensors
    assert called() == []


@ranks.on(2, on_fake)
def test_a_monitored_barrier_names_the_absent_rank(rank: int, size: int) -> None:
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"monitored_barrier: rank\(s\) 1 did not call it within 0.5 s"):
            world().monitored_barrier(timedelta(seconds=0.5), True)
        assert time.monotonic() - start < 10
        ranks.store().set("missed", "1")
    else:
        ranks.store().wait(["missed"])
        with pytest.raises(RuntimeError, match=r"rank 1 of .*: rank\(s\) 1 did not call it"):
            world().monitored_barrier(timedelta(seconds=20))
    world().monitored_barrier(timedelta(seconds=20))
    total = torch.ones(3)
    dist.all_reduce(total)  # nothing is closed
    assert total.tolist() == [2.0] * 3


@ranks.on(2, on_fake)
def test_collectives_of_objects_reach_us(rank: int, size: int) -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.gather_object(rank, objects if rank == 0 else None)
    assert rank == 1 or objects == [0, 1]
    objects = [rank, "x"]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, "x"]
    dist.scatter_object_list(objects, [["for 0"], ["for 1"]] if rank == 0 else None, 0)
    assert objects[0] == [f"for {rank}"]
    assert set(called()) == {"all_gather", "delivery", "broadcast"}
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    else:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0)
        assert received == [{"a": 1}]
    assert set(called()) == {"receive" if rank else "send"}


@ranks.on(2, on_fake)
def test_tensors_of_any_layout(rank: int, size: int) -> None:
    whole = torch.zeros(6, 4)
    column = whole[:, 1]
    column += rank + 1
    work = dist.all_reduce(column, async_op=True)
    assert work is not None
    work.wait()
    assert whole.tolist() == [[0.0, 3.0, 0.0, 0.0]] * 6
    transposed = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, torch.arange(6.0).reshape(2, 3).t() * 2)
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    dist.broadcast(leaf[::2], 0)
    assert leaf.tolist() == [2.0] * 3
    conjugate = torch.tensor([1 + 2j, 3 + 4j])
    world().allreduce([conjugate.conj()]).wait()
    assert conjugate.tolist() == [2 + 4j, 6 + 8j]
    outputs = torch.zeros(2, 4)
    dist.all_gather([outputs[:, 0], outputs[:, 2]], torch.full((2,), float(rank)))
    assert outputs.tolist() == [[0.0, 0.0, 1.0, 0.0]] * 2
    dist.all_gather_object([None] * size, rank)
    dist.all_gather(list(outputs), torch.full((4,), float(rank)))  # consecutive: nothing is copied
    assert outputs.tolist() == [[0.0] * 4, [1.0] * 4]
    scattered = torch.zeros(2, 3).t()
    dist.reduce_scatter(scattered, [torch.ones(2, 3).t(), torch.ones(2, 3).t() * 2])
    assert scattered.tolist() == [[2.0 * (rank + 1)] * 2] * 3


@ranks.on(2, on_fake)
def test_futures_hold_the_callers_tensors(rank: int, size: int) -> None:
    tensor = torch.ones(3)
    columns = torch.zeros(3, 2)
    for work, expected in (
        (dist.all_reduce(tensor, async_op=True), [tensor]),
        (dist.all_reduce(columns[:, 0], async_op=True), [columns[:, 0]]),
        (dist.barrier(async_op=True), []),
        (world().allgather([list(columns.t())], [tensor]), list(columns.t())),
    ):
        value = work.get_future().wait()
        assert len(value) == len(expected)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(value, expected, strict=True))
        assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(value, expected, strict=True))
    assert columns.tolist() == [[2.0, 2.0]] * 3


@ranks.on(2, on_fake)
def test_memory_outlives_a_dropped_work(rank: int, size: int) -> None:
    engine().delay_s = 0.2
    tensor = torch.ones(1000)
    seen = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    gc.collect()
    assert seen() is not None  # the engine is still at it
    dist.barrier()
    dist.barrier()
    gc.collect()
    assert seen() is None


@ranks.on(2, on_fake)
def test_timeouts_are_those_of_the_operation_or_the_group(rank: int, size: int) -> None:
    group = world()
    opts = AllreduceOptions()
    group.allreduce([torch.ones(1)], opts).wait()
    opts.timeout = timedelta(seconds=3)
    group.allreduce([torch.ones(1)], opts).wait()
    group.set_timeout(timedelta(seconds=5))
    group.barrier().wait()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    dist.barrier()
    assert [timeout_s for _, timeout_s, _ in engine().operations] == [30.0, 3.0, 5.0, 7.0]


@ranks.on(2, on_fake)
def test_a_group_has_the_policy_of_its_options(rank: int, size: int) -> None:
    options = commlayer.Options(commlayer.Policy(priority=1))
    urgent = dist.new_group([0, 1], pg_options=options)
    assert isinstance(urgent, CommProcessGroup)
    assert urgent.policy.priority == 1
    dist.all_reduce(torch.ones(1), group=urgent)
    fake: Any = urgent._native
    assert [priority for _, _, priority in fake.operations] == [1]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": ("commlayer", options)})
    of_mesh = mesh["tp"].get_group()
    assert isinstance(of_mesh, CommProcessGroup)
    assert of_mesh.policy.priority == 1
    with pytest.raises(commlayer.ConfigError, match=r"pass commlayer\.Options"):
        dist.new_group([0, 1], pg_options={"priority": 1})


@ranks.on(2, on_fake, environ={"COMMLAYER_DETERMINISTIC": "1"})
def test_a_variable_makes_groups_without_options_deterministic(rank: int, size: int) -> None:
    assert world().policy == commlayer.Policy(deterministic=True)
    assert world()._submitter._settings.deterministic
    plain = dist.new_group([0, 1], pg_options=commlayer.Options())
    assert isinstance(plain, CommProcessGroup)
    assert plain.policy == commlayer.Policy()


@ranks.on(3, on_fake)
def test_several_groups_in_flight(rank: int, size: int) -> None:
    even, odd, pair = dist.new_group([0, 2]), dist.new_group([1]), dist.new_group([2, 1])
    mine = even if rank % 2 == 0 else odd
    works = []
    tensors = [torch.full((5,), float(rank)) for _ in range(12)]
    for number, tensor in enumerate(tensors):  # three groups in flight at a time, on every rank that has them
        group = (None, mine, pair)[number % 3]
        if group is not pair or rank in (1, 2):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    expected = (3.0, 2.0 if rank % 2 == 0 else 1.0, 3.0 if rank else 0.0)
    assert [tensor[0].item() for tensor in tensors] == [*expected] * 4
    assert dist.get_backend(pair if rank else even) == "commlayer"
    dist.broadcast(tensors[0], 2, group=even) if rank != 1 else None
    if rank in (1, 2):
        dist.destroy_process_group(pair)
    dist.barrier()


@ranks.on(2, on_fake)
def test_groups_are_used_from_several_threads(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    results: list[float] = []

    def train(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(100)
        for _ in range(50):
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
        results.append(tensor.sum().item())

    threads = [threading.Thread(target=train, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [100.0] * 3


@ranks.on(1, on_fake)
def test_abort_fails_later_operations(rank: int, size: int) -> None:
    world().abort()
    with pytest.raises(commlayer.CommError, match=f"rank {rank} aborted"):
        dist.all_reduce(torch.ones(1))
