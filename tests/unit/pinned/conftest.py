"""A fake of CUDA, its pinned copies, and an engine whose operations the test ends."""

from collections.abc import Iterator

import pytest
import torch

from commlayer.frontend.device.accelerator import waits_for_words
from commlayer.frontend.device.pinned import PinnedCopies
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host


@pytest.fixture
def cuda() -> FakeCuda:
    made = FakeCuda()
    waits_for_words(made, torch.device("cpu"))  # tries the current stream, which tests are about to hold up
    made.waits = 0
    return made


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pinned(cuda: FakeCuda) -> Iterator[PinnedCopies]:
    made = PinnedCopies(cuda, stream_wait=True)
    yield made
    made.close()
    cuda.synchronize()
