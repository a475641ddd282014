"""Collectives as the tests call them, and what numpy says must come out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commlayer.plans.plan import Plan
from commlayer.plans.select import Collective, Settings, plan_for
from commlayer.transport.base import DType, Op
from commlayer.transport.group import NativeGroup

from .world import PATIENCE_S

Array = npt.NDArray[Any]

LARGE = 300_007
SIZES = (0, 1, 2, 37, 1023, 4099)

NUMPY: dict[DType, str] = {
    DType.U8: "u1",
    DType.I8: "i1",
    DType.I16: "i2",
    DType.I32: "i4",
    DType.I64: "i8",
    DType.F16: "f2",
    DType.BF16: "bf16",
    DType.F32: "f4",
    DType.F64: "f8",
    DType.U16: "u2",
    DType.U32: "u4",
    DType.U64: "u8",
}
BITWISE: dict[Op, Callable[..., Array]] = {
    Op.BAND: np.bitwise_and.reduce,
    Op.BOR: np.bitwise_or.reduce,
    Op.BXOR: np.bitwise_xor.reduce,
}
REDUCTIONS: dict[Op, Callable[..., Array]] = {
    Op.SUM: np.sum,
    Op.PRODUCT: np.prod,
    Op.MIN: np.min,
    Op.MAX: np.max,
    **BITWISE,
}
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)


def encode(values: npt.NDArray[np.int64], dtype: DType) -> Array:
    """Small whole numbers in a type; bf16, which numpy lacks, as the upper half of f32."""
    if dtype == DType.BF16:
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(NUMPY[dtype])


def decode(array: Array, dtype: DType) -> Array:
    return (array.astype("u4") << 16).view("f4") if dtype == DType.BF16 else array


class Ended:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self._errors: list[BaseException | None] = []
        self._called = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self._errors.append(error)
        self._called.set()

    def wait(self) -> BaseException | None:
        assert self._called.wait(PATIENCE_S)
        assert len(self._errors) == 1
        return self._errors[0]


class Case(NamedTuple):
    """One collective; `numel` as in `plan_for`."""

    collective: Collective
    dtype: DType
    numel: int
    op: Op = Op.SUM
    average: bool = False


def cases() -> Iterator[Case]:
    """All sizes in f32, all types and operators at one size, and a large one of each collective."""
    collectives: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
    for collective in collectives:
        for numel in (*SIZES, LARGE):
            yield Case(collective, DType.F32, numel)
        for dtype in DType:
            yield Case(collective, dtype, 37)
            if collective in ("all_reduce", "reduce_scatter", "reduce"):
                yield Case(collective, dtype, 37, average=True)
                for op in (Op.PRODUCT, Op.MIN, Op.MAX, *(() if dtype in FLOATS else BITWISE)):
                    yield Case(collective, dtype, 37, op)
    yield Case("barrier", DType.U8, 0)


def data(case: Case, size: int, count: int) -> list[npt.NDArray[np.int64]]:
    """Every rank's input: so small that no type overflows or rounds, whatever is computed."""
    low = 0 if NUMPY[case.dtype].startswith("u") else -2
    rng = np.random.default_rng(case.numel)
    return [rng.integers(low, 3, count) * (size if case.average else 1) for _ in range(size)]


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def make_plan(group: NativeGroup, case: Case, root: int = 0) -> Plan:
    return plan_for(
        case.collective,
        rank=group.rank,
        hosts=group.hosts,
        numel=case.numel,
        itemsize=2 if case.dtype == DType.BF16 else np.dtype(NUMPY[case.dtype]).itemsize,
        average=case.average,
        root=root,
        settings=Settings(staging_bytes=group.staging_bytes),
    )


def execute(group: NativeGroup, plan: Plan, source: Array, target: Array, case: Case, way: int) -> None:
    """Runs a plan in one of the ways there are."""
    arguments = (plan, address(source), address(target), case.dtype, case.op)
    if way == 0:
        group.run(*arguments, timeout_s=PATIENCE_S)
    elif way == 1:
        handle = group.submit(*arguments, timeout_s=PATIENCE_S, priority=3)
        handle.wait()
        assert handle.done()
    else:
        ended = Ended()
        group.submit(*arguments, timeout_s=PATIENCE_S).on_done(ended)
        assert ended.wait() is None


def check(group: NativeGroup, case: Case, number: int) -> None:
    """One case on one rank, with the ranks' common data; `number` picks the way and the root."""
    n, rank, numel = group.size, group.rank, case.numel
    part = slice(rank * numel, (rank + 1) * numel)
    everything = data(case, n, numel * n if case.collective == "reduce_scatter" else numel)
    root = number % n
    expected = everything[root]
    if case.collective == "reduce" and rank != root:
        expected = everything[rank]
    elif case.collective in ("all_reduce", "reduce_scatter", "reduce"):
        expected = REDUCTIONS[case.op](np.stack(everything), axis=0)
        expected = expected // n if case.average else expected
    if case.collective == "reduce_scatter":
        expected = expected[part]
    elif case.collective == "all_gather":
        expected = np.concatenate(everything)
    source = encode(everything[rank], case.dtype)
    in_place = case.collective in ("all_reduce", "broadcast", "reduce")
    target = source if in_place else encode(np.full(len(expected), 9), case.dtype)
    before = source.copy()
    execute(group, make_plan(group, case, root), source, target, case, number % 3)
    np.testing.assert_array_equal(decode(target, case.dtype), expected, str(case))
    if target is not source:
        np.testing.assert_array_equal(source, before, str(case))


SMALL = Case("all_reduce", DType.F32, 5)


def run(group: NativeGroup, case: Case = SMALL, timeout_s: float = PATIENCE_S) -> Array:
    array = np.full(case.numel, group.rank + 1, NUMPY[case.dtype])
    plan = make_plan(group, case)
    group.run(plan, address(array), address(array), case.dtype, case.op, timeout_s=timeout_s)
    return array
