"""`LeftOut`: makes the collectives of a running job short, or leaves them out, whatever the job's backend is.

All collectives of torch's C++ process groups, those of DDP's reducer included, are operators of the dispatcher
(torch/csrc/distributed/c10d/Ops.cpp). A kernel in front of the backend's replaces them while the phase says so. Results
have the right shapes and plausible values: each rank gets its own data where it would get that of the others.

These stay real in every phase, because jobs decide by their results: barriers, broadcasts and scatters of integers
(sizes and pickled objects), integer messages, and all operations of the Store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.futures import Future

from .spec import Phase

SHORT_ELEMENTS = 16
"""Elements of a message between two ranks in the phase `short`."""

c10d: Any = _distributed_c10d


class Operator(NamedTuple):
    """How an operator of c10d is imitated."""

    imitate: Callable[[Sequence[Any], int, int], None]
    """Fills the outputs from this rank's own inputs: takes the arguments, the rank and the size of the group."""
    shorten: Callable[[Sequence[Any], int], list[Any]]
    """Returns the arguments of the same operator with a few elements; takes the size of the group."""
    result: int | None = None
    """The argument that the operator returns beside the work."""
    is_control: bool = False
    """Whether integers in its first argument decide what the job does."""


class LeftOut:
    """Stands in front of the collectives of this process, until the process ends."""

    def __init__(self) -> None:
        self.phase: Phase = "real"
        self._library = torch.library.Library("c10d", "IMPL")
        self._count, self._nbytes = 0, 0

    def install(self) -> None:
        """Takes its place. Collectives stay real until the phase changes."""
        for name, operator in _OPERATORS.items():
            self._library.impl(name, self._kernel(name, operator), "Autograd")

    def take_counts(self) -> tuple[int, int]:
        """Operations and bytes of their inputs since the last call."""
        found = self._count, self._nbytes
        self._count, self._nbytes = 0, 0
        return found

    def _kernel(self, name: str, operator: Operator) -> Callable[..., Any]:
        real = getattr(torch.ops.c10d, name).default

        def kernel(*args: Any) -> Any:
            tensors = _flat(args[0])
            self._count += 1
            self._nbytes += sum(tensor.nbytes for tensor in _flat(_input(args)))
            guard = torch._C._AutoDispatchBelowAutograd
            if self.phase == "real" or (
                operator.is_control and not all(tensor.is_floating_point() for tensor in tensors)
            ):
                with guard():
                    return real(*args)
            group = ProcessGroup.unbox(next(argument for argument in args if isinstance(argument, torch.ScriptObject)))
            with torch.no_grad(), guard():
                operator.imitate(args, group.rank(), group.size())
            if self.phase == "short":
                with guard():
                    answer = real(*operator.shorten(args, group.size()))
                boxed = _with_value(answer[-1] if isinstance(answer, tuple) else answer, tensors)
            else:
                future: Future[Any] = Future(
                    devices=sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
                )
                future.set_result(tensors)
                boxed = c10d._create_work_from_future(future).boxed()
            return boxed if operator.result is None else (args[operator.result], boxed)

        return kernel


def _with_value(boxed: Any, tensors: list[Tensor]) -> Any:
    """The work with another value of its future, which DDP takes. Works without a future have no value, either."""
    try:
        future = Work.unbox(boxed).get_future()
    except RuntimeError:  # gloo's reduce-scatter
        return boxed
    return c10d._create_work_from_future(future.then(lambda _done: tensors)).boxed()


def _input(args: Sequence[Any]) -> Any:
    """The argument with the inputs: the second one, where outputs come first."""
    return args[1] if isinstance(args[1], (Tensor, list)) else args[0]


def _flat(argument: Any) -> list[Tensor]:
    """The tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for item in argument for tensor in _flat(item)]


def _nothing(args: Sequence[Any], rank: int, size: int) -> None:
    """Does nothing, for operators whose input is their output."""


def _zero(args: Sequence[Any], rank: int, size: int) -> None:  # noqa: ARG001
    for tensor in _flat(args[0]):
        tensor.zero_()


def _copy(target: Tensor, source: Tensor) -> None:
    if target.numel() == source.numel():
        target.copy_(source.reshape(target.shape))
    else:
        target.zero_()


def _gathered(args: Sequence[Any], rank: int, size: int) -> None:  # noqa: ARG001
    """One tensor for all ranks: `size` times the own input."""
    for output, source in zip(_flat(args[0]), _flat(args[1]), strict=True):
        if output.numel() == size * source.numel():
            output.view(size, -1).copy_(source.reshape(1, -1).expand(size, -1))
        else:
            output.zero_()


def _gathered_lists(args: Sequence[Any], rank: int, size: int) -> None:  # noqa: ARG001
    """A tensor for each rank: the own input; none, except at the root of a gather."""
    for outputs, source in zip(args[0], args[1], strict=False):
        for output in outputs:
            _copy(output, source)


def _scattered(args: Sequence[Any], rank: int, size: int) -> None:
    """The own part of one input."""
    for output, source in zip(_flat(args[0]), _flat(args[1]), strict=True):
        if source.numel() == size * output.numel():
            output.copy_(source.reshape(size, -1)[rank].reshape(output.shape))
        else:
            output.zero_()


def _scattered_lists(args: Sequence[Any], rank: int, size: int) -> None:  # noqa: ARG001
    """The own input of a list; none, except at the root of a scatter."""
    for output, sources in zip(args[0], args[1], strict=False):
        _copy(output, sources[rank])


def _exchanged(args: Sequence[Any], rank: int, size: int) -> None:  # noqa: ARG001
    for output, source in zip(_flat(args[0]), _flat(args[1]), strict=True):
        _copy(output, source)


def _scratch(like: Any, count: int) -> Tensor:
    first = _flat(like)[0]
    return torch.zeros(count, dtype=first.dtype, device=first.device)


def _same(args: Sequence[Any], size: int) -> list[Any]:  # noqa: ARG001
    """A few elements for every tensor of the first argument."""
    return [[_scratch([tensor], SHORT_ELEMENTS) for tensor in _flat(args[0])], *args[1:]]


def _many_to_one(args: Sequence[Any], size: int) -> list[Any]:
    """First argument: a part for each rank in one tensor; second: one part."""
    many, one = _scratch(args[0], size * SHORT_ELEMENTS), _scratch(args[0], SHORT_ELEMENTS)
    return [many, one, *args[2:]]


def _one_to_many(args: Sequence[Any], size: int) -> list[Any]:
    many, one = _scratch(args[0], size * SHORT_ELEMENTS), _scratch(args[0], SHORT_ELEMENTS)
    return [one, many, *args[2:]]


def _many_coalesced(args: Sequence[Any], size: int) -> list[Any]:
    parts = [_many_to_one([tensor], size)[:2] for tensor in args[0]]
    return [[many for many, _ in parts], [one for _, one in parts], *args[2:]]


def _one_coalesced(args: Sequence[Any], size: int) -> list[Any]:
    parts = [_one_to_many([tensor], size)[:2] for tensor in args[0]]
    return [[one for one, _ in parts], [many for _, many in parts], *args[2:]]


def _lists(args: Sequence[Any], size: int) -> list[Any]:  # noqa: ARG001
    """Two arguments of tensors or lists of tensors: each tensor becomes a short one."""

    def short(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return _scratch(argument, SHORT_ELEMENTS)
        return [short(item) for item in argument]

    return [short(args[0]), short(args[1]), *args[2:]]


def _all_to_all(args: Sequence[Any], size: int) -> list[Any]:
    output, source = _scratch(args[0], size * SHORT_ELEMENTS), _scratch(args[0], size * SHORT_ELEMENTS)
    return [output, source, args[2], [], [], *args[5:]]


_OPERATORS = {
    "allreduce_": Operator(_nothing, _same, 0),
    "allreduce_coalesced_": Operator(_nothing, _same),
    "broadcast_": Operator(_nothing, _same, 0, is_control=True),
    "reduce_": Operator(_nothing, _same),
    "allgather_": Operator(_gathered_lists, _lists, 0),
    "allgather_coalesced_": Operator(_gathered_lists, _lists),
    "_allgather_base_": Operator(_gathered, _many_to_one, 0),
    "allgather_into_tensor_coalesced_": Operator(_gathered, _many_coalesced),
    "reduce_scatter_": Operator(_scattered_lists, _lists, 0),
    "_reduce_scatter_base_": Operator(_scattered, _one_to_many, 0),
    "reduce_scatter_tensor_coalesced_": Operator(_scattered, _one_coalesced),
    "alltoall_": Operator(_exchanged, _lists, 0),
    "alltoall_base_": Operator(_exchanged, _all_to_all),
    "gather_": Operator(_gathered_lists, _lists),
    "scatter_": Operator(_scattered_lists, _lists, 0, is_control=True),
    "send": Operator(_nothing, _same, is_control=True),
    "recv_": Operator(_zero, _same, is_control=True),
    "recv_any_source_": Operator(_zero, _same, is_control=True),
}
