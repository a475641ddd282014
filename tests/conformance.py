"""The one table of what every collective must compute: collective x type x size x operator, for any world.

Inputs are small whole numbers, so that every sum and product is exact in every type, whatever the order; averages use
multiples of the number of ranks. A test takes `cases(world)` and calls `check(case)` on every rank of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions

WORLDS = (1, 2, 3, 4, 5)
SIZES = (0, 1, 2, 7, 64, 1023, 4099)
LARGE = 300_007

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_gather",
    "all_gather_single",
    "broadcast",
)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX")


class Case(NamedTuple):
    """One collective on tensors of `numel` elements per rank (per shard, where there are shards)."""

    collective: str
    dtype: torch.dtype
    numel: int
    op: str = "SUM"

    def __str__(self) -> str:
        return f"{self.collective} {str(self.dtype).removeprefix('torch.')} x {self.numel} {self.op}"


def cases(large: int = LARGE) -> Iterator[Case]:
    """The table: all sizes in float32, all types and operators at one odd size, and a large tensor of each form."""
    for collective in COLLECTIVES:
        for numel in SIZES:
            yield Case(collective, torch.float32, numel)
        yield Case(collective, torch.float32, large)
        reduces = collective not in ("all_gather", "all_gather_single", "broadcast")
        for dtype in (*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool):
            if not reduces:
                yield Case(collective, dtype, 37)
                continue
            for op in REDUCTIONS:
                if not (dtype.is_complex and op != "SUM"):
                    yield Case(collective, dtype, 37, op)
            if dtype.is_floating_point or dtype.is_complex:
                yield Case(collective, dtype, 37, "AVG")


def tensor_of(case: Case, rank: int, size: int, seed: int = 0) -> torch.Tensor:
    """What `rank` puts in: `numel` small values that depend on everything."""
    index = torch.arange(case.numel, dtype=torch.int64)
    values = (index * 7 + rank * 3 + seed * 5 + index // 11) % 4
    if case.op == "PRODUCT":
        values = values % 2 + 1
    if case.op == "AVG":
        values = values * size
    if case.dtype == torch.bool:
        values = values % 2
    tensor = values.to(case.dtype)
    return tensor * (1 + 1j) if case.dtype.is_complex else tensor


def reduced(case: Case, size: int, seed: int = 0) -> torch.Tensor:
    """The reduction over all ranks, computed exactly."""
    dtype = case.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.stack([tensor_of(case, rank, size, seed).to(wide) for rank in range(size)])
    if case.op in ("SUM", "AVG"):
        result = values.sum(0) / (size if case.op == "AVG" else 1)
    elif case.op == "PRODUCT":
        result = values.prod(0)
    else:
        result = values.amin(0) if case.op == "MIN" else values.amax(0)
    if dtype == torch.bool:
        return result != 0
    return result.to(dtype)


def check(case: Case, group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> None:
    """Runs a case, by the names of `torch.distributed`; raises AssertionError when this rank's result is wrong."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    inputs = [tensor_of(case, rank, size, seed) for seed in range(size)]
    op = getattr(dist.ReduceOp, case.op)
    results, expected = _COLLECTIVES[case.collective](case, rank, size, inputs, op, group, async_op)
    for result, exact in zip(results, expected, strict=True):
        if result.dtype != exact.dtype or not torch.equal(result, exact):
            wrong = (result != exact).nonzero().flatten()
            first = f"the first at {wrong[:1].tolist()}: {result[wrong[:3]].tolist()} for {exact[wrong[:3]].tolist()}"
            raise AssertionError(f"{case}, rank {rank} of {size}: {len(wrong)} of {exact.numel()} wrong, {first}")


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


def _all_reduce(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    _end(dist.all_reduce(inputs[0], op, group, async_op))
    return [inputs[0]], [reduced(case, size)]


def _all_reduce_coalesced(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    tensors = [*inputs, inputs[0].new_empty(0)]
    opts = AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, async_op
    views = [torch.view_as_real(tensor) if case.dtype.is_complex else tensor for tensor in tensors]
    _end(
        (group or dist.distributed_c10d._get_default_group()).allreduce_coalesced(views, opts)
    )  # dist's own function is deprecated
    return tensors, [*(reduced(case, size, seed) for seed in range(size)), inputs[0].new_empty(0)]


def _reduce_scatter(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    output = torch.empty_like(inputs[0])
    _end(dist.reduce_scatter(output, inputs, op, group, async_op))
    return [output], [reduced(case, size, rank)]


def _reduce_scatter_single(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    output = torch.empty_like(inputs[0])
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    _end(function(output, torch.cat(inputs), op, group, async_op))
    return [output], [reduced(case, size, rank)]


def _all_gather(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    outputs = [torch.empty_like(inputs[0]) for _ in range(size)]
    _end(dist.all_gather(outputs, inputs[0], group, async_op))
    return outputs, [tensor_of(case, peer, size) for peer in range(size)]


def _all_gather_single(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    output = inputs[0].new_empty(size * case.numel)
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _end(function(output, inputs[0], group, async_op))
    return [output], [torch.cat([tensor_of(case, peer, size) for peer in range(size)])]


def _broadcast(case: Case, rank: int, size: int, inputs: Any, op: Any, group: Any, async_op: bool) -> Any:
    root = size - 1
    _end(dist.broadcast(inputs[0], group_src=root, group=group, async_op=async_op))
    return [inputs[0]], [tensor_of(case, root, size)]


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "broadcast": _broadcast,
}
