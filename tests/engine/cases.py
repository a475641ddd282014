"""Collectives through a `NativeGroup`, against the oracle."""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from commlayer.plans.delivery import deliver
from commlayer.plans.plan import Plan
from commlayer.plans.select import Collective, Settings, plan_for
from commlayer.transport.base import DType, Op, Request
from commlayer.transport.group import NativeGroup
from tests import oracle
from tests.world import PATIENCE_S

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
    """One collective, as the oracle describes it."""

    collective: str
    dtype: DType
    numel: int
    op: Op = Op.SUM
    average: bool = False


def cases() -> Iterator[Case]:
    """All sizes in f32, all types and operators at one size, and a large one of each collective."""
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"):
        for numel in (*SIZES, LARGE):
            yield Case(collective, DType.F32, numel)
        for dtype in DType:
            yield Case(collective, dtype, 37)
            if collective in oracle.REDUCING:
                yield Case(collective, dtype, 37, average=True)
                for op in (Op.PRODUCT, Op.MIN, Op.MAX, *(() if dtype in FLOATS else (Op.BAND, Op.BOR, Op.BXOR))):
                    yield Case(collective, dtype, 37, op)
    yield Case("barrier", DType.U8, 0)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def make_plan(group: NativeGroup, case: Case, root: int = 0) -> Plan:
    itemsize = 2 if case.dtype == DType.BF16 else np.dtype(NUMPY[case.dtype]).itemsize
    if case.collective in oracle.DELIVERIES:
        rank, peers, length = group.rank, range(group.size), case.numel * itemsize
        sent = [oracle.delivered(case.collective, rank, peer, length, root) for peer in peers]
        received = [oracle.delivered(case.collective, peer, rank, length, root) for peer in peers]
        same = case.collective in oracle.SAME
        return deliver(rank, group.hosts, sent, received, group.staging_bytes, same=same)
    return plan_for(
        cast(Collective, case.collective),
        rank=group.rank,
        hosts=group.hosts,
        numel=case.numel,
        itemsize=itemsize,
        average=case.average,
        root=root,
        settings=Settings(staging_bytes=group.staging_bytes),
    )


def execute(group: NativeGroup, plan: Plan, source: Array, target: Array, case: Case, way: int) -> None:
    """Runs a plan in one of the ways there are."""
    arguments = (plan, address(source), address(target), case.dtype, case.op)
    if way == 0:
        group.run(Request(*arguments, timeout_s=PATIENCE_S))
    elif way == 1:
        handle = group.submit(Request(*arguments, timeout_s=PATIENCE_S, priority=3))
        handle.wait()
        assert handle.done()
    else:
        ended = Ended()
        group.submit(Request(*arguments, timeout_s=PATIENCE_S)).on_done(ended)
        assert ended.wait() is None


def check(group: NativeGroup, case: Case, number: int) -> None:
    """One case on one rank, with the ranks' common data; `number` picks the way and the root."""
    n, rank, root = group.size, group.rank, number % group.size
    op = "AVG" if case.average else case.op.name
    unsigned = NUMPY[case.dtype].startswith("u")
    limits = (0, 2 if case.collective in oracle.REDUCING else 255) if unsigned else (-2, 2)
    inputs = oracle.inputs_of(case.collective, n, case.numel, op, root, limits=limits)
    expected = oracle.expected(case.collective, rank, inputs, case.numel, op, root)
    source = encode(inputs[rank], case.dtype)
    in_place = oracle.meaning(case.collective, rank, n, case.numel, root).in_place
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
    group.run(Request(plan, address(array), address(array), case.dtype, case.op, timeout_s=timeout_s))
    return array
