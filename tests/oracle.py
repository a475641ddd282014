"""The oracle: the one description of each collective, for the tests of all layers and for the simulator.

A collective gives each rank clauses: "this part of the output is that part of one rank's input", or of the reduction
of all ranks' inputs. Lengths count elements; the simulator counts bytes. Only numpy is needed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ALL = 0xFFFFFFFF
"""Stands for a rank: the reduction over all ranks."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_uneven")
DELIVERIES = ("all_to_all", "all_to_all_uneven", "all_gather_uneven", "gather", "scatter")
SAME = ("all_gather_uneven", "gather")
"""Deliveries in which a rank sends the same elements to each of its receivers."""

BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
REDUCTIONS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    **BITWISE,
}
PREMULTIPLIER = 2


class Clause(NamedTuple):
    """`length` elements of a rank's output, from `target` on, and the same number of `rank`'s input, from `source`."""

    target: int
    source: int
    length: int
    rank: int


class Meaning(NamedTuple):
    """One rank's part in a collective. In place, output and input are one. Elements without a clause do not change."""

    input_length: int
    output_length: int
    in_place: bool
    clauses: list[Clause]


def uneven(rank: int, numel: int, root: int = 0) -> int:
    """The length that belongs to a rank where the ranks' lengths differ; sometimes 0."""
    return numel * ((rank + root) % 3)


def delivered(collective: str, source: int, target: int, numel: int, root: int = 0) -> int:
    """The number of elements that a delivery moves from one rank to another."""
    match collective:
        case "gather":
            return numel if target == root else 0
        case "scatter":
            return numel if source == root else 0
        case "all_gather_uneven":
            return uneven(source, numel, root)
        case "all_to_all_uneven":
            return uneven(source + 2 * target, numel, root)
    return numel


def meaning(collective: str, rank: int, size: int, numel: int, root: int = 0) -> Meaning:
    """`numel` is the length of the tensor, or of each part where the tensor is divided among the ranks."""
    match collective:
        case "all_reduce":
            return Meaning(numel, numel, True, [Clause(0, 0, numel, ALL)])
        case "reduce":
            return Meaning(numel, numel, True, [Clause(0, 0, numel, ALL)] if rank == root else [])
        case "broadcast":
            return Meaning(numel, numel, True, [Clause(0, 0, numel, root)])
        case "reduce_scatter" | "reduce_scatter_uneven":
            parts = [uneven(member, numel, root) if collective.endswith("uneven") else numel for member in range(size)]
            return Meaning(sum(parts), parts[rank], False, [Clause(0, sum(parts[:rank]), parts[rank], ALL)])
        case "all_gather":
            return Meaning(numel, size * numel, False, [Clause(r * numel, 0, numel, r) for r in range(size)])
        case "barrier":
            return Meaning(0, 0, True, [])
    if collective not in DELIVERIES:
        raise ValueError(f"{collective!r} is no collective that {__name__} describes: add its meaning there")
    lengths = [[delivered(collective, source, target, numel, root) for target in range(size)] for source in range(size)]
    return delivery(rank, lengths, same=collective in SAME)


def delivery(rank: int, lengths: Sequence[Sequence[int]], *, same: bool) -> Meaning:
    """`lengths[source][target]` moves from source to target; `same`: a source has one tensor for all targets."""
    got = [row[rank] for row in lengths]
    clauses = [Clause(sum(got[:r]), 0 if same else sum(row[:rank]), got[r], r) for r, row in enumerate(lengths)]
    return Meaning(max(lengths[rank]) if same else sum(lengths[rank]), sum(got), False, clauses)


def reduced(parts: Sequence[Array], op: str) -> Array:
    """The reduction of one array of each rank, in their type. An average of integers is rounded towards zero."""
    total: Array = REDUCTIONS[op].reduce(np.stack(parts), axis=0).astype(parts[0].dtype)
    if op == "PREMUL_SUM":
        return total * PREMULTIPLIER
    if op != "AVG":
        return total
    mean: Array = total / len(parts)
    return mean if total.dtype.kind == "f" else np.trunc(mean).astype(total.dtype)


def output_of(means: Meaning, own: Array, inputs: Sequence[Array], op: str = "SUM") -> Array:
    """The output of a rank with this meaning and its own input, from the inputs of all ranks."""
    output = own.copy() if means.in_place else np.empty(means.output_length, own.dtype)
    for target, source, length, owner in means.clauses:
        parts = [values[source : source + length] for values in (inputs if owner == ALL else [inputs[owner]])]
        output[target : target + length] = reduced(parts, op) if owner == ALL else parts[0]
    return output


def expected(collective: str, rank: int, inputs: Sequence[Array], numel: int, op: str = "SUM", root: int = 0) -> Array:
    """A rank's output of a collective, from the inputs of all ranks."""
    return output_of(meaning(collective, rank, len(inputs), numel, root), inputs[rank], inputs, op)


def inputs_of(
    collective: str,
    size: int,
    numel: int,
    op: str = "SUM",
    root: int = 0,
    *,
    limits: tuple[int, int] = (-2, 2),
) -> list[npt.NDArray[np.int64]]:
    """An input for each rank: whole numbers so small that every type holds every reduction of them exactly."""
    generator = np.random.default_rng([size, numel])
    inputs = []
    for rank in range(size):
        length = meaning(collective, rank, size, numel, root).input_length
        values = generator.integers(*limits, length, endpoint=True)
        if op == "PRODUCT" and limits[1] > 1:
            values[values == 0] = 1
        inputs.append(values * (size if op == "AVG" else 1))
    return inputs
