"""The ranks of an exchange tell each other the facts of their calls: all of them refuse a call that does not fit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch.distributed as dist

from ...errors import ConfigError, MismatchError
from .exchange import who

FACTS = 2
"""The numbers of `facts`."""


def facts(kind: str, fault: str) -> list[int]:
    """What a rank tells the others: whether its arguments have a fault, and the kind of its rows."""
    return [int(bool(fault)), zlib.crc32(kind.encode())]


def check(group: dist.ProcessGroup, caller: str, kind: str, fault: str, heard: Sequence[Sequence[int]]) -> None:
    """`heard[r]` are the facts of rank r. Raises on every rank: the own fault as ConfigError, and that of another rank,
    or another kind, as MismatchError."""
    if fault:
        raise ConfigError(f"{who(group)}: {caller}: {fault}")
    kinds = [told for _, told in heard]
    usual = max(kinds, key=kinds.count)
    for rank, (is_faulty, own) in enumerate(heard):
        if is_faulty:
            text = f"rank {rank} of the group has refused its arguments; see its error"
            raise mismatch(group, caller, kind, rank, text)
        if own != usual:
            text = (
                f"the call of rank {rank} of the group is of another kind than that of rank {kinds.index(usual)}; make "
                f"types, widths, numbers of experts, codecs and the need of gradients equal"
            )
            raise mismatch(group, caller, kind, rank, text)


def mismatch(group: dist.ProcessGroup, caller: str, kind: str, culprit: int, text: str) -> MismatchError:
    """The error of a call of this kind on this rank; `culprit` is a rank of the group."""
    error = MismatchError(f"{who(group)}: {caller} of {kind}: {text}")
    error.rank, error.culprit = dist.get_rank(), dist.get_global_rank(group, culprit)
    error.operation = "all_to_all"
    return error
