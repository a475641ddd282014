"""A transport for tests of the frontends: the contract of `transport.base.Group`, without engine or plans.

`install()` puts it in the place of the native one. A collective gathers the inputs of all ranks with gloo and takes its
output from the oracle; a delivery is gloo's all-to-all. A test can make operations fail or hang.
"""

import ctypes
import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from commlayer.errors import CommError, OperationTimeoutError
from commlayer.frontend.group import backend, shares, submit
from commlayer.plans.delivery import Lengths
from commlayer.transport.base import DType, MessageRequest, Op, Request, Times
from commlayer.transport.bootstrap import Rendezvous
from tests import oracle, ranks

_TORCH = {
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.I16: torch.int16,
    DType.I32: torch.int32,
    DType.I64: torch.int64,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
    DType.U16: torch.uint16,
    DType.U32: torch.uint32,
    DType.U64: torch.uint64,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Stands for a plan: the arguments it was made for."""

    collective: str
    numel: int
    itemsize: int
    average: bool
    root: int

    weights: ClassVar[tuple[int, ...]] = ()
    steps: ClassVar = np.zeros(0)  # caches look at the size of plans
    successors: ClassVar = np.zeros(0)


@dataclasses.dataclass(frozen=True)
class Delivery:
    """Stands for the plan of a delivery."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    same: bool

    collective: ClassVar = "delivery"
    weights: ClassVar[tuple[int, ...]] = ()
    steps: ClassVar = np.zeros(0)
    successors: ClassVar = np.zeros(0)


class Message(NamedTuple):
    """A send or receive."""

    collective: str
    peer: int | None
    length: int
    tag: int


class FakeHandle:
    """One operation."""

    source = -1
    """The source of a receive that is done."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._times: Times | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def failed(self) -> bool:
        return self._ended.is_set() and self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._ended.wait(timeout_s):
            raise OperationTimeoutError(f"the operation did not end within {timeout_s} s")
        if self._error is not None:
            raise self._error

    def missing(self) -> list[tuple[int, int]]:
        return []

    def times(self) -> Times | None:
        return self._times if self._ended.is_set() else None

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)

    def end(self, error: BaseException | None, times: Times | None = None) -> None:
        with self._lock:
            self._error, self._times = error, times
            self._ended.set()
        for callback in self._callbacks:
            callback(error)


class FakeGroup:
    """A group. `failure`, when set, ends every later operation; `delay_s` comes before each."""

    staging_bytes = 0
    packet_bytes = largest_packet_bytes = 1432
    is_inherited = False
    second = None

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.who = f"rank {self.rank}"
        self.hosts = tuple((rank,) for rank in range(self.size))
        self.interface = "lo"
        self.on_failure: Callable[[], None] = lambda: None
        self.on_left: Callable[[], None] = lambda: None
        self.farewell: Callable[[], str] = str
        self.failure: CommError | None = None
        self.delay_s = 0.0
        self.operations: list[tuple[Call | Delivery | Message, float, int]] = []
        """Every call, its timeout and its priority."""
        self.orders: list[int] = []
        """The order of every asynchronous collective."""
        store = dist.PrefixStore("fake", rendezvous.store)
        self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=30))
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._messages: list[threading.Thread] = []

    def rates(self) -> tuple[float, float]:
        return 0.0, 0.0

    def awaited(self) -> list[int]:
        return []

    def lost(self) -> list[int]:
        return []

    def status(self) -> tuple[str, int | None]:
        return "", None

    def check_process(self) -> None:
        pass

    def submit(self, request: Request, call: Any = None) -> FakeHandle:  # noqa: ARG002
        """It loses nothing, whatever the request's `qos`."""
        plan: Any = request.plan
        self.operations.append((plan, request.timeout_s, request.priority))
        self.orders.append(request.order)
        handle = FakeHandle()

        def operation() -> None:
            time.sleep(self.delay_s)
            if self.failure is None:
                self._execute(plan, request.source, request.target, request.dtype, request.op)
            handle.end(self.failure)

        self._work.put(operation)
        return handle

    def run(self, request: Request, call: Any = None) -> None:  # noqa: ARG002
        self.submit(request).wait(request.timeout_s)

    def send(self, message: MessageRequest, call: Any = None) -> FakeHandle:  # noqa: ARG002
        address, length, to, tag, timeout_s, priority, *_ = message
        self.operations.append((Message("send", to, length, tag), timeout_s, priority))
        return self._message(lambda: self._gloo.send([_memory(address, length)], to, tag), self.rank)

    def receive(self, message: MessageRequest, call: Any = None) -> FakeHandle:  # noqa: ARG002
        address, length, source, tag, timeout_s, priority, *_ = message
        self.operations.append((Message("receive", source, length, tag), timeout_s, priority))
        memory = [_memory(address, length)]
        if source is None:
            return self._message(lambda: self._gloo.recv_anysource(memory, tag))
        return self._message(lambda: self._gloo.recv(memory, source, tag), source)

    def _message(self, start: Callable[[], Any], source: int | None = None) -> FakeHandle:
        handle = FakeHandle()
        work = start() if self.failure is None else None

        def finish() -> None:
            if work is not None:
                work.wait()
                handle.source = work._source_rank() if source is None else source
            handle.end(self.failure)

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        self._messages.append(thread)
        return handle

    def abort(self, reason: str) -> None:
        self.failure = CommError(reason or f"rank {self.rank} aborted its process group")

    def close(self) -> None:
        self._work.put(None)
        for thread in [self._thread, *self._messages]:
            thread.join()
        self.on_left()

    def _serve(self) -> None:
        while (operation := self._work.get()) is not None:
            operation()

    def _execute(self, call: Call | Delivery, source: int, target: int, dtype: DType, op: Op) -> None:
        if isinstance(call, Delivery):
            self._deliver(call, source, target)
            return
        means = oracle.meaning(call.collective, self.rank, self.size, call.numel, call.root)
        mine = _memory(source, means.input_length * call.itemsize)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._gloo.allgather([parts], [mine.clone()]).wait()
        if means.clauses:
            exact = torch.float64 if _TORCH[dtype].is_floating_point else torch.int64
            inputs = [part.view(_TORCH[dtype]).to(exact).numpy() for part in parts]
            output = oracle.output_of(means, inputs[self.rank], inputs, "AVG" if call.average else op.name)
            result = torch.from_numpy(output).to(_TORCH[dtype])
            _memory(target, means.output_length * call.itemsize).copy_(result.view(torch.uint8))

    def _deliver(self, call: Delivery, source: int, target: int) -> None:
        mine = _memory(source, max(call.sent) if call.same else sum(call.sent)).clone()
        parts = [mine[:length] for length in call.sent] if call.same else mine.split(call.sent)
        result = torch.empty(sum(call.received), dtype=torch.uint8)
        self._gloo.alltoall_base(result, torch.cat(list(parts)), list(call.received), list(call.sent)).wait()
        _memory(target, len(result)).copy_(result)


def _memory(address: int, length: int) -> torch.Tensor:
    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.uint8)


def install() -> None:
    """From here on, groups made in this process use the fake."""

    def plan_for(collective: str, *, numel: int, itemsize: int, average: bool = False, root: int = 0, **_: Any) -> Call:
        return Call(collective, numel, itemsize, average, root)

    def deliver(_: int, __: Any, sent: Lengths, received: Lengths, ___: int, *, same: bool, **____: Any) -> Delivery:
        return Delivery(tuple(length or 0 for length in sent), tuple(length or 0 for length in received), same)

    def connect(rendezvous: Rendezvous, *_: Any, **__: Any) -> FakeGroup:
        return FakeGroup(rendezvous)

    vars(submit).update(plan_for=plan_for, deliver=deliver)
    vars(shares).update(plan_for=plan_for)
    vars(backend).update(connect=connect)


def on_fake(body: Callable[..., Any], size: int, *args: Any, **options: Any) -> list[Any]:
    """Runs `body` on the ranks of a job that uses the fake."""
    return ranks.run(_job, size, body, *args, **options)


def _job(rank: int, size: int, body: Callable[..., Any], *args: Any) -> Any:
    install()
    with ranks.job(rank, size):
        return body(rank, size, *args)
