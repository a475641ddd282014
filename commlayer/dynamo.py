"""Code of ours that torch.compile leaves alone: `untraced`, and `uncompiled` for what must run as without it.

C++ calls the process group in the middle of compiled code: DDP from backward, functional collectives from code that
Inductor made. Dynamo takes such a Python frame for a part of the user's program and tries to compile it. It also traces
into our hooks of modules and optimizers when a compiled function of the user calls the model or `step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")


def untraced(kind: T) -> T:
    """A decorator: Dynamo runs this function, or this class's methods, and everything they call, uncompiled. A graph
    that Dynamo traces ends before such a call.

    `torch.compiler.disable` does the same, but costs a microsecond per call, and a second to import.
    """
    functions = [kind] if isinstance(kind, FunctionType) else vars(kind).values()
    for function in functions:
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
            # The strategy does not count for what Dynamo inlines while it traces. It does check this attribute.
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            function._torchdynamo_disable_msg = "commlayer communicates here"  # type: ignore[attr-defined]
    return kind


@contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which `torch.compiler.is_compiling()` is False, also while Dynamo traces. Dynamo may read a
    parameter whose step is due then, and the optimizer would make that step by other operations, with other bits."""
    was = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was
