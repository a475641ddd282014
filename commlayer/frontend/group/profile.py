"""Our collectives in torch's profiler: `commlayer:all_reduce`, named like those of other backends, with an event
`commlayer:record_param_comms` inside, whose arguments are those that Kineto, HTA and torch's trace validator expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Work
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import record_function

from ...transport.call import Call

T = TypeVar("T")
P = ParamSpec("P")
WorkT = TypeVar("WorkT", bound=Work | None)
StartT = TypeVar("StartT", bound=Callable[..., Any])

EVENT = "commlayer:record_param_comms"
"""torch's own backends name it without a prefix, and attach the arguments to the thread in C++ (ParamCommsDebugInfo).
Python cannot do that, and torch 2.13 crashes if an event of that name lacks them. So tools that look for the name need
it renamed in the exported trace, and torch.profiler.ExecutionTraceObserver records the event without arguments."""

NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv",
    "receive": "recv",
}
"""The names that NCCL's collectives have in traces, where they differ from ours."""

DTYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
"""The names of c10::ScalarType; others are shown as torch names them, such as float8_e5m2."""


def profiled(start: Callable[Concatenate[T, P], WorkT]) -> Callable[Concatenate[T, P], WorkT]:
    """A decorator: while a profiler runs, records the operation that `start` starts as `commlayer:<name of start>`."""
    title = f"commlayer:{start.__name__}"

    @wraps(start)
    def call(self: T, *args: P.args, **kwargs: P.kwargs) -> WorkT:
        if not _profiler_enabled():
            return start(self, *args, **kwargs)
        with record_function(title) as record:
            work = start(self, *args, **kwargs)
            if work is not None:
                record._call_end_callbacks_on_future(work.get_future())
        return work

    return call  # type: ignore[return-value]  # the first argument of `call` has a name


class CommsProfile:
    """The events of one group."""

    def __init__(self, name: str, describe: Callable[[], str], ranks: Sequence[int], rank: int) -> None:
        """`ranks`: of the job, by rank of the group."""
        self._describe = describe
        self._ranks = ranks
        self._group: dict[str, Any] = {
            "Process Group Name": name,
            "Process Group Ranks": str(list(ranks)),
            "Group size": len(ranks),
            "Rank": rank,
            "Global rank start": ranks[0],
            "Global rank stride": stride(ranks),
        }

    def recorded(self, call: Call, start: StartT) -> StartT:
        """`start`, or while a profiler runs a function with the event of a call, which lasts as long as `start`."""
        if not _profiler_enabled():
            return start

        def recorded(*args: Any, **named: Any) -> Any:
            with _RecordFunctionFast(EVENT, (), self.metadata(call)):
                return start(*args, **named)

        return recorded  # type: ignore[return-value]  # it takes and returns what `start` does

    def metadata(self, call: Call) -> dict[str, Any]:
        """The arguments of the event, as libkineto names them."""
        inputs, outputs = ([math.prod(shape) for shape in shapes] for shapes in (call.inputs, call.outputs))
        found = {
            "Collective name": NAMES.get(call.name, call.name),
            "dtype": DTYPES.get(call.dtype, str(call.dtype).removeprefix("torch.")) if call.dtype else "Byte",
            "In msg nelems": sum(inputs),
            "Out msg nelems": sum(outputs),
            "In split size": str(inputs if len(inputs) > 1 else []),
            "Out split size": str(outputs if len(outputs) > 1 else []),
            "Process Group Description": self._describe(),
            "Seq": call.sequence,
            **self._group,
        }
        if call.is_message and call.rank is not None:
            found["Dst Rank" if call.name == "send" else "Src Rank"] = self._ranks[call.rank]
        return found


def stride(ranks: Sequence[int]) -> int:
    """The difference of ranks that follow each other; 0: there is one; -1: the differences vary."""
    steps = {after - before for before, after in pairwise(ranks)}
    return 0 if not steps else steps.pop() if len(steps) == 1 else -1
