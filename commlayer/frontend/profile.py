"""Our collectives in torch's profiler, named like those of other backends: `commlayer:all_reduce`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Work
from torch.autograd.profiler import record_function

T = TypeVar("T")
P = ParamSpec("P")
WorkT = TypeVar("WorkT", bound=Work | None)


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
