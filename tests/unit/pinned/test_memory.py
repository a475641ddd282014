"""Pinned memory and the tensors of the caller live until the copies are over."""

import pytest
import torch

from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda, alias
from tests.unit.pinned.host import Host, comes


def test_pinned_memory_is_not_used_again_before_the_copies_are_over(host: Host) -> None:
    cuda = FakeCuda(lag_s=0.01)
    pinned = PinnedCopies(cuda)
    seen = []
    for number in range(20):
        tensor = cuda.tensor(number, number)
        pinned.run(host.double, [tensor], [tensor]).wait()
        host.end(number)
        seen.append(tensor)
    assert [cuda.read(tensor) for tensor in seen] == [[2.0 * each, 2.0 * each] for each in range(20)]
    assert comes(lambda: pinned.run(lambda *_: CommWork(None, []), [], []).wait() and not pinned._in_flight)
    assert len(cuda._free) >= 1
    pinned.close()


def test_the_callers_tensors_live_until_the_copies_are_over(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """record_stream() would have it so: the allocator may give memory that nobody refers to to another kernel."""
    source, target = cuda.pinned((2,), torch.float32), cuda.pinned((2,), torch.float32)  # overwritten when it is freed
    source.fill_(1)
    own = {tensor.untyped_storage().data_ptr() for tensor in (source, target)}
    monkeypatch.setattr(cuda, "has", lambda tensor: tensor.untyped_storage().data_ptr() in own)
    opened = cuda.gate()
    out = alias(target)
    pinned.run(host.double, [source], [target]).wait()
    del source, target
    opened.set()
    host.end()
    assert cuda.read(out) == [2.0, 2.0]
    assert host.started == [[1.0, 1.0]]
