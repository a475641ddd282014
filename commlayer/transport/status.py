"""The statuses of the engine as exceptions: `check`. Also `ffi` and `lib`, the compiled module, which only this one
imports: all others take both from here.
"""

from __future__ import annotations

from .._native import ffi as ffi
from .._native import lib as lib
from ..errors import (
    AbortedError,
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

ERRORS: dict[int, tuple[type[CommError], str]] = {
    lib.CL_EINVAL: (CommError, "this is a defect of commlayer; please report it"),
    lib.CL_ENOMEM: (CommError, "free memory, or use smaller buckets"),
    lib.CL_ESYSTEM: (CommError, "see the kernel's log and the limits of this process (ulimit -a)"),
    lib.CL_ETIMEDOUT: (
        OperationTimeoutError,
        (
            "a rank is late, is stuck, or made other calls: look at its log and its stacks, or raise the timeout of "
            "the group"
        ),
    ),
    lib.CL_EPEERLOST: (
        PeerLostError,
        (
            "look at that rank's log (did its script end before the others'?), and in its host's `dmesg` if it was "
            "killed without a word (out of memory); restart the job, or the group without it"
        ),
    ),
    lib.CL_EABORTED: (AbortedError, "look for the first error in the other ranks' logs"),
    lib.CL_ECLOSED: (ClosedError, "no operation may follow destroy_process_group"),
    lib.CL_EMISMATCH: (
        MismatchError,
        (
            "call the same operations in the same order on all ranks, with the same sizes, dtypes, priorities, and "
            "policy or tolerance"
        ),
    ),
    lib.CL_ENOLIBFABRIC: (
        ConfigError,
        "install libfabric1 and build commlayer with libfabric-dev (Debian, Ubuntu), or use COMMLAYER_WIRE=udp",
    ),
    lib.CL_ENODEVICE: (
        ConfigError,
        "`fi_info -t FI_EP_DGRAM` lists what libfabric has; choose with COMMLAYER_OFI_PROVIDER and COMMLAYER_IFNAME",
    ),
}


def check(status: int, what: str) -> None:
    """Raises the CommError for a native status other than 0."""
    if status != 0:
        kind, remedy = ERRORS.get(status, (CommError, "unknown status"))
        raise kind(f"{what}: {ffi.string(lib.cl_error_text(status)).decode()}; {remedy}")
