"""Tensors that pinned copies cannot take, and memory that is not there: each is a clear error, or works."""

from typing import Any

import pytest
import torch

from commlayer.errors import CommError, ConfigError
from commlayer.frontend.device.accelerator import Cuda, waits_for_words
from commlayer.frontend.device.driver import Driver, DriverError
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host


def test_sparse_tensors_are_refused(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    sparse = cuda.adopt(torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"^torch\.sparse_coo tensors on cpu: use to_dense\(\)"):
        pinned.run(lambda *_: CommWork(None, []), [sparse], [sparse])


def test_a_result_that_overlaps_itself_is_refused(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    overlapping = cuda.adopt(torch.ones(1)).expand(4)
    with pytest.raises(ConfigError, match=r"a result on cpu whose elements share memory, as of expand\(\)"):
        pinned.run(host.double, [overlapping], [overlapping])
    out = cuda.tensor(0, 0, 0, 0)
    work = pinned.run(host.double, [overlapping], [out])  # as an input it is welcome
    host.end(0)
    work.wait()
    assert cuda.read(out) == [2.0] * 4


@pytest.mark.parametrize("stream_wait", [False, True])
def test_strided_tensors_keep_what_lies_between_their_elements(cuda: FakeCuda, host: Host, stream_wait: bool) -> None:
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    whole = cuda.tensor(1, 2, 3, 4, 5, 6)
    odd = whole[::2]
    work = pinned.run(host.double, [odd], [odd])
    host.end(0)
    work.wait()
    assert cuda.read(whole) == [2.0, 2.0, 6.0, 4.0, 10.0, 6.0]
    pinned.close()


@pytest.mark.parametrize("stream_wait", [False, True])
def test_without_pinned_memory_the_call_fails_and_the_next_one_works(
    cuda: FakeCuda, host: Host, stream_wait: bool
) -> None:
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    tensor, other = cuda.tensor(1, 2, 3), cuda.tensor(1)
    for left in range(2):  # the words, or the copies
        cuda.pinned_left = left if stream_wait else 0
        with pytest.raises(CommError, match=r"no pinned memory for \d+ bytes .*out of memory.*COMMLAYER_PINNED_BYTES"):
            pinned.run(host.double, [tensor], [tensor])
    cuda.pinned_left = None
    assert host.started == []
    work = pinned.run(host.double, [other], [other])
    host.end(0)
    work.wait()
    assert (cuda.read(other), cuda.read(tensor)) == ([2.0], [1.0, 2.0, 3.0])
    pinned.close()


def test_an_old_driver_makes_wait_block_and_says_why(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver of CUDA 11.4 lacks the functions: `test_driver`."""

    def lacks(library: str = "libcuda.so.1") -> Driver:
        raise DriverError(f"{library} has no cuStreamWaitValue32_v2; install a driver of CUDA 11.7 or later")

    monkeypatch.setattr("commlayer.frontend.device.accelerator.Driver", lacks)

    class Old(FakeCuda):
        def write_word(self, stream: Any, word: Any) -> None:  # noqa: ARG002
            made = Cuda()
            monkeypatch.setattr(made, "at", self.at)
            made.write_word(_Stream(), word)

    old = Old()
    assert not waits_for_words(old, torch.device("cpu"))
    (told,) = [record.message for record in caplog.records if "blocks the calling thread" in record.message]
    assert "install a driver of CUDA 11.7 or later" in told
    old.close()


class _Stream:
    device = torch.device("cpu")
    cuda_stream = 0
