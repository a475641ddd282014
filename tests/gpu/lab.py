"""`Lab`: the device of a check, a GPU or a fake of one."""

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commlayer.config import Config
from commlayer.frontend.device.accelerator import Accelerator, current, waits_for_words
from commlayer.frontend.device.devices import Devices
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.group.backend import CommProcessGroup
from tests.fake_cuda import FakeCuda, Words
from tests.gpu.facts import CALLS

CYCLES_PER_SECOND = 10**9
"""The rough cycles of a GPU."""


class Lab:
    """The device of one rank: the CPU, for the checks themselves."""

    accelerator: Accelerator = FakeCuda()
    """Its streams and pinned memory."""
    device = torch.device("cpu")
    """That of its tensors."""
    stream_wait = False
    """Whether groups are asked to let streams wait."""

    def tensor(self, values: Tensor) -> Tensor:
        """A copy on the device."""
        return values.clone()

    def model(self, net: nn.Module) -> nn.Module:
        """The module, on the device."""
        return net

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueues operations of torch on the current stream."""
        kernel()

    def busy(self, seconds: float) -> None:
        """Keeps the current stream busy."""
        time.sleep(seconds)

    def read(self, tensor: Tensor) -> Tensor:
        """The values, as the current stream sees them."""
        return tensor

    def stage(self, group: dist.ProcessGroup | None = None) -> None:
        """Prepares a group (None: WORLD) for tensors of the device."""

    def hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The communication hook, for buckets on the device."""
        return hook

    def order(self) -> None:
        """The host is about to read what a GPU would read in the order of its stream."""

    def drains(self) -> dict[str, Callable[[], object]]:
        """Calls for which the driver may hold its lock until the device is idle."""
        return {}


class Gpu(Lab):
    """A GPU: that of the rank, or one for all ranks."""

    def __init__(self, rank: int) -> None:
        self.accelerator: Accelerator = current()
        self.stream_wait = Config.from_environment().streams_wait()
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)

    def tensor(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def model(self, net: nn.Module) -> nn.Module:
        return net.to(self.device)

    def busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def drains(self) -> dict[str, Callable[[], object]]:
        values = torch.ones(1 << 20, device=self.device)
        return {name: functools.partial(call, values) for name, call in CALLS.items() if name != "none"}


class FakeGpu(Lab):
    """Memory of the host; the work of streams is done by threads, but kernels of a model at once."""

    def __init__(self, *, queues: int | None = None, words: Words = "wait", stream_wait: bool = True) -> None:
        self.cuda = FakeCuda(queues=queues, words=words)
        self.stream_wait = stream_wait
        self.accelerator: Accelerator = self.cuda

    def tensor(self, values: Tensor) -> Tensor:
        return self.cuda.adopt(values.clone())

    def launch(self, kernel: Callable[[], object]) -> None:
        self.cuda.launch(kernel)

    def busy(self, seconds: float) -> None:
        threading.Timer(seconds, self.cuda.gate().set).start()

    def read(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.cuda.read(tensor))

    def stage(self, group: dist.ProcessGroup | None = None) -> None:
        made = group or dist.distributed_c10d._get_default_group()
        assert isinstance(made, CommProcessGroup)
        if made.devices is None:
            copies = PinnedCopies(self.cuda, stream_wait=self.stream_wait)
            made.devices = Devices(made, "commlayer", dist.HashStore(), timedelta(seconds=30), pinned=copies)

    def hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        # A lambda has no annotations, which DDP would check.
        return lambda state, bucket: (self.cuda.adopt(bucket.buffer()), hook(state, bucket))[1]

    def order(self) -> None:
        self.cuda.synchronize()

    def drains(self) -> dict[str, Callable[[], object]]:
        cuda = self.cuda
        return {check.__name__: check for check in (cuda.first_use, cuda.free, cuda.read_pageable)}


def waits(lab: Lab) -> bool:
    """Whether streams of the device wait for operations."""
    return lab.stream_wait and waits_for_words(lab.accelerator, lab.device)
