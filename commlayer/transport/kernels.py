"""Kernels of the engine by themselves: codecs, selections of the largest values, differences, and instruction sets."""

from __future__ import annotations

from ..errors import ConfigError
from .status import check, ffi, lib


def encode(codec: int, target: int, source: int, count: int, *, key: int = 0, block: int = 0) -> None:
    """Encodes `count` float32 values at the address `source` with the codec of this number (`plans.codec`), as the
    engine does. `key` and `block`, the number of the first block, choose the rotations."""
    target, source = ffi.cast("void *", target), ffi.cast("float *", source)
    check(lib.cl_encode(codec, target, source, count, key, block), f"encoding with codec {codec}")


def decode(
    codec: int, target: int, source: int, count: int, *, key: int = 0, block: int = 0, add: bool = False
) -> None:
    """Decodes `count` float32 values into the address `target`; with `add`, adds them to the values there."""
    target, source = ffi.cast("float *", target), ffi.cast("void *", source)
    check(lib.cl_decode(codec, target, source, count, key, block, add), f"decoding with codec {codec}")


def codec_key(key: int, rank: int) -> int:
    """The key of the blocks that a rank encodes, in an operation that was submitted with `codec_key=key`."""
    return int(lib.cl_codec_key(key, rank))


def select_largest(values: int, count: int, k: int, indices: int, chosen: int) -> None:
    """Writes the `k` values of largest magnitude among the `count` float32 values at the address `values` to `chosen`,
    and their indices, uint32 and ascending, to `indices`. NaN is larger than infinity."""
    source, places, target = ffi.cast("float *", values), ffi.cast("uint32_t *", indices), ffi.cast("float *", chosen)
    check(lib.cl_select_largest(source, count, k, places, target), f"selecting {k} of {count} values")


def kernel_levels() -> list[str]:
    """The instruction sets that this CPU has and the kernels can use, best first."""
    used = lib.cl_kernels_level()
    found = [name for name in ("avx512", "avx2", "scalar") if lib.cl_kernels_select(name.encode()) == 0]
    lib.cl_kernels_select(used)
    return found


def kernels_level() -> str:
    """The instruction set of the kernels in use."""
    return str(ffi.string(lib.cl_kernels_level()).decode())


def select_kernels(level: str) -> None:
    """Uses the kernels of one of `kernel_levels()`, in all threads, for tests and measurements."""
    if lib.cl_kernels_select(level.encode()) != 0:
        raise ConfigError(f"kernels of level {level!r}: this CPU lacks it; choose from {', '.join(kernel_levels())}")


def encode_difference(base: int, values: int, count: int, value_bytes: int, code: int, capacity: int) -> int | None:
    """Writes the code of the difference of `count` values to those at the address `base`, of 1, 2, 4 or 8 bytes each,
    to `code`, and returns its bytes; None if it needs more than about `capacity` bytes."""
    source, target = ffi.cast("void *", base), ffi.cast("void *", code)
    length = lib.cl_difference_encode(source, ffi.cast("void *", values), count, value_bytes, target, capacity)
    if length == lib.CL_EAGAIN:
        return None
    check(min(length, 0), f"the difference of {count} values of {value_bytes} bytes")
    return int(length)


def apply_difference(
    values: int, count: int, value_bytes: int, code: int, length: int, *, is_back: bool = False
) -> bool:
    """Turns the base, at the address `values`, into the values whose difference was encoded; with `is_back`, those
    values into the base. False: these bytes are no code of `count` such values, and the memory has no meaning now."""
    target, source = ffi.cast("void *", values), ffi.cast("void *", code)
    return bool(lib.cl_difference_apply(target, count, value_bytes, source, length, is_back) == lib.CL_OK)


def sums(memory: int, length: int, key: int, target: int) -> None:
    """Writes two uint64 sums of each 64 KiB at the address `memory` to `target`; `key`: 512 random uint32."""
    source, words = ffi.cast("void *", memory), ffi.cast("uint32_t *", key)
    lib.cl_sums(source, length, words, ffi.cast("uint64_t *", target))
