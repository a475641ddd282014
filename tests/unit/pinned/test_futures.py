"""Futures of operations on a device."""

import threading

import pytest
import torch
from torch import Tensor

from commlayer.frontend.device.accelerator import waits_for_words
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.work import CommWork, join
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host


def test_a_future_has_the_results_in_the_order_of_streams(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    seen: list[float] = []
    done = work.get_future().then(lambda value: cuda.launch(lambda: seen.extend(value.value()[0].tolist())))
    assert not done.done()
    host.end()
    done.wait()
    cuda.synchronize()
    assert seen == [2.0, 4.0]


def test_a_wait_completes_the_future_too(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    seen: list[float] = []
    done = work.get_future().then(lambda value: cuda.launch(lambda: seen.extend(value.value()[0].tolist())))
    work.wait()
    assert done.done()
    host.end()
    cuda.synchronize()
    assert seen == [2.0, 4.0]


def test_a_future_of_several_operations_has_all_results(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    """One result comes by the stream that waits, the other by the thread that ends the operation."""
    slow, fast = cuda.tensor(1), cuda.tensor(2)
    works: list[CommWork] = [pinned.run(host.double, [tensor], [tensor]) for tensor in (slow, fast)]
    host.started_by_now(2)
    seen: list[float] = []
    joined = join(works)
    done = joined.get_future().then(
        lambda value: cuda.launch(lambda: seen.extend(float(result) for result in value.value()))
    )
    stream = cuda.side_stream()
    with cuda.on(stream):
        works[0].wait()
    host.finish(1)
    done.wait()
    host.finish(0)
    cuda.synchronize()
    assert seen == [2.0, 4.0]


@pytest.mark.parametrize("queues", [1, None])
def test_a_future_made_in_a_backward_pass_completes_at_its_end(host: Host, queues: int | None) -> None:
    """The host does not wait, as with DDP's futures, and no stream does before all kernels of the pass are enqueued."""
    cuda = FakeCuda(queues=queues)
    pinned = PinnedCopies(cuda, stream_wait=True)
    waits_for_words(cuda, torch.device("cpu"))
    cuda.waits = 0
    tensor, later = cuda.tensor(1, 2), cuda.tensor(3)
    works: list[CommWork] = []
    waits: list[int] = []

    def hook(_: Tensor) -> None:
        works.append(pinned.run(host.double, [tensor], [tensor]))
        works[0].get_future()
        waits.append(cuda.waits)
        works.append(pinned.run(host.double, [later], [later]))  # its inputs must not be behind the first wait

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    assert works[0].get_future().done()
    assert not works[0].is_completed()
    assert waits == [0]
    assert cuda.waits == 1
    host.started_by_now(2)
    host.finish(0)
    host.finish(1)
    assert cuda.read(tensor) == [2.0, 4.0]
    works[1].wait()
    assert cuda.read(later) == [6.0]
    pinned.close()


def test_a_future_waited_for_within_the_backward_pass_blocks(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    """DDP's first step with static_graph does so: whichever comes first completes it."""
    tensor = cuda.tensor(1)
    leaf = torch.ones(2, requires_grad=True)

    def hook(_: Tensor) -> None:
        work = pinned.run(host.double, [tensor], [tensor])
        threading.Timer(0.05, host.end).start()
        work.get_future().wait()

    leaf.register_hook(hook)
    leaf.sum().backward()
    cuda.synchronize()  # a future of torch would let the current stream wait
    assert cuda.read(tensor) == [2.0]
