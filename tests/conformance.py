"""The one table of what every collective must compute: collective x type x size x operator, for any world.

Inputs are small whole numbers, so that every sum and product is exact in every type, whatever the order; averages use
multiples of the number of ranks. A test takes `cases()` and calls `check(case)` on every rank of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions

WORLDS = (1, 2, 3, 4, 5)
SIZES = (0, 1, 2, 7, 64, 1023, 4099)
LARGE = 300_007

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOATS8, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool)

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")


class Case(NamedTuple):
    """One collective on tensors of `numel` elements per rank (per shard, where there are shards)."""

    collective: str
    dtype: torch.dtype
    numel: int
    op: str = "SUM"

    def __str__(self) -> str:
        return f"{self.collective} {str(self.dtype).removeprefix('torch.')} x {self.numel} {self.op}"


def cases(large: int = LARGE, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    """The table: all sizes in float32, all types and operators at one odd size, and a large tensor of each form."""
    for collective in COLLECTIVES:
        for numel in SIZES:
            yield Case(collective, torch.float32, numel)
        yield Case(collective, torch.float32, large)
        for dtype in dtypes:
            for op in operators(dtype) if collective in REDUCING else ("SUM",):
                yield Case(collective, dtype, 37, op)


def operators(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that are defined for a type."""
    if dtype.is_complex:
        return ("SUM", "AVG")
    if dtype in FLOATS8:
        return (*ARITHMETIC, "AVG")
    return (*ARITHMETIC, "AVG", "PREMUL_SUM") if dtype.is_floating_point else (*ARITHMETIC, *BITWISE)


def gloo_has(case: Case) -> bool:
    """Whether gloo has this case, too."""
    if case.op == "PREMUL_SUM" or case.collective in (
        "all_gather_uneven",
        "all_to_all_uneven",
        "reduce_scatter_uneven",
    ):
        return False
    if case.dtype.is_complex and case.collective in ("gather", "all_gather_coalesced"):
        return False
    return case.dtype not in (*UNSIGNED, *FLOATS8, torch.int16)


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
    tensor = values.to(torch.float32).to(case.dtype)
    return tensor * (1 + 1j) if case.dtype.is_complex else tensor


def reduced(case: Case, size: int, seed: int = 0) -> torch.Tensor:
    """The reduction over all ranks, computed exactly."""
    dtype = case.dtype
    wide = torch.complex128 if dtype.is_complex else torch.int64 if case.op in BITWISE else torch.float64
    values = torch.stack([tensor_of(case, rank, size, seed).to(wide) for rank in range(size)])
    if case.op in BITWISE:
        result = values[0]
        for value in values[1:]:
            result = _BITWISE[case.op](result, value)
    elif case.op in ("SUM", "AVG", "PREMUL_SUM"):
        result = values.sum(0) / (size if case.op == "AVG" else 1) * (2 if case.op == "PREMUL_SUM" else 1)
    elif case.op == "PRODUCT":
        result = values.prod(0)
    else:
        result = values.amin(0) if case.op == "MIN" else values.amax(0)
    if dtype == torch.bool:
        return result != 0
    return result.to(dtype)


_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


class Run(NamedTuple):
    """A case on this rank: what the functions below need to know."""

    case: Case
    rank: int
    size: int
    op: Any
    group: dist.ProcessGroup | None
    async_op: bool

    def tensor(self, rank: int | None = None, seed: int = 0, numel: int | None = None) -> torch.Tensor:
        """`tensor_of`, by default for this rank and for the case's length."""
        case = self.case if numel is None else self.case._replace(numel=numel)
        return tensor_of(case, self.rank if rank is None else rank, self.size, seed)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's tensors with the seeds 0, 1, ... size - 1."""
        return [self.tensor(seed=seed) for seed in range(self.size)]

    def uneven(self, rank: int) -> int:
        """A length for a rank, sometimes 0."""
        return self.case.numel * (rank % 3)

    def between(self, source: int, target: int) -> int:
        """A length for a pair of ranks, often 0."""
        return self.case.numel * ((source + 2 * target) % 3)


def check(case: Case, group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> None:
    """Runs a case, by the names of `torch.distributed`; raises AssertionError when this rank's result is wrong."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    op = dist._make_nccl_premul_sum(2.0) if case.op == "PREMUL_SUM" else getattr(dist.ReduceOp, case.op)
    results, expected = _COLLECTIVES[case.collective](Run(case, rank, size, op, group, async_op))
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype == exact.dtype
        assert result.shape == exact.shape
        size_bytes = result.element_size()
        wrong = (_bytes(result) != _bytes(exact)).view(-1, size_bytes).any(1).nonzero().flatten()
        if len(wrong):
            flat, right = result.flatten().tolist(), exact.flatten().tolist()
            shown = [f"[{at}] is {flat[at]} and not {right[at]}" for at in wrong[:3].tolist()]
            raise AssertionError(
                f"{case}, rank {rank} of {size}: {len(wrong)} of {len(flat)} wrong: {', '.join(shown)}"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(torch.uint8)  # gloo's True is any byte but 0


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


Result = tuple[list[torch.Tensor], list[torch.Tensor]]


def _group(run: Run) -> Any:
    return run.group or dist.distributed_c10d._get_default_group()


def _all_reduce(run: Run) -> Result:
    tensor = run.tensor()
    _end(dist.all_reduce(tensor, run.op, run.group, run.async_op))
    return [tensor], [reduced(run.case, run.size)]


def _all_reduce_coalesced(run: Run) -> Result:
    tensors = [*run.tensors(), run.tensor(numel=0)]
    opts = AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = run.op, run.async_op
    views = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    _end(_group(run).allreduce_coalesced(views, opts))  # dist's own function is deprecated
    return tensors, [*(reduced(run.case, run.size, seed) for seed in range(run.size)), run.tensor(numel=0)]


def _reduce(run: Run) -> Result:
    tensor, root = run.tensor(), run.size - 1
    _end(dist.reduce(tensor, group_dst=root, op=run.op, group=run.group, async_op=run.async_op))
    return ([tensor], [reduced(run.case, run.size)]) if run.rank == root else ([], [])


def _reduce_scatter(run: Run) -> Result:
    inputs = run.tensors()
    output = torch.empty_like(inputs[0])
    _end(dist.reduce_scatter(output, inputs, run.op, run.group, run.async_op))
    return [output], [reduced(run.case, run.size, run.rank)]


def _reduce_scatter_uneven(run: Run) -> Result:
    inputs = [run.tensor(seed=rank, numel=run.uneven(rank)) for rank in range(run.size)]
    output = torch.empty_like(inputs[run.rank])
    _end(dist.reduce_scatter(output, inputs, run.op, run.group, run.async_op))
    exact = reduced(run.case._replace(numel=run.uneven(run.rank)), run.size, run.rank)
    kept = [run.tensor(seed=rank, numel=run.uneven(rank)) for rank in range(run.size)]
    return [output, *inputs], [exact, *kept]


def _reduce_scatter_single(run: Run) -> Result:
    inputs = run.tensors()
    output = torch.empty_like(inputs[0])
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    _end(function(output, torch.cat(inputs), run.op, run.group, run.async_op))
    return [output], [reduced(run.case, run.size, run.rank)]


def _all_gather(run: Run) -> Result:
    tensor = run.tensor()
    outputs = [torch.empty_like(tensor) for _ in range(run.size)]
    _end(dist.all_gather(outputs, tensor, run.group, run.async_op))
    return outputs, [run.tensor(peer) for peer in range(run.size)]


def _all_gather_uneven(run: Run) -> Result:
    exact = [run.tensor(peer, numel=run.uneven(peer)) for peer in range(run.size)]
    outputs = [torch.empty_like(each) for each in exact]
    _end(dist.all_gather(outputs, run.tensor(numel=run.uneven(run.rank)), run.group, run.async_op))
    return outputs, exact


def _all_gather_single(run: Run) -> Result:
    tensor = run.tensor()
    output = tensor.new_empty(run.size * tensor.numel())
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _end(function(output, tensor, run.group, run.async_op))
    return [output], [torch.cat([run.tensor(peer) for peer in range(run.size)])]


def _all_gather_coalesced(run: Run) -> Result:
    tensors = [run.tensor(), run.tensor(seed=1, numel=3)]
    outputs = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(run.size)]
    _end(_group(run).allgather_coalesced(outputs, tensors))
    exact = [[run.tensor(peer), run.tensor(peer, seed=1, numel=3)] for peer in range(run.size)]
    return [each for row in outputs for each in row], [each for row in exact for each in row]


def _broadcast(run: Run) -> Result:
    tensor, root = run.tensor(), run.size - 1
    _end(dist.broadcast(tensor, group_src=root, group=run.group, async_op=run.async_op))
    return [tensor], [run.tensor(root)]


def _gather(run: Run) -> Result:
    tensor, root = run.tensor(), run.size - 1
    outputs = [torch.empty_like(tensor) for _ in range(run.size)] if run.rank == root else None
    _end(dist.gather(tensor, outputs, group_dst=root, group=run.group, async_op=run.async_op))
    return outputs or [], [run.tensor(peer) for peer in range(run.size)] if run.rank == root else []


def _scatter(run: Run) -> Result:
    root = run.size - 1
    output = torch.empty_like(run.tensor())
    inputs = run.tensors() if run.rank == root else None
    _end(dist.scatter(output, inputs, group_src=root, group=run.group, async_op=run.async_op))
    return [output], [run.tensor(root, seed=run.rank)]


def _all_to_all(run: Run) -> Result:
    inputs = run.tensors()
    outputs = [torch.empty_like(each) for each in inputs]
    _end(dist.all_to_all(outputs, inputs, run.group, run.async_op))
    return outputs, [run.tensor(peer, seed=run.rank) for peer in range(run.size)]


def _all_to_all_uneven(run: Run) -> Result:
    peers = range(run.size)
    inputs = [run.tensor(seed=peer, numel=run.between(run.rank, peer)) for peer in peers]
    exact = [run.tensor(peer, seed=run.rank, numel=run.between(peer, run.rank)) for peer in peers]
    outputs = [torch.empty_like(each) for each in exact]
    _end(dist.all_to_all(outputs, inputs, run.group, run.async_op))
    return outputs, exact


def _all_to_all_single(run: Run) -> Result:
    tensor = torch.cat(run.tensors())
    output = torch.empty_like(tensor)
    _end(dist.all_to_all_single(output, tensor, group=run.group, async_op=run.async_op))
    return [output], [torch.cat([run.tensor(peer, seed=run.rank) for peer in range(run.size)])]


def _all_to_all_single_uneven(run: Run) -> Result:
    peers = range(run.size)
    sent = [run.between(run.rank, peer) for peer in peers]
    received = [run.between(peer, run.rank) for peer in peers]
    tensor = torch.cat([run.tensor(seed=peer, numel=sent[peer]) for peer in peers])
    exact = torch.cat([run.tensor(peer, seed=run.rank, numel=received[peer]) for peer in peers])
    output = torch.empty_like(exact)
    _end(dist.all_to_all_single(output, tensor, received, sent, run.group, run.async_op))
    return [output], [exact]


def _coalesced(run: Run) -> Result:
    """The coalescing manager, on each of the collectives that torch then calls once for all."""
    sums, parts, wholes = run.tensors(), run.tensors(), [torch.cat(run.tensors()) for _ in range(2)]
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for tensor in sums:
            dist.all_reduce(tensor, run.op, run.group)
    manager.wait()
    gathered = [torch.empty_like(wholes[0]) for _ in parts]
    shards = [torch.empty_like(parts[0]) for _ in wholes]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for output, part in zip(gathered, parts, strict=True):
            gather(output, part, run.group)
    manager.wait()
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for shard, whole in zip(shards, wholes, strict=True):
            scatter(shard, whole, run.op, run.group)
    manager.wait()
    exact = [reduced(run.case, run.size, seed) for seed in range(run.size)]
    exact += [torch.cat([run.tensor(peer, seed) for peer in range(run.size)]) for seed in range(run.size)]
    exact += [reduced(run.case, run.size, run.rank)] * 2
    return [*sums, *gathered, *shards], exact


def _send_receive(run: Run) -> Result:
    """Around the ring, and with tags that cross."""
    if run.size == 1:
        return [], []
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    outputs = [torch.empty_like(run.tensor()) for _ in range(2)]
    works = [dist.isend(run.tensor(seed=tag), group_dst=after, group=run.group, tag=tag) for tag in range(2)]
    for tag in (1, 0):
        dist.recv(outputs[tag], group_src=before, group=run.group, tag=tag)
    for work in works:
        _end(work)
    return outputs, [run.tensor(before, seed=tag) for tag in range(2)]


def _batch(run: Run) -> Result:
    """batch_isend_irecv: everybody to everybody, waited for in the opposite order."""
    peers = [peer for peer in range(run.size) if peer != run.rank]
    outputs = [torch.empty_like(run.tensor()) for _ in peers]
    operations = []
    for output, peer in zip(outputs, peers, strict=True):
        operations.append(dist.P2POp(dist.irecv, output, group=run.group, group_peer=peer))
        operations.append(dist.P2POp(dist.isend, run.tensor(seed=peer), group=run.group, group_peer=peer))
    for work in reversed(dist.batch_isend_irecv(operations) if operations else []):
        work.wait()
    return outputs, [run.tensor(peer, seed=run.rank) for peer in peers]


_COLLECTIVES: dict[str, Callable[[Run], Result]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_uneven": _reduce_scatter_uneven,
    "reduce_scatter_single": _reduce_scatter_single,
    "coalesced": _coalesced,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather_uneven,
    "all_gather_single": _all_gather_single,
    "all_gather_coalesced": _all_gather_coalesced,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _all_to_all_single_uneven,
    "send_receive": _send_receive,
    "batch": _batch,
}
COLLECTIVES = tuple(_COLLECTIVES)
REDUCING = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_uneven",
    "reduce_scatter_single",
    "coalesced",
)
