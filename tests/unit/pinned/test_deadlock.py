"""No order of calls and streams makes two ranks wait for each other."""

import functools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.frontend.device.accelerator import waits_for_words, write_word
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.context import Words, current_words
from commlayer.frontend.work.work import CommWork
from commlayer.transport.base import Handle
from tests.fake_cuda import FakeCuda
from tests.fake_transport import FakeHandle
from tests.unit.pinned.host import Host, when_open, write_done


@pytest.mark.parametrize("queues", [1, 2, None])
def test_two_ranks_that_exchange_messages_do_not_deadlock(queues: int | None) -> None:
    """They do not even where all streams share one queue: a receive is called and waited for as in any pipeline."""
    ranks = [FakeCuda(queues=queues), FakeCuda(queues=queues)]
    copies = [PinnedCopies(cuda, stream_wait=True) for cuda in ranks]
    boxes = [Mailbox(), Mailbox()]
    tensors = [cuda.tensor(rank + 1.0) for rank, cuda in enumerate(ranks)]
    got = [cuda.tensor(0) for cuda in ranks]
    for _ in range(3):
        works = []
        for rank, pinned in enumerate(copies):
            works.append(pinned.run(boxes[rank].receive, [], [got[rank]], at_once=True))
            works.append(pinned.run(boxes[1 - rank].send, [tensors[rank]], []))
        for work in works:
            work.wait()
        for rank, cuda in enumerate(ranks):
            cuda.launch(functools.partial(step, tensors[rank], got[rank]))
    assert [cuda.read(tensor) for cuda, tensor in zip(ranks, tensors, strict=True)] == [[5.0], [4.0]]
    for pinned in copies:
        pinned.close()


def step(target: Tensor, source: Tensor) -> None:
    target.copy_(source + 1)


class Mailbox:
    """Messages to one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[float] = []
        self._receives: list[tuple[Any, Tensor, Words | None]] = []
        self._sent = threading.Thread()
        self._sent.start()

    def send(self, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> CommWork:
        def begin() -> None:
            with self._lock:
                self._values.append(float(inputs[0]))
            write_done(words)
            handle.end(None)
            self._match()

        handle: Any = FakeHandle()
        words = current_words()
        self._sent = when_open(words, begin, self._sent)
        typed: Handle = handle
        return CommWork(typed, [])

    def receive(self, _: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        with self._lock:
            self._receives.append((handle, outputs[0], current_words()))
        self._match()
        typed: Handle = handle
        return CommWork(typed, list(outputs))

    def _match(self) -> None:
        with self._lock:
            if not self._values or not self._receives:
                return
            (handle, target, words), value = self._receives.pop(0), self._values.pop(0)
        target.fill_(value)
        write_done(words)
        handle.end(None)


class Exchange:
    """Two ranks whose operations add their inputs up: the n-th one ends on both ranks once both have begun it.

    Like the engine it looks at gates, writes words, and needs no driver. `host`: as today, whatever needs the host.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[list[tuple[Any, Tensor, Tensor, Words | None]]] = [[], []]
        self._ended = 0
        self._last = [threading.Thread(), threading.Thread()]
        for thread in self._last:
            thread.start()

    def add(self, rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        words = current_words()

        def begin() -> None:
            with self._lock:
                self._begun[rank].append((handle, inputs[0], outputs[0], words))
                ready = min(map(len, self._begun))
                for number in range(self._ended, ready):
                    both = [self._begun[side][number] for side in (0, 1)]
                    total = both[0][1] + both[1][1]
                    for ended, _, result, its in both:
                        result.copy_(total)
                        write_done(its)
                        threading.Thread(target=ended.end, args=(None,)).start()  # a completion thread
                self._ended = max(self._ended, ready)

        self._last[rank] = when_open(words, begin, self._last[rank])
        typed: Handle = handle
        return CommWork(typed, list(outputs))


def program(seed: int) -> list[str]:
    """The calls of a program: operations, waits, kernels, and those that the driver drains the device for."""
    generator = random.Random(seed)
    calls: list[str] = []
    open_works = 0
    for _ in range(generator.randint(4, 12)):
        choice = generator.choice(["run", "run", "wait", "wait", "kernel", "drain", "drain"])
        if choice == "wait" and open_works == 0:
            choice = "run"
        open_works += {"run": 1, "wait": -1}.get(choice, 0)
        calls.append(choice)
    return calls + ["wait"] * open_works + ["drain"]


def run_program(calls: list[str], rank: int, cuda: FakeCuda, exchange: Exchange, seed: int) -> list[float]:
    """Runs it as one rank, and returns the values that its tensors have in the end."""
    order, pauses = (
        random.Random(seed),
        random.Random(2 * seed + rank),
    )  # ranks wait in one order, and are late by chance
    pinned = PinnedCopies(cuda, stream_wait=True)
    works: list[CommWork] = []
    tensors: list[Tensor] = []
    for call in calls:
        time.sleep(pauses.choice([0, 0, 0.0005]))
        if call == "run":
            tensors.append(cuda.tensor(rank + 1.0 + len(tensors)))
            works.append(pinned.run(functools.partial(exchange.add, rank), [tensors[-1]], [tensors[-1]]))
        elif call == "wait":
            works.pop(order.randrange(len(works))).wait()
        elif call == "kernel":
            cuda.launch(lambda: time.sleep(0.0002))
        else:
            cuda.first_use()
    pinned.close()
    return [cuda.read(tensor)[0] for tensor in tensors]


def run_seed(seed: int, queues: int) -> None:
    """Runs a program on two ranks."""
    calls, exchange = program(seed), Exchange()
    ranks = [FakeCuda(queues=queues, lag_s=0) for _ in range(2)]
    found: dict[int, list[float]] = {}

    def rank_of(rank: int) -> None:
        found[rank] = run_program(calls, rank, ranks[rank], exchange, seed)

    for cuda in ranks:
        waits_for_words(cuda, torch.device("cpu"))
    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [2.0 * number + 3.0 for number in range(calls.count("run"))]
    assert found == {0: expected, 1: expected}, f"seed {seed}"
    for cuda in ranks:
        cuda.close()


@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_no_program_deadlocks_with_the_drivers_lock(first: int, queues: int) -> None:
    """1,000 programs, whose driver drains the device in the middle of everything."""
    for seed in range(first, first + 50):
        run_seed(seed, queues)


def test_what_needs_the_driver_between_wait_and_the_end_deadlocks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way before gates: a thread waits for the copies out, and starts the operation then. It shows that the fake
    has the driver's lock; `wait()` blocks for such operations now, so only the test lets a stream wait."""
    monkeypatch.setattr("tests.fake_cuda.PATIENCE_S", 1.0)
    cuda = FakeCuda()
    word = cuda.pinned((1,), torch.int32)
    write_word(word, 0)
    opened, copied = cuda.gate(), cuda.event()
    copied.record(cuda.current_stream())

    def start() -> None:
        copied.synchronize()  # takes the driver's lock
        write_word(word)

    cuda.wait_word(cuda.current_stream(), word)
    threading.Thread(target=start).start()
    threading.Timer(0.05, opened.set).start()
    with pytest.raises(RuntimeError, match="deadlock: "):
        cuda.first_use()


@pytest.mark.parametrize("queues", [1, None])
def test_a_word_is_written_while_a_thread_enqueues_behind_it(queues: int | None, host: Host) -> None:
    """The stream's queue is full: the calling thread blocks behind the word, and holds nothing that the end needs."""
    cuda = FakeCuda(queues=queues)
    pinned = PinnedCopies(cuda, stream_wait=True)
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    host.started_by_now(1)
    in_copy, go_on = threading.Event(), threading.Event()
    copy = cuda.copy

    def full(target: Tensor, source: Tensor) -> None:
        in_copy.set()
        assert go_on.wait(10)
        copy(target, source)

    cuda.copy = full  # type: ignore[method-assign]
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    assert in_copy.wait(10)
    ender = threading.Thread(target=host.finish, args=(0,))
    ender.start()
    ender.join(10)
    assert not ender.is_alive()
    go_on.set()
    waiter.join(10)
    assert cuda.read(tensor) == [2.0]
    pinned.close()
