"""The table of collectives through `torch.distributed`: collective x type x size x operator, for any number of ranks.

A test takes `cases()` and calls `check(case)` on every rank of a job. `oracle` gives the inputs and the results.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceCoalescedOptions

from commlayer.tools.bench.collectives import all_gather_single, reduce_scatter_single
from tests import oracle

WORLDS = (1, 2, 3, 4, 5)
SIZES = (0, 1, 2, 7, 64, 1023, 4099)
LARGE = 300_007

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOATS8, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool)

GLOO_HAS_ALL_TO_ALL = not torch.__version__.startswith("2.11.")
"""Whether gloo has all-to-all of lists."""

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
    if dtype == torch.bool:
        return (*ARITHMETIC, *BITWISE)
    return (*ARITHMETIC, "AVG", *(("PREMUL_SUM",) if dtype.is_floating_point else BITWISE))


def gloo_has(case: Case) -> bool:
    """Whether gloo has this case, too."""
    if case.op == "PREMUL_SUM" or case.collective in (
        "all_gather_uneven",
        "all_to_all_uneven",
        "reduce_scatter_uneven",
    ):
        return False
    if case.op == "AVG" and case.dtype in INTEGERS:
        return False
    if case.collective == "all_to_all" and not GLOO_HAS_ALL_TO_ALL:
        return False
    if case.dtype.is_complex and case.collective in ("gather", "all_gather_coalesced"):
        return False
    return case.dtype not in (*UNSIGNED, *FLOATS8, torch.int16)


class Run(NamedTuple):
    """A case on this rank. The root is the last rank."""

    case: Case
    rank: int
    size: int
    op: Any
    group: dist.ProcessGroup | None
    async_op: bool

    @property
    def root(self) -> int:
        """The root of collectives that have one."""
        return self.size - 1

    def oracle(self, collective: str, numel: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's input and output, as the oracle's collective of that name has them."""
        dtype, op = self.case.dtype, self.case.op
        numel = self.case.numel if numel is None else numel
        limits = (0, 1) if dtype == torch.bool else (0 if dtype in (torch.uint8, *UNSIGNED) else -2, 2)
        inputs = oracle.inputs_of(collective, self.size, numel, op, self.root, limits=limits)
        exact = oracle.expected(collective, self.rank, inputs, numel, op, self.root)
        return _tensor(inputs[self.rank], dtype), _tensor(exact, dtype)

    def lengths(self, collective: str) -> tuple[list[int], list[int]]:
        """The lengths that a delivery moves from this rank to each other, and from each to this one."""
        numel, root, rank = self.case.numel, self.root, self.rank
        sent = [oracle.delivered(collective, rank, peer, numel, root) for peer in range(self.size)]
        return sent, [oracle.delivered(collective, peer, rank, numel, root) for peer in range(self.size)]


def _tensor(values: oracle.Array, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(len(values), dtype=torch.float64).copy_(torch.from_numpy(values)).to(dtype)
    return tensor * (1 + 1j) if dtype.is_complex else tensor


def _parts(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Copies of the parts of a tensor: in memory they are not neighbours."""
    return [part.clone() for part in tensor.split(list(lengths))]


def check(case: Case, group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> None:
    """Runs a case, by the names of `torch.distributed`; raises AssertionError when this rank's result is wrong."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    op: Any = getattr(dist.ReduceOp, case.op)
    if case.op == "PREMUL_SUM":
        op = dist._make_nccl_premul_sum(float(oracle.PREMULTIPLIER))
    results, exact = _COLLECTIVES[case.collective](Run(case, rank, size, op, group, async_op))
    result = torch.cat([output.flatten() for output in results]) if results else exact[:0]
    assert result.dtype == exact.dtype
    assert result.shape == exact.shape
    wrong = (_bytes(result) != _bytes(exact)).view(-1, result.element_size()).any(1).nonzero().flatten()
    if len(wrong):
        shown = [f"[{at}] is {result[at].item()} and not {exact[at].item()}" for at in wrong[:3].tolist()]
        raise AssertionError(f"{case}, rank {rank} of {size}: {len(wrong)} of {len(result)} wrong: {', '.join(shown)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.view(torch.uint8)  # gloo's True: not 0


def _end(work: Any) -> None:
    if work is not None:
        work.wait()


Result = tuple[Sequence[torch.Tensor], torch.Tensor]
"""The tensors that a collective wrote, and the right elements of all of them."""


def _group(run: Run) -> Any:
    return run.group or dist.distributed_c10d._get_default_group()


def _all_reduce(run: Run) -> Result:
    tensor, exact = run.oracle("all_reduce")
    _end(dist.all_reduce(tensor, run.op, run.group, run.async_op))
    return [tensor], exact


def _all_reduce_coalesced(run: Run) -> Result:
    tensor, exact = run.oracle("all_reduce", run.size * run.case.numel)
    tensors = _parts(tensor, [*[run.case.numel] * run.size, 0])
    opts = AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = run.op, run.async_op
    views = [torch.view_as_real(value) if value.is_complex() else value for value in tensors]
    _end(_group(run).allreduce_coalesced(views, opts))  # dist's own function is deprecated
    return tensors, exact


def _reduce(run: Run) -> Result:
    tensor, exact = run.oracle("reduce")
    _end(dist.reduce(tensor, group_dst=run.root, op=run.op, group=run.group, async_op=run.async_op))
    return ([tensor], exact) if run.rank == run.root else ([], exact[:0])


def _reduce_scatter(run: Run) -> Result:
    """The inputs must stay as they are."""
    collective = run.case.collective
    tensor, exact = run.oracle(collective)
    uneven = collective.endswith("uneven")
    lengths = [oracle.uneven(peer, run.case.numel, run.root) if uneven else run.case.numel for peer in range(run.size)]
    output, inputs = torch.empty_like(exact), _parts(tensor, lengths)
    _end(dist.reduce_scatter(output, inputs, run.op, run.group, run.async_op))
    return [output, *inputs], torch.cat([exact, tensor])


def _reduce_scatter_single(run: Run) -> Result:
    tensor, exact = run.oracle("reduce_scatter")
    output = torch.empty_like(exact)
    _end(reduce_scatter_single(output, tensor, run.op, run.group, run.async_op))
    return [output], exact


def _all_gather(run: Run) -> Result:
    tensor, exact = run.oracle(run.case.collective)
    outputs = _parts(torch.empty_like(exact), run.lengths(run.case.collective)[1])
    _end(dist.all_gather(outputs, tensor, run.group, run.async_op))
    return outputs, exact


def _all_gather_single(run: Run) -> Result:
    tensor, exact = run.oracle("all_gather")
    output = torch.empty_like(exact)
    _end(all_gather_single(output, tensor, run.group, run.async_op))
    return [output], exact


def _all_gather_coalesced(run: Run) -> Result:
    tensor, exact = run.oracle("all_gather", run.case.numel + 3)
    lengths = [run.case.numel, 3]
    outputs = [_parts(part, lengths) for part in torch.empty_like(exact).split(sum(lengths))]
    _end(_group(run).allgather_coalesced(outputs, _parts(tensor, lengths)))
    return [output for row in outputs for output in row], exact


def _broadcast(run: Run) -> Result:
    tensor, exact = run.oracle("broadcast")
    _end(dist.broadcast(tensor, group_src=run.root, group=run.group, async_op=run.async_op))
    return [tensor], exact


def _gather(run: Run) -> Result:
    tensor, exact = run.oracle("gather")
    outputs = _parts(torch.empty_like(exact), [run.case.numel] * run.size) if run.rank == run.root else None
    _end(dist.gather(tensor, outputs, group_dst=run.root, group=run.group, async_op=run.async_op))
    return outputs or [], exact


def _scatter(run: Run) -> Result:
    tensor, exact = run.oracle("scatter")
    output = torch.empty_like(exact)
    inputs = _parts(tensor, [run.case.numel] * run.size) if run.rank == run.root else None
    _end(dist.scatter(output, inputs, group_src=run.root, group=run.group, async_op=run.async_op))
    return [output], exact


def _all_to_all(run: Run) -> Result:
    tensor, exact = run.oracle(run.case.collective)
    sent, received = run.lengths(run.case.collective)
    outputs = _parts(torch.empty_like(exact), received)
    _end(dist.all_to_all(outputs, _parts(tensor, sent), run.group, run.async_op))
    return outputs, exact


def _all_to_all_single(run: Run) -> Result:
    collective = run.case.collective.replace("_single", "")
    tensor, exact = run.oracle(collective)
    sent, received = run.lengths(collective) if collective.endswith("uneven") else (None, None)
    output = torch.empty_like(exact)
    _end(dist.all_to_all_single(output, tensor, received, sent, run.group, run.async_op))
    return [output], exact


def _coalesced(run: Run) -> Result:
    """The coalescing manager, on each of the collectives that torch then calls once for all."""
    numel, size = run.case.numel, run.size
    tensor, sums_exact = run.oracle("all_reduce", size * numel)
    sums = _parts(tensor, [numel] * size)
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for total in sums:
            dist.all_reduce(total, run.op, run.group)
    manager.wait()
    part, gathered_exact = run.oracle("all_gather", 2 * numel)
    gathered = [part.new_empty(size * numel) for _ in range(2)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for output, half in zip(gathered, _parts(part, [numel] * 2), strict=True):
            gather(output, half, run.group)
    manager.wait()
    whole, shards_exact = run.oracle("reduce_scatter", 2 * numel)
    shards = _parts(torch.empty_like(shards_exact), [numel] * 2)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with dist._coalescing_manager(run.group, async_ops=run.async_op) as manager:
        for shard, half in zip(shards, whole.view(size, 2, numel).unbind(1), strict=True):
            scatter(shard, half.flatten(), run.op, run.group)
    manager.wait()
    halves = gathered_exact.view(size, 2, numel).transpose(0, 1).flatten()
    return [*sums, *gathered, *shards], torch.cat([sums_exact, halves, shards_exact])


def _send_receive(run: Run) -> Result:
    """Sends around the ring, with two tags in the opposite order."""
    numel = run.case.numel
    tensor, everything = run.oracle("all_gather", 2 * numel)
    after, before = (run.rank + 1) % run.size, (run.rank - 1) % run.size
    if run.size == 1:
        return [], tensor[:0]
    inputs, outputs = (_parts(whole, [numel] * 2) for whole in (tensor, torch.empty_like(tensor)))
    works = [dist.isend(inputs[tag], group_dst=after, group=run.group, tag=tag) for tag in range(2)]
    for tag in (1, 0):
        dist.recv(outputs[tag], group_src=before, group=run.group, tag=tag)
    for work in works:
        _end(work)
    return outputs, everything.view(run.size, 2 * numel)[before]


def _batch(run: Run) -> Result:
    """batch_isend_irecv: each rank to each other one, waited for in the opposite order."""
    tensor, exact = run.oracle("all_to_all")
    inputs, outputs = (_parts(whole, [run.case.numel] * run.size) for whole in (tensor, torch.empty_like(exact)))
    operations = []
    for peer in range(run.size):
        if peer == run.rank:
            outputs[peer].copy_(inputs[peer])
            continue
        operations.append(dist.P2POp(dist.irecv, outputs[peer], group=run.group, group_peer=peer))
        operations.append(dist.P2POp(dist.isend, inputs[peer], group=run.group, group_peer=peer))
    for work in reversed(dist.batch_isend_irecv(operations) if operations else []):
        work.wait()
    return outputs, exact


_COLLECTIVES: dict[str, Callable[[Run], Result]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_uneven": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "coalesced": _coalesced,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_coalesced": _all_gather_coalesced,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _all_to_all_single,
    "send_receive": _send_receive,
    "batch": _batch,
}
COLLECTIVES = tuple(_COLLECTIVES)
REDUCING = tuple(name for name in COLLECTIVES if "reduce" in name or name == "coalesced")
