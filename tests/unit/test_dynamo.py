"""Code that torch.compile leaves alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.dynamo import uncompiled, untraced

seen: list[bool] = []


@untraced
def noted(values: Tensor) -> Tensor:
    seen.append(torch.compiler.is_compiling())
    return values


def program(values: Tensor) -> Tensor:
    return noted(values + 1) * 2


def test_an_untraced_function_runs_in_each_call_between_two_graphs() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    seen.clear()
    compiled = torch.compile(program, backend=backend)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert seen == [False] * 3
    assert len(graphs) == 2


def test_a_single_graph_is_an_error_that_names_us() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="commlayer communicates here"):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2))


def test_uncompiled_ends_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile sets the flag while it traces."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with uncompiled():
        assert not torch.compiler.is_compiling()
    assert torch.compiler.is_compiling()
