"""Reductions of buckets on a device, by step: the hook waits for the step before, and learns of its failure."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from commlayer.errors import CommError
from commlayer.frontend.device.in_flight import InFlight
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda
from tests.fake_transport import FakeHandle


class Job:
    """Steps of two buckets. Their operations end when the test says so."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.pinned = PinnedCopies(self.cuda, stream_wait=True)
        self.in_flight = InFlight()
        self.handles: list[Any] = []

    def begin(self, running: int = 0) -> None:
        self.in_flight.begin(self.pinned, running)

    def bucket(self, *, is_last: bool = False) -> CommWork:
        handle: Any = FakeHandle()
        self.handles.append(handle)
        tensor = self.cuda.tensor(1)
        call = lambda _, outputs: CommWork(handle, list(outputs))  # noqa: E731
        work = self.pinned.run(call, [tensor], [tensor], needs_host=True)
        self.in_flight.add(work, is_last=is_last)
        return work

    def step(self, running: int = 0) -> None:
        self.begin(running)
        self.bucket()
        self.bucket(is_last=True)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for handle in made.handles:
        if not handle.done():
            handle.end(None)
    made.pinned.close()
    made.cuda.synchronize()


def test_the_next_step_begins_when_the_last_one_is_over(job: Job) -> None:
    job.step()
    beginner = threading.Thread(target=job.begin)
    beginner.start()
    job.handles[0].end(None)
    beginner.join(0.05)
    assert beginner.is_alive()
    job.handles[1].end(None)
    beginner.join(10)
    assert not beginner.is_alive()


def test_with_a_running_step_the_one_before_it_is_over(job: Job) -> None:
    job.step()
    job.step(running=1)
    beginner = threading.Thread(target=job.begin, args=(1,))
    beginner.start()
    beginner.join(0.05)
    assert beginner.is_alive()
    for handle in job.handles[:2]:
        handle.end(None)
    beginner.join(10)
    assert not beginner.is_alive()
    assert not job.handles[2].done()


def test_the_first_failure_is_raised_once(job: Job) -> None:
    job.step()
    job.handles[1].end(CommError("the second"))
    job.handles[0].end(CommError("the first"))
    with pytest.raises(CommError, match="the first"):
        job.begin()
    job.step()  # neither failure is raised again, by the hook or by an operation
    for handle in job.handles[2:]:
        handle.end(None)
    job.in_flight.drain()


def test_a_step_without_its_last_bucket_is_dropped(job: Job) -> None:
    job.begin()
    job.bucket()
    job.begin()  # waits for nothing but the starts
    assert not job.handles[0].done()
    job.handles[0].end(CommError("this step ended before the hook of its last bucket"))
    job.bucket(is_last=True)  # the failure is nobody's
    job.handles[1].end(None)
    job.in_flight.drain()
