"""Tensors for the engine: element types, reductions, and stretches of memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ...errors import ConfigError
from ...transport.base import DType, Op


class Kind(NamedTuple):
    """How the engine reduces or moves the elements of a torch type."""

    dtype: DType
    op: Op = Op.SUM
    average: bool = False
    parts: int = 1
    """Elements of `dtype` in one torch element: 2 for complex numbers."""
    wide: torch.dtype | None = None
    """Type to convert to first if the kernels lack the element type; results are rounded back. None: no conversion."""
    is_scaled: bool = False
    """Whether contributions are multiplied by the operator's factor first (PREMUL_SUM)."""
    element: str = ""
    """The torch type. It is part of the signature, because several torch types share one `dtype`."""
    reduction: str = ""
    """torch's name of the operator: SUM, AVG, MAX. To ask an operator for it takes a microsecond."""


STRIDED = torch.strided

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def _kinds() -> dict[tuple[torch.dtype, int], Kind]:
    red = ReduceOp
    ops = {red.SUM: Op.SUM, red.PRODUCT: Op.PRODUCT, red.MIN: Op.MIN, red.MAX: Op.MAX}
    bitwise = {red.BAND: Op.BAND, red.BOR: Op.BOR, red.BXOR: Op.BXOR}
    # On 0 and 1 a sum is "or" and a product is "and".
    logic = {red.SUM: Op.MAX, red.MAX: Op.MAX, red.PRODUCT: Op.MIN, red.MIN: Op.MIN} | bitwise
    floats = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32, torch.float64: DType.F64}
    integers = {
        torch.uint8: DType.U8,
        torch.int8: DType.I8,
        torch.int16: DType.I16,
        torch.int32: DType.I32,
        torch.int64: DType.I64,
        torch.uint16: DType.U16,
        torch.uint32: DType.U32,
        torch.uint64: DType.U64,
    }
    kinds = {(t, r.value): Kind(dtype, op) for t, dtype in (floats | integers).items() for r, op in ops.items()}
    kinds |= {(t, r.value): Kind(dtype, op) for t, dtype in integers.items() for r, op in bitwise.items()}
    # The average of integers is NCCL's: the sum, which wraps, divided and rounded towards zero.
    kinds |= {(t, red.AVG.value): Kind(dtype, Op.SUM, average=True) for t, dtype in (floats | integers).items()}
    kinds |= {(torch.bool, r.value): Kind(DType.U8, op) for r, op in logic.items()}
    for t in FLOATS8:
        kinds |= {(t, r.value): Kind(DType.F32, op, wide=torch.float32) for r, op in ops.items()}
        kinds[t, red.AVG.value] = Kind(DType.F32, Op.SUM, average=True, wide=torch.float32)
    for t, dtype in floats.items():
        kinds[t, red.PREMUL_SUM.value] = Kind(dtype, Op.SUM, is_scaled=True)
    for t, dtype in ((torch.complex32, DType.F16), (torch.complex64, DType.F32), (torch.complex128, DType.F64)):
        kinds[t, red.SUM.value] = Kind(dtype, Op.SUM, parts=2)
        kinds[t, red.AVG.value] = Kind(dtype, Op.SUM, average=True, parts=2)
    names = {getattr(red, name).value: name for name in red.RedOpType.__members__}
    return {(t, op): kind._replace(element=str(t), reduction=names[op]) for (t, op), kind in kinds.items()}


REDUCTIONS = _kinds()
"""The reductions that the engine does, by torch type and operator. gloo does all others."""

MOVES = {
    1: Kind(DType.U8),
    2: Kind(DType.U16),
    4: Kind(DType.U32),
    8: Kind(DType.U64),
    16: Kind(DType.U64, parts=2),
}
"""How to move elements unchanged, by their size in bytes."""


@functools.cache
def move_kind(dtype: torch.dtype) -> Kind | None:
    """How to move elements of this type; None if the engine has no type of their size."""
    kind = MOVES.get(dtype.itemsize)
    return None if kind is None else kind._replace(element=str(dtype))


def reduction_kind(tensors: list[Tensor], op: ReduceOp) -> Kind | None:
    """How to reduce these tensors; None if the engine cannot do or reach them, and if there are none."""
    if not tensors:
        return None
    # The hash of a ReduceOp is the value of its operator, in a third of the time.
    kind = REDUCTIONS.get((tensors[0].dtype, hash(op)))
    return kind if are_plain(tensors) else None


def op_name(op: ReduceOp) -> str:
    """The operator in capitals: SUM, AVG, MAX."""
    return str(op.op.name)  # type: ignore[attr-defined]  # not in the stub


@functools.cache
def has_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of this class have the memory of their values, and are not wrappers of other tensors, as DTensor
    and AsyncCollectiveTensor. The engine would take address 0 of those."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or kind.data_ptr is not Tensor.data_ptr


def are_plain(tensors: list[Tensor]) -> bool:
    """Whether the engine can reach these tensors: strided, on the CPU, of one dtype, with memory of their own."""
    first = tensors[0]
    if len(tensors) == 1:  # as fast as can be: for small collectives
        return first.is_cpu and first.layout is STRIDED and (type(first) is Tensor or has_memory(type(first)))
    return all(are_plain([tensor]) and tensor.dtype is first.dtype for tensor in tensors)


def are_alike(tensors: list[Tensor], one: Tensor) -> bool:
    """Whether all tensors have as many elements as `one`."""
    return all(tensor.numel() == one.numel() for tensor in tensors)


def _are_consecutive(tensors: list[Tensor]) -> bool:
    """Whether the tensors are chunks of one tensor, one after the other: whoever has the first has the memory of all.
    Tensors with memory of their own may lie so by chance, and each can be freed."""
    if len(tensors) == 1:
        return is_stretch(tensors[0])
    address, storage = tensors[0].data_ptr(), tensors[0].untyped_storage()._cdata
    for tensor in tensors:
        if not is_stretch(tensor) or tensor.data_ptr() != address or tensor.untyped_storage()._cdata != storage:
            return False
        address += tensor.nbytes
    return True


def is_stretch(tensor: Tensor) -> bool:
    """Whether the engine can use the memory of a tensor as it is: it has the elements alone, in their order."""
    return (
        tensor.is_cpu
        and tensor.layout is STRIDED
        and tensor.is_contiguous()
        and (type(tensor) is Tensor or has_memory(type(tensor)))
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def flatten(tensors: list[Tensor]) -> Tensor:
    """The elements of these tensors in one stretch of memory, which begins with the returned tensor.

    It is the first tensor itself if they lie so already, and a copy otherwise.
    """
    if _are_consecutive(tensors):
        return tensors[0]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def contribution(tensors: list[Tensor], kind: Kind, op: ReduceOp) -> Tensor:
    """The elements of these tensors in one stretch, converted or scaled for a reduction; otherwise like `flatten`."""
    if kind.wide is None and not kind.is_scaled:
        return flatten(tensors)
    memory = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    if kind.wide is not None:
        return memory.to(kind.wide)
    # A number or a tensor of one element. Nothing else returns it, and the stub lacks __getstate__.
    factor = op.__getstate__()[1]  # type: ignore[attr-defined]
    return memory.mul_(factor.to(memory) if isinstance(factor, Tensor) else factor)


def space(tensors: list[Tensor], wide: torch.dtype | None = None) -> Tensor:
    """Memory for the elements of these tensors in one stretch, which begins with the returned tensor.

    It is the first tensor itself if they lie so already. `wide`: dtype of the elements, if not that of the tensors.
    """
    if wide is None and _are_consecutive(tensors):
        return tensors[0]
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=wide)


def check_distinct(copies: list[tuple[Tensor, list[Tensor]]]) -> None:
    """Raises ConfigError for a tensor with elements that share memory, which no result can be copied to."""
    for _, tensors in copies:
        for tensor in tensors:
            if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ConfigError(
                    f"a result of shape {tuple(tensor.shape)} goes to a tensor whose elements share memory, as those "
                    f"of expand() do; give the collective tensor.contiguous()"
                )


def writing(targets: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A context that lets any thread change these tensors, unseen by autograd. Those that were made in inference mode
    can be changed in that mode only."""
    return torch.inference_mode() if any(target.is_inference() for target in targets) else torch.no_grad()


def copy_back(copies: list[tuple[Tensor, list[Tensor]]]) -> None:
    """Copies each stretch to its tensors."""
    if not copies:
        return  # entering no_grad alone takes a tenth of a small operation
    with writing(chain.from_iterable(tensors for _, tensors in copies)):
        for flat, tensors in copies:
            for part, tensor in zip(flat.view(-1).split([tensor.numel() for tensor in tensors]), tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))
