"""Orders of computations in pipelines: 1F1B, interleaved with any group size, breadth first (AIAO).

`ranks` is p, `microbatches` M, `chunks` v (stages per rank). Rank r holds stages r, r + p, ..., r + (v - 1) p.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..config import whole
from ..errors import ConfigError
from .actions import Action, Order


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """1F1B with a flush (PipeDream-Flush): rank r starts with p - 1 - r forwards, then alternates.

    Bubble (p - 1)(F + B). Keeps at most p - r micro-batches.
    """
    _check(ranks, microbatches, 1)
    order = []
    for rank in range(ranks):
        forwards = [Action("F", rank, microbatch) for microbatch in range(microbatches)]
        backwards = [Action("B", rank, microbatch) for microbatch in range(microbatches)]
        order.append(_alternate(forwards, backwards, ranks - 1 - rank))
    return order


def interleaved(ranks: int, microbatches: int, chunks: int, group: int | None = None) -> list[list[Action]]:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): groups of `group` micro-batches pass through all chunks.

    `group` is Megatron-Core's `microbatch_group_size_per_vp_stage`: p (None) is depth first, M is breadth first with
    1F1B inside the last chunk. Bubble (p - 1)(F + B) / v. Rank 0 keeps (v - 1) group + 2 (p - 1) + 1 chunks.

    Raises:
        ConfigError: `group` below p or above M, or a last group smaller than p (its ranks would wait in a circle).
    """
    _check(ranks, microbatches, chunks)
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    group = ranks if group is None else group
    if not ranks <= group <= microbatches or 0 < microbatches % group < ranks:
        raise ConfigError(
            f"group={group} does not fit {ranks} ranks and {microbatches} micro-batches; use {ranks} to {microbatches},"
            f" with no remainder below {ranks}"
        )
    passes = [
        (chunk, microbatch)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]
    order = []
    for rank in range(ranks):
        forwards = [Action("F", rank + chunk * ranks, microbatch) for chunk, microbatch in passes]
        backwards = [Action("B", rank + (chunks - 1 - chunk) * ranks, microbatch) for chunk, microbatch in passes]
        order.append(_alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * group))
    return order


def breadth_first(ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """AIAO (Fold3D), LoopedBFS (arXiv 2211.05953): all forwards of a chunk, then the next; backward mirrors it.

    Bubble (p - 1)(F + B) / v for M >= p. Keeps all M v chunks. With p = M = 1, a model of v layers under DDP.
    """
    _check(ranks, microbatches, chunks)
    passes = [(chunk, microbatch) for chunk in range(chunks) for microbatch in range(microbatches)]
    return [
        [Action("F", rank + chunk * ranks, microbatch) for chunk, microbatch in passes]
        + [Action("B", rank + chunk * ranks, microbatch) for chunk, microbatch in reversed(passes)]
        for rank in range(ranks)
    ]


def recomputed(order: Order, ranks: Container[int]) -> list[list[Action]]:
    """`order`, where these ranks repeat each forward (R) right before its backward: R waits for no gradient."""
    found = []
    for rank, actions in enumerate(order):
        repeats = ("B", "I") if rank in ranks else ()
        pairs = (
            [action._replace(kind="R"), action] if action.kind in repeats and action.part == 0 else [action]
            for action in actions
        )
        found.append([action for pair in pairs for action in pair])
    return found


def sliced(actions: Sequence[Action], slices: int) -> list[Action]:
    """One rank's actions, with each F as those of the slices of its sequences, and each B as theirs in reverse.

    Micro-batch m becomes m slices, ..., m slices + slices - 1 (TeraPipe, arXiv 2102.07988; 1F1B so is close to
    Seq1F1B, arXiv 2406.03488). Actions other than F and B go. The bubble of n slices of equal time is a nth.
    """
    order = []
    for action in actions:
        if action.kind in ("F", "B"):
            first = action.microbatch * slices
            numbers = range(first, first + slices)
            order += [
                action._replace(microbatch=number) for number in (numbers if action.kind == "F" else numbers[::-1])
            ]
    return order


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def _check(ranks: int, microbatches: int, chunks: int) -> None:
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if whole(value, 0) < 1:
            raise ConfigError(f"{name}={value} is not valid; give a whole number of at least 1")
