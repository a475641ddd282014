"""Failed operations on a device: streams go on, and the error is raised at the next check."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.errors import CommError, ConfigError
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.context import Words, current_words
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda
from tests.fake_transport import FakeHandle
from tests.unit.pinned.host import Host, comes, write_done


@pytest.mark.parametrize("stream_wait", [True, False])
def test_a_known_failure_is_raised_by_wait_and_by_the_future(cuda: FakeCuda, host: Host, stream_wait: bool) -> None:
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    host.failure = CommError("rank 1 died")
    work = pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(0)])
    host.end()
    assert comes(work.is_completed)
    with pytest.raises(CommError, match="rank 1 died"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        work.get_future().wait()
    assert isinstance(work.exception(), CommError)
    assert work.is_completed()
    assert not work.is_success()
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()  # it was told already
    pinned.close()


def test_a_failure_behind_a_stream_lets_it_go_on_with_nan_and_is_raised_by_the_next_call(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    work.wait()
    host.failure = CommError("rank 1 died")
    host.end()
    assert all(value != value for value in cuda.read(tensor))
    assert "rank 1 died" in caplog.text
    with pytest.raises(CommError, match="rank 1 died"):
        pinned.run(host.double, [tensor], [tensor])
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()  # once
    assert isinstance(work.exception(), CommError)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(CommError, match="rank 1 died"):
        work.wait()


def test_a_failure_that_takes_long_to_explain_is_raised_by_the_next_call_too(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    """The stream sees the word at once; the error is told when the ranks have agreed on the culprit."""
    handle: Any = FakeHandle()
    words: list[Words | None] = []

    def call(_: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        words.append(current_words())
        return CommWork(handle, list(outputs))

    tensor = cuda.tensor(1)
    pinned.run(call, [tensor], [tensor]).wait()
    write_done(words[0])
    cuda.read(tensor)
    threading.Timer(1.5, handle.end, [CommError("rank 1 never called")]).start()
    with pytest.raises(CommError, match="rank 1 never called"):
        pinned.run(host.double, [tensor], [tensor])


def test_a_failure_that_the_caller_has_seen_is_not_raised_again(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    work.wait()
    host.failure = CommError("rank 1 died")
    host.end()
    assert comes(lambda: isinstance(work.exception(), CommError))
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()


def test_a_refusal_is_raised(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    def refuse(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        raise ValueError("no such thing")

    opened = cuda.gate()
    tensor = cuda.tensor(1)
    with pytest.raises(ValueError, match="no such thing"):
        pinned.run(refuse, [tensor], [tensor])
    work = pinned.run(refuse, [tensor], [tensor], needs_host=True)
    opened.set()
    with pytest.raises(ValueError, match="no such thing"):
        work.wait()
    assert cuda.read(tensor) == [1.0]
    assert not pinned.busy
    with pytest.raises(ValueError, match="no such thing"):
        pinned.run(refuse, [], [cuda.tensor(1)], at_once=True)


def test_the_stream_goes_on_though_the_engine_never_had_the_operation(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    handle: Any = FakeHandle()
    tensor = cuda.tensor(1)
    work = pinned.run(lambda *_: CommWork(handle, []), [tensor], [tensor])
    work.wait()
    handle.end(CommError("rank 1 died"))
    cuda.synchronize()
    assert str(work.exception()) == "rank 1 died"


def test_two_devices_in_one_operation_are_refused(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    with pytest.raises(ValueError, match="cpu, cpu:1"):
        pinned.run(lambda *_: CommWork(None, []), [cuda.tensor(1), OnDevice(cuda.tensor(1))], [])


class OnDevice(Tensor):
    """Says that it is somewhere else."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 1)


def test_a_graph_is_refused(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    cuda.capturing = True
    with pytest.raises(ConfigError, match="while a CUDA graph is recorded"):
        pinned.run(lambda *_: CommWork(None, []), [cuda.tensor(1)], [])


def test_what_a_stream_waits_for_is_over_before_the_group_ends(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1)
    pinned.run(host.double, [tensor], [tensor]).wait()
    with cuda.on(cuda.side_stream()):
        pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(1)])  # nobody waits for this one
    host.started_by_now(2)
    settler = threading.Thread(target=pinned.settle)
    settler.start()
    settler.join(0.05)
    assert settler.is_alive()
    host.finish(0)
    settler.join(10)
    assert not settler.is_alive()
    assert cuda.read(tensor) == [2.0]
    host.finish(1)


def test_streams_go_on_when_the_process_ends(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, stream_wait=True)
    tensor = cuda.tensor(1)
    pinned.run(host.double, [tensor], [tensor]).wait()
    host.started_by_now(1)
    pinned._at_exit()
    cuda.synchronize()
    host.finish(0)
