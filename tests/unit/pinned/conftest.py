"""A fake of CUDA, its pinned copies, and an engine whose operations the test ends."""

from collections.abc import Iterator

import pytest

from commlayer.frontend.device.pinned import PinnedCopies
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pinned(cuda: FakeCuda) -> Iterator[PinnedCopies]:
    made = PinnedCopies(cuda)
    yield made
    made.close()
    cuda.synchronize()
