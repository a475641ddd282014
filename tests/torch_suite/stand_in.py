"""CPU tensors in the place of a GPU's, for tests that torch writes for GPUs only: most of those of DDP.

On a machine without CUDA, `install` takes away the decorators that ask for GPUs, and `Device` makes every request for
a device one for the CPU. A test that needs a real GPU then fails on gloo too, and says nothing about any backend.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed


class Device(TorchFunctionMode):
    """Code that asks torch for a CUDA device, by name or by number, gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(map(on_cpu, args))
        return func(*args, **kwargs)


def on_cpu(value: Any) -> Any:
    """The CPU if this names a GPU, else the value itself."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    names_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if is_number or names_gpu else value


def install() -> None:
    """Keeps tests for GPUs from being skipped; to be called before distributed_test is imported."""

    def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    common_distributed.skip_if_no_gpu = lambda function: function
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, always)


@contextlib.contextmanager
def device() -> Any:
    """A context in which no GPU is missed."""
    ddp = torch.nn.parallel.DistributedDataParallel
    init, to = ddp.__init__, torch.nn.Module.to

    def init_on_cpu(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        del device_ids, output_device
        init(self, module, **kwargs)

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ddp, "__init__", init_on_cpu))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", to_cpu))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=int(os.environ["WORLD_SIZE"])))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value="cpu"))
        for name in ("set_device", "synchronize", "manual_seed"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(Device())
        yield
