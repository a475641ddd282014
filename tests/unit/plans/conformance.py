"""One way to check any collective: run all ranks' plans on random data and compare with the oracle."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import FIELDS, INSTANTS, Buffer, Plan, StepKind
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op
from tests import oracle
from tests.unit.plans import interpreter

RECEIVES = (StepKind.RECV_COPY, StepKind.RECV_REDUCE)
NETWORK = (StepKind.SEND, *RECEIVES)
READS = (StepKind.SEND, StepKind.COPY, StepKind.REDUCE)
WRITES = (*RECEIVES, StepKind.COPY, StepKind.REDUCE, StepKind.SCALE)

Array = np.ndarray[Any, np.dtype[Any]]


def check_structure(plans: Sequence[Plan], inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Checks plans without their data: messages have both ends, ranges lie in their buffers, counts add up."""
    sends: dict[tuple[int, int, int], int] = {}
    receives: dict[tuple[int, int, int], int] = {}
    for rank, plan in enumerate(plans):
        assert (plan.rank, plan.world_size) == (rank, len(plans))
        posts = plan.steps["message"][plan.steps["kind"] == StepKind.POST].tolist()
        assert posts == [*range(1, len(posts)), plan.posts] or posts == [*range(1, len(posts) + 1)]
        assert plan.posts == plans[0].posts == max(posts, default=0)
        assert plan.staging_bytes <= max(plan.staging_bytes for plan in plans)
        sizes = {Buffer.INPUT: inputs[rank].nbytes, Buffer.OUTPUT: outputs[rank].nbytes}
        sizes |= {Buffer.SCRATCH: plan.scratch_bytes, Buffer.STAGING: plan.staging_bytes}
        named = plan.successors.tolist()
        dependencies = Counter(named)
        for index, step in enumerate(plan.steps[FIELDS].tolist()):
            kind, peer, source, target, source_offset, target_offset, length, message = step[:8]
            assert step[8] == dependencies[index]
            assert all(successor > index for successor in named[step[9] : step[9] + step[10]])
            assert (length > 0) == (kind not in INSTANTS) or (
                not length and kind in (StepKind.SEND, StepKind.RECV_COPY)
            )
            if kind == StepKind.SEND:
                sends[rank, peer, message] = length
            elif kind in RECEIVES:
                receives[peer, rank, message] = length
            if kind in NETWORK:
                assert peer != rank
                assert length <= 16 << 20
            if kind in READS:
                assert source_offset + length <= sizes[source]
            if kind in WRITES:
                assert target_offset + length <= sizes[target]
                assert target != Buffer.INPUT or plan.partial
    assert sends == receives


def data(n: int, numel: int, op: Op, dtype: str, seed: int) -> list[Array]:
    """One random array per rank. Floats are such that a different order of addition gives different bits."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        bound = 3 if op == Op.PRODUCT else 999
        return [rng.integers(-bound, bound, numel).astype(dtype) for _ in range(n)]
    return [(rng.normal(size=numel) + 2).astype(dtype) for _ in range(n)]


def same(actual: Array, expected: Array) -> None:
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(actual, expected, rtol=1e-4 if expected.dtype == np.float32 else 1e-12, atol=1e-6)
    else:
        np.testing.assert_array_equal(actual, expected)


def conform(
    collective: str,
    make: Callable[[int], Plan],
    n: int,
    numel: int,
    *,
    op: Op = Op.SUM,
    average: bool = False,
    dtype: str = "f8",
    root: int = 0,
    in_place: bool = False,
    seed: int = 0,
) -> list[Array]:
    """Runs the plans `make(rank)` of all ranks and checks everything that the collective promises; returns the outputs.

    `in_place`: the smaller of INPUT and OUTPUT is this rank's part of the larger. Bitwise operators are tried on
    integers as long as the floats asked for.
    """
    if op.name in oracle.BITWISE:
        dtype = dtype.replace("f", "i")
    plans = [make(rank) for rank in range(n)]
    meanings = [oracle.meaning(collective, rank, n, numel, root) for rank in range(n)]
    originals = data(n, meanings[0].input_length, op, dtype, seed)
    inputs = [original.copy() for original in originals]
    outputs = inputs if meanings[0].in_place else [np.zeros(meaning.output_length, dtype) for meaning in meanings]
    own = [slice(rank * numel, (rank + 1) * numel) for rank in range(n)]
    if in_place and collective == "reduce_scatter":
        outputs = [inputs[rank][own[rank]] for rank in range(n)]
    elif in_place and collective == "all_gather":
        inputs = [outputs[rank][own[rank]] for rank in range(n)]
        for array, original in zip(inputs, originals, strict=True):
            array[:] = original
    check_structure(plans, [np.zeros(0, dtype)] * n if meanings[0].in_place else inputs, outputs)
    interpreter.run(plans, inputs, outputs, op, seed=seed)
    name = "AVG" if average else op.name
    for rank, means in enumerate(meanings):
        expected = oracle.output_of(means, originals[rank], originals, name)
        if any(clause.rank == oracle.ALL for clause in means.clauses):
            same(outputs[rank], expected)
        else:
            np.testing.assert_array_equal(outputs[rank], expected)
        if collective == "all_reduce":
            assert outputs[rank].tobytes() == outputs[0].tobytes()
        if not means.in_place:
            unchanged = originals[rank].copy()
            if in_place and collective == "reduce_scatter":
                unchanged[own[rank]] = outputs[rank]
            np.testing.assert_array_equal(inputs[rank], unchanged)
    return outputs


TENSORS: dict[str, Any] = {
    "op": st.sampled_from(Op),
    "dtype": st.sampled_from(("f4", "f8", "i4")),
    "average": st.booleans(),
    "in_place": st.booleans(),
    "seed": st.integers(0, 1 << 30),
}
"""Strategies for the keyword arguments of `conform_all`."""


def conform_all(
    algorithm: ModuleType,
    where: int | Hosts,
    numel: int,
    settings: Settings,
    *,
    op: Op = Op.SUM,
    dtype: str = "f8",
    average: bool = False,
    in_place: bool = False,
    seed: int = 0,
) -> None:
    """Checks each collective that an algorithm has, for a number of ranks or for hosts; sums alone are averaged."""
    n, itemsize = where if isinstance(where, int) else sum(map(len, where)), int(dtype[1])
    average = average and op == Op.SUM
    divisor, root = n if average else 1, seed % n
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (divisor, settings),
        "exchange": (divisor,),
        "reduce": (divisor, root, settings),
        "broadcast": (root, settings),
        "reduce_scatter": (divisor, settings),
        "all_gather": (settings,),
    }
    for name, last in arguments.items():
        builder = getattr(algorithm, name, None)
        if builder is not None:
            divided = name in ("reduce_scatter", "all_gather")
            length = numel // n if divided else numel
            conform(
                "all_reduce" if name == "exchange" else name,
                partial(_plan_of_rank, builder, where, (length, itemsize, *last)),
                n,
                length,
                op=op,
                average=average and name in (*oracle.REDUCING, "exchange"),
                dtype=dtype,
                root=root,
                in_place=in_place and divided,
                seed=seed,
            )


def _plan_of_rank(builder: Callable[..., Plan], where: int | Hosts, arguments: tuple[Any, ...], rank: int) -> Plan:
    return builder(rank, where, *arguments)


def barrier_holds(make: Callable[[int], Plan], n: int, seed: int = 0) -> None:
    """No rank ends before all have begun: with any one rank missing, no other one gets through."""
    plans = [make(rank) for rank in range(n)]
    nothing = [np.zeros(0, "f4") for _ in range(n)]
    check_structure(plans, nothing, nothing)
    interpreter.run(plans, nothing, nothing, Op.SUM, seed=seed)
    for missing in range(n):
        state = interpreter.Interpreter(plans, nothing, nothing, Op.SUM, seed)
        state.dependencies[missing] = [count + 1 for count in state.dependencies[missing]]
        with pytest.raises(RuntimeError, match="never ended"):
            state.run()
        assert all(any(left) for left in state.left)


@st.composite
def weights(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Weights of so many hosts; half of the time none. Some hosts may own nothing, and one may own all."""
    drawn = draw(st.one_of(st.just(()), st.tuples(*[st.integers(0, 32)] * count)))
    return drawn if any(drawn) else ()


def outcomes(make: Callable[[int], Plan], n: int, numel: int) -> int:
    """How many different results an all-reduce of the same float32 data has in differently ordered runs."""
    plans = [make(rank) for rank in range(n)]
    seen = set()
    for seed in range(10):
        replicas = data(n, numel, Op.SUM, "f4", seed=1)
        interpreter.run(plans, replicas, replicas, Op.SUM, seed=seed)
        seen.add(replicas[0].tobytes())
    return len(seen)
