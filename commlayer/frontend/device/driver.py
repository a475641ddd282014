"""`Driver`: the functions of libcuda that torch lacks: a stream writes a word of host memory, or waits for one.

The library is opened when the first CUDA tensor comes, so machines without it need none. ctypes releases the
interpreter's lock during each call.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ...errors import CommError

LIBRARY = "libcuda.so.1"

CU_STREAM_WRITE_VALUE_DEFAULT = 0
"""All writes that precede it in the stream can be seen once the word can."""

CU_STREAM_WAIT_VALUE_GEQ = 0
"""The wait ends once the word, less the value, is at least 0 as a signed number."""


class DriverError(CommError):
    """The CUDA driver lacks a function, or refuses a call."""


class Driver:
    """The CUDA driver of this machine. Raises DriverError without a driver that has these functions (CUDA 11.7)."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"{library}: {error}; install the driver of NVIDIA") from error
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        device_pointer = ctypes.POINTER(ctypes.c_uint64)
        self._device_pointer = self._function("cuMemHostGetDevicePointer_v2", device_pointer, pointer, number)
        self._wait_value = self._function("cuStreamWaitValue32_v2", pointer, ctypes.c_uint64, number, number)
        self._write_value = self._function("cuStreamWriteValue32_v2", pointer, ctypes.c_uint64, number, number)
        self._error_name = self._function("cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def wait_value(self, stream: int, word: int, value: int) -> None:
        """Lets later work of a CUstream wait until the word at the address `word` is at least `value`.

        The word is a uint32 in pinned host memory. The stream's device is the current one of this thread.
        """
        result = self._wait_value(stream, self._address(word), value, CU_STREAM_WAIT_VALUE_GEQ)
        self._check(result, "cuStreamWaitValue32")

    def write_value(self, stream: int, word: int, value: int) -> None:
        """Lets a CUstream write `value` to the word at the address `word`, behind all its work so far.

        The word and the device are as for `wait_value`.
        """
        result = self._write_value(stream, self._address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT)
        self._check(result, "cuStreamWriteValue32")

    def _address(self, word: int) -> ctypes.c_uint64:
        """The address of pinned memory on the device."""
        address = ctypes.c_uint64()
        self._check(self._device_pointer(ctypes.byref(address), word, 0), "cuMemHostGetDevicePointer")
        return address

    def _function(self, name: str, *arguments: Any) -> Any:
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise DriverError(f"{self._library} has no {name}; install a driver of CUDA 11.7 or later") from None
        function.argtypes, function.restype = arguments, ctypes.c_int
        return function

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            name = ctypes.c_char_p()
            self._error_name(result, ctypes.byref(name))
            raise DriverError(f"{what}: {(name.value or b'unknown error').decode()} ({result})")
