"""`NativeHandle`: one operation of a `NativeGroup` in flight."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import OperationTimeoutError
from . import base
from .status import ffi, lib

if TYPE_CHECKING:
    from .call import Call
    from .group import NativeGroup

LONGEST_US = 1 << 63
LONGEST_S = LONGEST_US / 1e6
"""The longest timeout: the engine has 64 bits."""


class NativeHandle:
    """A `base.Handle`: one operation in flight."""

    __slots__ = ("_call", "_group", "_operation")

    def __init__(self, group: NativeGroup, operation: Any, call: Call | None) -> None:
        self._group = group
        self._call = call
        self._operation = ffi.gc(operation, lib.cl_operation_release)

    def done(self) -> bool:
        status = lib.cl_operation_status(self._operation)
        if status == lib.CL_OK:
            self._call = None  # see `wait`
        return bool(status != lib.CL_EAGAIN) or self._group.is_inherited

    def failed(self) -> bool:
        has_failed = lib.cl_operation_status(self._operation) not in (lib.CL_OK, lib.CL_EAGAIN)
        if has_failed:
            self._group.fail_other()  # its other end may run a part of the same operation
        return has_failed or self._never_ends()

    def _never_ends(self) -> bool:
        """Whether it was in flight when this process was forked: no thread of this process will end it."""
        return self._group.is_inherited and lib.cl_operation_status(self._operation) == lib.CL_EAGAIN

    def wait(self, timeout_s: float | None = None) -> None:
        if self._group.is_inherited and self._never_ends():
            raise self._group.error(lib.CL_ECLOSED, self._call)
        if timeout_s is None:
            status = lib.cl_operation_wait(self._operation, 0)
        elif timeout_s <= 0:
            status = lib.cl_operation_status(self._operation)
        else:
            status = lib.cl_operation_wait(self._operation, timeout_us_of(timeout_s))
        if status == lib.CL_EAGAIN:
            call = self._call
            raise OperationTimeoutError(
                f"{self._group.who}: {call.title() if call else 'the operation'} is still in flight after "
                f"{timeout_s:g} s; wait longer, or abort the group"
            )
        if status != 0:
            raise self._group.error(status, self._call)
        self._call = None  # no error needs it; it has this handle: both would live until Python looks for cycles

    def missing(self) -> list[tuple[int, int]]:
        count = lib.cl_operation_missing(self._operation, ffi.NULL, 0)
        if count < 0:
            self.wait(0.0)  # raises
        ranges = ffi.new("struct cl_range[]", count)
        lib.cl_operation_missing(self._operation, ranges, count)
        return [(part.start, part.end - part.start) for part in ranges]

    def times(self) -> base.Times | None:
        times = ffi.new("struct cl_operation_times *")
        if lib.cl_operation_times(self._operation, times) != 0:
            return None
        first_byte_s = times.first_us / 1e6 if times.first_us else None
        return base.Times(times.submitted_us / 1e6, first_byte_s, times.ended_us / 1e6)

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `base.Handle.on_done`; at most one callback per handle."""

        def ended(status: int) -> None:
            error = None if status == 0 else self._group.error(status, self._call)
            if status == lib.CL_OK:
                self._call = None  # see `wait`
            callback(error)

        if self._never_ends():
            ended(lib.CL_ECLOSED)
            return
        status = self._group.engine.notify(self._operation, ended)
        if status != lib.CL_EAGAIN:
            ended(status)


class NativeReceiveHandle(NativeHandle):
    """A `base.ReceiveHandle`: one receive in flight."""

    __slots__ = ()

    @property
    def source(self) -> int:
        rank = ffi.new("uint32_t *")
        status = lib.cl_operation_source(self._operation, rank)
        if status == lib.CL_EAGAIN:
            raise RuntimeError("the receive is still in flight and has no source yet; wait for it first")
        if status != 0:
            raise self._group.error(status, self._call)
        return int(rank[0])


@functools.lru_cache
def timeout_us_of(timeout_s: float) -> int:
    """The timeout as the engine takes it: 0 would mean none."""
    timeout_us = int(timeout_s * 1e6) if timeout_s < LONGEST_S else LONGEST_US
    return timeout_us if timeout_us > 0 else 1
