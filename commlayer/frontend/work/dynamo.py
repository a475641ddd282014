"""`untraced`: keeps torch.compile away from our process group.

C++ calls the process group in the middle of compiled code: DDP from backward, functional collectives from code that
Inductor made. Dynamo takes such a Python frame for a part of the user's program and tries to compile it.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

T = TypeVar("T")


def untraced(kind: T) -> T:
    """A decorator: Dynamo runs this function, or this class's methods, and everything they call, uncompiled.

    `torch.compiler.disable` does the same, but costs a microsecond per call, and a second to import.
    """
    functions = [kind] if isinstance(kind, FunctionType) else vars(kind).values()
    for function in functions:
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return kind
