"""Pinned memory and the tensors of the caller live until the copies are over."""

import functools
import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlayer.errors import CommError
from commlayer.frontend.device.devices import Devices, placed
from commlayer.frontend.device.pinned import PinnedCopies, pinned_share
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda, alias
from tests.unit.pinned.host import Host, comes


def test_pinned_memory_is_not_used_again_before_the_copies_are_over(host: Host) -> None:
    cuda = FakeCuda(lag_s=0.01)
    pinned = PinnedCopies(cuda, stream_wait=True)
    seen = []
    for number in range(20):
        tensor = cuda.tensor(number, number)
        pinned.run(host.double, [tensor], [tensor]).wait()
        host.end(number)
        seen.append(tensor)
    assert [cuda.read(tensor) for tensor in seen] == [[2.0 * number, 2.0 * number] for number in range(20)]
    assert comes(lambda: pinned.run(lambda *_: CommWork(None, []), [], []).wait() and not pinned._in_flight)
    assert len(cuda._free) >= 1
    pinned.close()


@pytest.mark.parametrize("stream_wait", [True, False])
def test_the_callers_tensors_are_free_after_wait(cuda: FakeCuda, host: Host, stream_wait: bool) -> None:
    """With FSDP2 and a host that runs ahead, the parameters of all layers would be gathered at once otherwise."""
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    group = Doubling(Devices(dist.ProcessGroup(dist.HashStore(), 0, 1), "commlayer", dist.HashStore(), T, (), pinned))
    source, target = cuda.memory(torch.ones(2)), cuda.memory(torch.zeros(2))
    seen = cuda.tensor(0, 0)
    alive = [weakref.ref(source), weakref.ref(target)]
    opened = cuda.gate()
    work = group.double(target, source)
    if not stream_wait:
        opened.set()
        threading.Timer(0.05, host.end).start()
    work.wait()
    cuda.launch(functools.partial(seen.copy_, alias(target)))
    del work, source, target
    gc.collect()
    assert [reference() for reference in alive] == [None, None]  # and no other call has come
    assert stream_wait == (not host.started)
    opened.set()
    if stream_wait:
        host.end()
    assert cuda.read(seen) == [2.0, 2.0]
    assert host.started == [[1.0, 1.0]]
    pinned.close()


T = timedelta(seconds=10)


def test_tensors_that_nobody_waits_for_live_until_the_copies_are_over(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    """The allocator may give memory that nobody refers to to another kernel, which would be overwritten."""
    source = cuda.memory(torch.ones(2))
    alive = weakref.ref(source)
    pinned.run(host.double, [source], [source])
    del source
    host.started_by_now(1)
    assert alive() is not None
    host.finish(0)
    assert comes(lambda: pinned.run(lambda *_: CommWork(None, []), [], []).wait() and alive() is None)


def test_a_call_that_has_started_is_forgotten(pinned: PinnedCopies, host: Host) -> None:
    """It may have other tensors of the caller than those that are copied, and the next call may come late."""

    def call(*_: object) -> CommWork:
        return host.double([torch.ones(1)], [torch.zeros(1)])

    alive = weakref.ref(call)
    work = pinned.run(call, [], [])
    del call
    host.end()
    work.wait()
    assert comes(lambda: alive() is None)


def test_a_collective_over_the_limit_waits_for_earlier_ones(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, limit_bytes=64)
    tensors = [cuda.tensor(*range(length)) for length in (5, 8)]  # 5 floats take 32 bytes, as 8 do
    for tensor in tensors:
        pinned.run(host.double, [tensor], [tensor])
    host.started_by_now(2)
    over = threading.Thread(target=pinned.run, args=(host.double, [tensors[0]], [tensors[0]]))
    over.start()
    message = pinned.run(host.double, [], [tensors[1]], at_once=True, is_message=True)  # a message goes on
    host.started_by_now(1)
    over.join(0.05)
    assert over.is_alive()
    host.finish(0)
    host.started_by_now(1)
    over.join(10)
    assert not over.is_alive()
    for index in (1, 2, 3):
        host.finish(index)
    message.wait()
    pinned.close()


def test_a_collective_larger_than_the_limit_goes_alone(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, limit_bytes=4)
    tensor = cuda.tensor(1, 2, 3)
    work = pinned.run(host.double, [tensor], [tensor])
    host.end()
    work.wait()
    assert cuda.read(tensor) == [2.0, 4.0, 6.0]
    pinned.close()


def test_the_automatic_limit_is_a_share_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 27}  # 512 GiB
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert pinned_share() == 8 << 30


@pytest.mark.parametrize("stream_wait", [True, False])
def test_inference_mode(cuda: FakeCuda, host: Host, stream_wait: bool) -> None:
    """Its tensors may not be written outside of it, where other threads are."""
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    with torch.inference_mode():
        tensor = cuda.tensor(1, 2)
        work = pinned.run(host.double, [tensor], [tensor])
        threading.Timer(0.05, host.end).start()
        work.wait()
        assert cuda.read(tensor) == [2.0, 4.0]
        host.failure = CommError("rank 1 died")
        work = pinned.run(host.double, [tensor], [tensor])
        host.end(1)
        assert comes(work.is_completed)
    pinned.settle()
    pinned.close()


class Doubling:
    """A group of one with one collective."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    @placed(inputs=[1], outputs=[0])
    def double(self, target: Tensor, source: Tensor) -> CommWork:
        return HOSTS[-1].double([source], [target])


HOSTS: list[Host] = []


@pytest.fixture
def host(host: Host) -> Host:
    HOSTS.append(host)
    return host
