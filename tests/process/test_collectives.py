"""The collectives on tensors of every kind: layouts, types, lengths; and refusals, before anything is sent."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import AllgatherOptions

import commlayer
from tests import conformance, ranks
from tests.fake_transport import on_fake
from tests.process.test_backend import called, world


@ranks.on(2, on_fake)
def test_tensors_of_any_layout(rank: int, size: int) -> None:
    columns = torch.zeros(3, 4)
    dist.all_to_all([columns[:, 1], columns[:, 3]], [torch.full((3,), rank + 1.0), torch.full((3,), rank + 5.0)])
    assert columns.tolist() == [[0.0, 1.0 + 4 * rank, 0.0, 2.0 + 4 * rank]] * 3
    transposed = torch.arange(4.0).reshape(2, 2).t()
    output = torch.zeros(2, 4)[:, ::2]
    dist.all_to_all_single(output, transposed)
    assert output.tolist() == [[float(rank), rank + 2.0]] * 2
    gathered = torch.zeros(3, 2)
    dist.gather(torch.full((3,), rank + 1.0), list(gathered.t()) if rank == 1 else None, 1)
    assert gathered.tolist() == [[float(rank), 2.0 * rank]] * 3
    scattered = torch.zeros(2, 2)
    dist.scatter(scattered[:, 0], [torch.eye(2)[0], torch.eye(2)[1]] if rank == 0 else None, 0)
    assert scattered[:, 0].tolist() == torch.eye(2)[rank].tolist()
    dist.reduce(scattered.t(), 1)
    assert scattered[:, 0].tolist() == ([1.0, 1.0] if rank == 1 else [1.0, 0.0])
    number = torch.tensor(rank + 1.0)
    dist.reduce(number, 0)
    assert number.item() == (3.0 if rank == 0 else 2.0)
    outputs = [torch.empty(()), torch.empty(())]
    dist.all_gather(outputs, number)
    assert [result.item() for result in outputs] == [3.0, 2.0]
    leaf = torch.ones(4, requires_grad=True)
    dist.reduce(leaf, 0)
    dist.scatter(leaf, [torch.zeros(4), torch.ones(4)] if rank == 0 else None)
    assert leaf.tolist() == [float(rank)] * 4
    dist.all_to_all_single(leaf, torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True))
    assert leaf.tolist() == ([1.0, 2.0] if rank == 0 else [3.0, 4.0]) * 2
    rows = torch.arange(6).reshape(3, 2)
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1])
    assert received[0].tolist() == [0, 1] if rank == 0 else received[:2].tolist() == [[2, 3], [4, 5]]


@ranks.on(2, ranks.run_job)
def test_results_of_the_inference_mode_reach_callbacks(rank: int, size: int) -> None:
    """Another thread copies them."""
    if rank == 1:
        time.sleep(0.3)  # the operation of rank 0 ends when its callback is there
    with torch.inference_mode():
        columns = torch.full((2, 3), rank + 1.0).t()
        arrived = dist.all_reduce(columns, async_op=True).get_future().then(lambda done: done.value()[0].sum().item())
    assert arrived.wait() == 18


@ranks.on(2, ranks.run_job)
def test_compiled_code_waits_for_what_began_before_it(rank: int, size: int) -> None:
    """It calls `wait_tensor` for a tensor whose operation was not a functional collective."""
    count = torch._C._distributed_c10d._get_work_registry_size
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        if rank == 1:
            time.sleep(0.3)
        result = torch.full((100,), rank + 1.0)
        dist.all_reduce(result, async_op=True)  # torch keeps the work
        gc.collect()
        assert count() == 1
        torch.ops._c10d_functional.wait_tensor(result)
        assert result.tolist() == [3.0] * 100
        work = dist.all_reduce(result, async_op=True)
        assert work is not None
        work.wait()
        assert count() == 0
    dist.all_reduce(result, async_op=True)
    assert count() == 0


EMPTY: list[Callable[[Any], Any]] = [
    lambda _: dist.all_reduce_coalesced([]),
    lambda _: dist.all_gather_coalesced([], []),
    lambda group: group.reduce_scatter_single_coalesced([], [], dist.ReduceScatterOptions()),
    lambda group: group.all_gather_single_coalesced([], [], AllgatherOptions()),
    lambda group: group.allreduce([], dist.AllreduceOptions()),
]


@ranks.on(2)
def test_lists_without_tensors_are_those_of_gloo(rank: int, size: int) -> None:
    told: list[list[str]] = []
    for backend in ("gloo", "commlayer"):
        ranks.init(rank, size, backend)
        texts = []
        for call in EMPTY:
            try:
                call(dist.group.WORLD)
                texts.append("nothing")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {str(error)[:60]}")
        told.append(texts)
        dist.barrier()
        dist.destroy_process_group()
    assert told[0] == told[1]
    assert "AttributeError" not in str(told)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@ranks.on(2, on_fake)
def test_split_sizes_may_be_arrays(rank: int, size: int, kind: Callable[[list[int]], Any]) -> None:
    splits = kind([1, 2] if rank == 0 else [2, 1])
    received = torch.empty(3)
    dist.all_to_all_single(received, torch.arange(3.0) + 10 * rank, splits, splits)
    assert received.tolist() == ([0.0, 10.0, 11.0] if rank == 0 else [1.0, 2.0, 12.0])
    assert called() == ["delivery"]
    with pytest.raises(RuntimeError, match="Split sizes doesn't match total dim 0 size"):
        dist.all_to_all_single(received, torch.zeros(4), splits, splits)


@ranks.on(3)
def test_averages_of_integers_are_rounded_towards_zero(rank: int, size: int) -> None:
    """The sum wraps: 127 + 127 + 2 are 0 in int8."""
    with ranks.job(rank, size):
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            values = torch.tensor([(1, 1, 0), (-1, -1, 0), (-2, -1, -2), (7, 7, 6)], dtype=dtype)[:, rank].clone()
            dist.all_reduce(values, dist.ReduceOp.AVG)
            assert values.tolist() == [0, 0, -1, 6]
            shard = torch.empty(4, dtype=dtype)
            dist.reduce_scatter_tensor(shard, torch.full((12,), -rank - 4, dtype=dtype), dist.ReduceOp.AVG)
            assert shard.tolist() == [-5] * 4
            largest = torch.tensor([torch.iinfo(dtype).max if rank < 2 else 2], dtype=dtype)
            dist.all_reduce(largest, dist.ReduceOp.AVG)
            assert largest.item() == 0


@ranks.on(2, on_fake)
def test_point_to_point(rank: int, size: int) -> None:
    columns = torch.zeros(3, 2)
    if rank == 0:
        dist.send(torch.arange(6.0).reshape(3, 2)[:, 1], 1)
        assert dist.recv(columns[:, 0]) == 1
        dist.isend(torch.tensor([1 + 2j]), 1, tag=7).wait()  # type: ignore[union-attr]
    else:
        assert dist.recv(columns[:, 0], 0) == 0
        dist.send(columns[:, 0], 0)
        complex_one = torch.empty(1, dtype=torch.complex64)
        work = dist.irecv(complex_one, 0, tag=7)
        assert work is not None
        work.wait()
        assert complex_one.tolist() == [1 + 2j]
        assert work._source_rank() == 0
    assert columns.tolist() == [[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]]
    assert called() == [["send", "receive", "send"], ["receive", "send", "receive"]][rank]
    value = torch.full((3,), float(rank))
    output = torch.empty(3)
    with dist._coalescing_manager(world(), torch.device("cpu"), async_ops=True) as manager:
        dist.isend(value, 1 - rank)
        dist.irecv(output, 1 - rank)
    manager.wait()
    assert output.tolist() == [1.0 - rank] * 3


@ranks.on(3, on_fake)
def test_receives_from_any_source_name_the_source(rank: int, size: int) -> None:
    if rank > 0:
        dist.send(torch.full((2,), rank), 0, tag=3)
        return
    output, sources = torch.empty(2, dtype=torch.int64), []
    for _ in range(size - 1):
        sources.append(dist.recv(output, tag=3))
        assert output.tolist() == [sources[-1]] * 2
    assert sorted(sources) == [1, 2]
    assert called() == ["receive"] * 2


def gather_of_two_lengths() -> None:
    world().gather([[torch.zeros(4), torch.zeros(5)]], [torch.zeros(4)], dist.GatherOptions())


def no_such_root() -> None:
    opts = dist.ReduceOptions()
    opts.rootRank = 7
    world().reduce([torch.zeros(3)], opts)


def no_root_for_scatter() -> None:
    opts = dist.ScatterOptions()
    opts.rootRank = -1
    world().scatter([torch.zeros(3)], [], opts)


def exchange(length: int, received: list[int] | None = None, sent: list[int] | None = None) -> None:
    dist.all_to_all_single(torch.empty(length), torch.zeros(length), received, sent)


REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("Split sizes doesn't match total dim 0 size", lambda: exchange(4, [2, 2], [2, 3])),
    ("Number of tensor splits not equal to group size", lambda: exchange(4, [4], [2, 2])),
    ("rank 0: input split sizes [5, -1] contain a negative number", lambda: exchange(4, [5, -1], [5, -1])),
    ("shape (3,) does not divide equally among 2 ranks in dimension 0; pass split sizes", lambda: exchange(3)),
    ("shape () does not divide equally", lambda: dist.all_to_all_single(torch.empty(()), torch.zeros(()))),
    (
        "rank 0: sends 8 bytes to itself, but receives 4",
        lambda: exchange(4, [1, 3] if dist.get_rank() == 0 else [3, 1], [2, 2]),
    ),
    (
        "rank 0: sends 12 bytes to itself, but receives 8",
        lambda: dist.all_to_all([torch.empty(2)] * 2, [torch.zeros(3)] * 2),
    ),
    (
        "input tensor list size 1 does not match" if conformance.GLOO_HAS_ALL_TO_ALL else "does not support alltoall",
        lambda: dist.all_to_all([torch.empty(2)], [torch.zeros(2)]),
    ),
    ("invalid tensor size at index 1", gather_of_two_lengths),
    ("invalid root rank: 7", no_such_root),
    ("invalid root rank: -1", no_root_for_scatter),
    ("invalid tensor size", lambda: dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.zeros(5))),
    (
        "result type Float can't be cast",
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
    ),
    ("Cannot use ReduceOp.BAND with non-integral dtype", lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)),
    ("complex tensors", lambda: dist.reduce(torch.ones(3, dtype=torch.complex64), 0, dist.ReduceOp.PRODUCT)),
    (
        "Cannot use ReduceOp.PREMUL_SUM with Gloo",
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
    ),
]


@ranks.on(2, on_fake)
def test_nonsense_is_refused_before_anything_is_sent(rank: int, size: int) -> None:
    """Both ranks refuse: gloo is not left in a state of its own."""
    for text, call in REFUSALS:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        assert rank > 0 or text in str(caught.value)
        assert called() == [], text


def test_our_own_refusals_are_config_errors() -> None:
    assert issubclass(commlayer.ConfigError, RuntimeError)
    assert issubclass(commlayer.ConfigError, ValueError)


def _on_gloo(rank: int, size: int) -> int:
    count = 0
    with ranks.job(rank, size, "gloo"):
        for case in filter(conformance.gloo_has, conformance.cases(1000)):
            conformance.check(case)
            count += 1
    return count


def test_gloo_agrees_with_the_table() -> None:
    """gloo gives the results that the oracle expects."""
    assert min(ranks.run(_on_gloo, 2)) > 500


@ranks.on(2, on_fake)
def test_contributions_can_be_multiplied_first(rank: int, size: int) -> None:
    for factor in (0.5, torch.tensor([0.5])):
        tensor = torch.full((3,), 2.0 * (rank + 1), dtype=torch.float16)
        op: Any = dist._make_nccl_premul_sum(factor)
        output = torch.empty(1, dtype=torch.float16)
        dist.reduce_scatter(output, [tensor[:1], tensor[1:2]], op)
        assert (output.item(), tensor.tolist()) == (3.0, [2.0 * (rank + 1)] * 3)
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [3.0] * 3


@ranks.on(3, on_fake)
def test_floats_of_8_bits_are_summed_in_32(rank: int, size: int) -> None:
    tensor = torch.full((100,), 0.25).to(torch.float8_e5m2)
    dist.all_reduce(tensor)
    assert tensor.float().tolist() == [0.75] * 100
    total = torch.tensor([1.0 if rank == 0 else 0.0625]).to(torch.float8_e4m3fn)
    dist.all_reduce(total)  # in 8 bits, 1 + 1/16 is 1, twice
    assert total.float().item() == 1.125
