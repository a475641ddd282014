"""The interface of a transport, and the types shared with plans, loss and the frontend.

A `Group` is one communicator seen from one rank; it runs plans. `transport/group.py` is the real one; tests have fakes.
Nothing here imports torch or the compiled module.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..config import LOSS_BOUND_MAX as LOSS_BOUND_MAX

if TYPE_CHECKING:
    from ..plans.plan import Plan
    from .call import Call


class DType(enum.IntEnum):
    """Element types of the native kernels; values equal `enum cl_dtype`."""

    U8 = 0
    I8 = 1
    I16 = 2
    I32 = 3
    I64 = 4
    F16 = 5
    BF16 = 6
    F32 = 7
    F64 = 8
    U16 = 9
    U32 = 10
    U64 = 11


FLOATS = frozenset({DType.F16, DType.BF16, DType.F32, DType.F64})


class Op(enum.IntEnum):
    """Reductions; values equal `enum cl_op`. AVG is SUM with SCALE steps in the plan; bitwise ones take integers."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6


class Treatment(enum.IntEnum):
    """Treatments of contributions that were not counted; values equal `enum cl_treatment`."""

    FEEDBACK = 0
    RESCALE = 1
    ZERO = 2


ADAPTIVE_DEADLINE_US = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Qos:
    """Quality of service of partial steps. All ranks must pass equal values, except for the map at `protect`."""

    loss_bound: float
    """Share of each message's packets that may be missing at its end, 0 to LOSS_BOUND_MAX; the number of packets is
    rounded down."""
    treatment: Treatment = Treatment.FEEDBACK
    deadline_us: int = ADAPTIVE_DEADLINE_US
    """Microseconds after the start from which on a message within its loss bound does not wait for packets that
    stall. 0: no deadline."""
    protect: int = 0
    """Address of a map of INPUT, in words of 64 bits, a bit per `protect_bytes` bytes. Packets with a byte whose bit
    is set always arrive. The map must live as long as INPUT. 0: no packet is protected."""
    protect_bytes: int = 0


class Request(NamedTuple):
    """One operation: a plan, and the memory that it runs on."""

    plan: Plan
    source: int
    """Address of CL_INPUT."""
    target: int
    """Address of CL_OUTPUT."""
    dtype: DType
    op: Op
    timeout_s: float
    priority: int = 0
    """The class of service."""
    order: int = 0
    """Within a class, the network sends operations with a smaller order (16 bits) first."""
    qos: Qos | None = None
    """None: nothing is lost."""
    codec_key: int = 0
    """The same on all ranks: chooses the rotations of a plan that encodes."""
    gate: int = 0
    """Address of a word (uint32) that a device writes; the operation starts when it is not 0. 0: it starts at once."""
    done: int = 0
    """Address of a word that gets 1 at the end; after a failure the bytes of `target` are 0xFF, NaN, before. Or 0."""


class MessageRequest(NamedTuple):
    """One message, to another rank or from it."""

    address: int
    """Where the bytes are, or go."""
    length: int
    """The number of bytes; both ranks pass the same, which may be 0."""
    peer: int | None
    """The group rank that receives it, or sends it. None: it is received from any rank."""
    tag: int
    """0 to 2**32 - 2, the same on both ranks."""
    timeout_s: float
    priority: int = 0
    """The class of service. The sender chooses it: that of a receive has no effect."""
    gate: int = 0
    """The gate of a send: see `Request`."""
    done: int = 0
    """See `Request`."""


class Times(NamedTuple):
    """Times of one operation in seconds, on the clock of `time.monotonic()` (CLOCK_MONOTONIC)."""

    submitted_s: float
    first_byte_s: float | None
    """The first packet was sent or received, or memory of the host was first used. None: neither happened."""
    ended_s: float


class Handle(Protocol):
    """A submitted operation."""

    def done(self) -> bool:
        """True once the operation ended, well or not. Never blocks."""

    def failed(self) -> bool:
        """True once the operation ended with an error. Never blocks."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks without the GIL until the operation ended.

        Raises the operation's CommError if it failed, and OperationTimeoutError if `timeout_s` passed first; the
        operation itself goes on until its own timeout.
        """

    def missing(self) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the parts of INPUT that were not counted, ascending; once the operation ended
        well."""

    def times(self) -> Times | None:
        """Times of the operation once it ended, well or not; None before."""

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls `callback(error or None)` exactly once: on a completion thread, or at once if already done."""


class ReceiveHandle(Handle, Protocol):
    """A submitted receive."""

    @property
    def source(self) -> int:
        """Group rank of the sender; valid once the receive ended well."""


class Group(Protocol):
    """A communicator. All ranks must submit the same operations in the same order."""

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    """Group ranks by host, each host's ranks ascending, hosts ordered by their lowest rank."""
    interface: str
    """Name of this host's network interface that reaches the other ranks: loopback if all are on this host."""
    packet_bytes: int
    """Payload of the smallest full packet between two ranks."""
    largest_packet_bytes: int
    """Payload of the largest full packet between two ranks."""
    staging_bytes: int
    """Staging memory per rank that a plan may address with CL_STAGING."""

    on_left: Callable[[], None]
    """Called once, when the engine has left the group: it touches no memory of operations any more. While one thread
    closes the group, `abort` of another may return before that."""
    is_inherited: bool
    """Whether this process is a forked child of the one that made the group: all operations raise ClosedError."""

    @property
    def second(self) -> Group | None:
        """The end of the same group on a second engine, for a part of long operations: it fails and ends with this one.
        None: there is one engine."""

    @property
    def who(self) -> str:
        """This rank of the job and the group: the beginning of errors."""

    def check_process(self) -> None:
        """Raises ClosedError in a forked child of the process that made the group."""

    def submit(self, request: Request, call: Call | None = None) -> Handle:
        """Starts an operation. The caller keeps its memory alive until the handle is done. Errors describe `call`.

        Raises ConfigError for a `qos` that is out of range, for losses in anything but sums of floating-point numbers,
        and for codecs in anything but sums of float32.
        """

    def run(self, request: Request, call: Call | None = None) -> None:
        """Submits and waits in one call: the fast path of synchronous collectives, without `qos`, `order` and
        `codec_key`. Raises as `submit` and `Handle.wait` do."""

    def send(self, message: MessageRequest, call: Call | None = None) -> Handle:
        """Sends a message to a group rank, which receives it with the same tag. Errors describe `call`.

        Messages of one sender, receiver and tag are received in the order in which they were sent. With another length
        at the receiver the group fails with MismatchError. Sends and receives are independent of plans and of each
        other's order. The caller keeps the memory alive until the handle is done: then the receiver's engine has all of
        it. A small message may be done before the receive was called. Raises ConfigError if the peer is this rank or no
        rank of the group, or if the tag is out of range.
        """

    def receive(self, message: MessageRequest, call: Call | None = None) -> ReceiveHandle:
        """Receives the next message with this tag from its peer, or the first from any rank; otherwise as `send`."""

    def lost(self) -> list[int]:
        """The ranks whose processes this one has lost: those of this host as soon as they end, others where an
        operation has waited for them for the peer timeout."""

    farewell: Callable[[], str]
    """Returns, for errors, that the other ranks have excluded this one; an empty text: they have not."""

    on_failure: Callable[[], None]
    """It is called before an error of one of the group's operations is raised."""

    def rates(self) -> tuple[float, float]:
        """Bytes per second that this rank's interfaces have carried to other hosts, and from them, at best lately.
        0: not known."""

    def awaited(self) -> list[int]:
        """The ranks that the collectives in flight wait for."""

    def status(self) -> tuple[str, int | None]:
        """The reason for which the group failed, or "", and the culprit, if it is known."""

    def abort(self, reason: str) -> None:
        """Fails every operation in flight, here and on the peers, and releases the group. Idempotent, and nothing if
        the group is closed. An abort without a reason is no warning in the log: the caller wants it."""

    def close(self) -> None:
        """Releases the group; idempotent."""


class Store(Protocol):
    """The part of torch's Store by which ranks tell each other about failures and waits.

    Raises RuntimeError once the Store's process is gone; where that process is frozen, a call does not return."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
