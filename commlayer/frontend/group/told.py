"""`told_by_all`: what each rank of a group says, also of one that torch does not know; `done_by_all`: the same of what
each does; `divided`: the parts into which ranks say that they are divided."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...errors import CommError
from .backend import CommProcessGroup

DoneT = TypeVar("DoneT")


def told_by_all(group: CommProcessGroup, own: Any) -> list[Any]:
    """`own` of each rank, in the order of ranks. All ranks of the group call. Raises the errors of its operations.

    `dist.all_gather_object` does the same, but raises ValueError instead where torch does not know the group.
    """
    told = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    sizes = torch.empty(group.size(), dtype=torch.int64, device="cpu")
    group.all_gather_single(sizes, torch.tensor([len(told)], dtype=torch.int64, device="cpu")).wait()
    longest = int(sizes.max())
    rows = torch.empty(group.size(), longest, dtype=torch.uint8, device="cpu")
    group.all_gather_single(rows.view(-1), torch.nn.functional.pad(told, (0, longest - len(told)))).wait()
    pairs = zip(rows, sizes.tolist(), strict=True)
    return [pickle.loads(row[:size].numpy().data) for row, size in pairs]  # noqa: S301  # from the ranks of this job


def done_by_all(group: CommProcessGroup, do: Callable[[], DoneT]) -> list[DoneT]:
    """What `do` returns on each rank, in the order of ranks. All ranks of the group call. If it raises a CommError on
    some, all raise that of the first of them: so they go on together or not at all."""
    found: tuple[DoneT | None, CommError | None]
    try:
        found = do(), None
    except CommError as error:
        found = None, error
    told = told_by_all(group, found)
    for _, fault in told:
        if fault is not None:
            raise fault
    return [each for each, _ in told]


def divided(told: Sequence[Sequence[int]]) -> tuple[list[list[int]], bool]:
    """The parts of a job, of which each rank has told its own, by their first ranks; and whether each rank is in one
    part, and all have equally many."""
    parts = sorted({tuple(ranks) for ranks in told})
    is_equal = len({len(ranks) for ranks in parts}) == 1 and sum(map(len, parts)) == len(told)
    return [list(ranks) for ranks in parts], is_equal
