"""gloo as the oracle: the same program on both backends must give the same numbers on every rank.

def body(rank: int, size: int) -> Any: ...      # at module level; within a process group; returns tensors, numbers
same_as_gloo(body, 2)
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map

from tests import ranks


def same_as_gloo(
    body: Callable[..., Any], size: int, *args: Any, environ: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> list[Any]:
    """Runs `body(rank, size, *args)` on gloo and on commlayer and compares; returns the results, by rank."""
    expected, results = (
        ranks.run(_on, size, backend, body, args, environ=environ, timeout_s=timeout_s)
        for backend in ("gloo", "commlayer")
    )
    assert_same(results, expected)
    return results


def assert_same(results: Any, expected: Any) -> None:
    """Raises AssertionError unless both have one structure, and equal leaves up to float32's rounding."""
    (leaves, structure), (expected_leaves, expected_structure) = tree_flatten(results), tree_flatten(expected)
    assert structure == expected_structure
    for index, (leaf, other) in enumerate(zip(leaves, expected_leaves, strict=True)):
        if isinstance(leaf, float):
            assert leaf == pytest.approx(other, rel=1e-5, abs=1e-6), f"leaf {index} of {len(leaves)}"
        else:
            assert leaf == other, f"leaf {index} of {len(leaves)}"


def _on(rank: int, size: int, backend: str, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    ranks.init(rank, size, backend)
    torch.manual_seed(7)
    result = tree_map(plain, body(rank, size, *args))
    dist.barrier()
    dist.destroy_process_group()
    return result


def plain(value: Any) -> Any:
    """A value for a pipe: a tensor would share its memory with a process that has ended."""
    return value.detach().float().tolist() if isinstance(value, torch.Tensor) else value
