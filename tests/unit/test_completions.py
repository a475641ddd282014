"""The threads that call back, on made-up operations."""

import queue
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from commlayer.transport.completions import IDLE, Completions
from tests.world import until


class Operations:
    """Operations that end when the test says so."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[list[tuple[int, int]] | None] = queue.SimpleQueue()
        self.completions = Completions(self._wait, lambda: self._ended.put(None))

    def _wait(self) -> list[tuple[int, int]] | None:
        ended = self._ended.get(timeout=20.0)
        if ended is None:
            self._ended.put(None)  # for the next thread
        return ended

    def end(self, *tokens: int) -> None:
        self._ended.put([(token, 0) for token in tokens])


@pytest.fixture
def operations() -> Iterator[Operations]:
    made = Operations()
    yield made
    made.completions.close()
    assert threads() == 0


def threads() -> int:
    return sum(thread.name == "commlayer-completions" for thread in threading.enumerate())


def test_a_callback_may_wait_for_operations_that_end_later(operations: Operations) -> None:
    """It may also wait for those whose end came in the same batch, and for many at once."""
    completions = operations.completions
    order = []
    inner = threading.Event()
    outer = [threading.Event() for _ in range(5)]

    def wait_for_inner(number: int, status: int) -> None:
        assert inner.wait(20.0)
        order.append("outer")
        outer[number].set()

    def is_inner(status: int) -> None:
        order.append("inner")
        inner.set()

    tokens = [completions.expect(partial(wait_for_inner, number)) for number in range(5)]
    operations.end(*tokens, completions.expect(is_inner))
    assert all(event.wait(20.0) for event in outer)
    assert order == ["inner"] + ["outer"] * 5


def test_threads_that_are_no_longer_needed_end(operations: Operations) -> None:
    completions = operations.completions
    go, left = threading.Event(), threading.Semaphore(0)

    def block(status: int) -> None:
        assert go.wait(20.0)
        left.release()

    operations.end(*(completions.expect(block) for _ in range(8)))
    until(lambda: threads() >= 9)
    go.set()
    for _ in range(8):
        assert left.acquire(timeout=20.0)
    until(lambda: threads() <= IDLE + 1)


def test_a_callback_may_close(operations: Operations) -> None:
    closed = threading.Event()

    def close(status: int) -> None:
        operations.completions.close()
        closed.set()

    operations.end(operations.completions.expect(close))
    assert closed.wait(20.0)
    until(lambda: not threads())


def test_ended_operations_are_called_back_before_the_close(operations: Operations) -> None:
    called: list[int] = []
    operations.end(*(operations.completions.expect(called.append) for _ in range(100)))
    operations.completions.close()
    assert called == [0] * 100


def test_a_callback_that_raises_is_logged(operations: Operations, caplog: pytest.LogCaptureFixture) -> None:
    def fail(status: int) -> None:
        raise ValueError("no")

    operations.end(operations.completions.expect(fail))
    operations.completions.close()
    assert "a completion callback raised" in caplog.text


def test_a_withdrawn_callback_costs_nothing(operations: Operations) -> None:
    completions = operations.completions
    completions.forget(completions.expect(lambda _: pytest.fail("called")))
    called = threading.Event()
    operations.end(completions.expect(lambda _: called.set()))
    assert called.wait(20.0)
