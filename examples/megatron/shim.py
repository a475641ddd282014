"""CUDA names mean CPU: megatron-core on a machine without a GPU. A job on GPUs does not need this file.

megatron-core asks CUDA for its device, its random generators and its streams. Here it gets the CPU, the default
generator, and streams that do nothing, since the CPU computes in the order of the calls. Its collectives, sharding,
buckets, schedules and optimizers stay as they are. FP8, CUDA graphs and Transformer Engine are not covered.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def cuda_means_cpu() -> None:
    """Replaces names of torch in this process. Call it before megatron-core makes anything; it cannot be undone."""
    _devices()
    _generators()
    _streams()
    _types()


def _devices() -> None:
    """Tensors "on CUDA" are on the CPU."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _replace(torch.Tensor, cuda=lambda tensor, *_, **__: tensor)
    # current_device() is a number on CUDA. Megatron only passes it on as `device=`.
    _replace(torch.cuda, current_device=lambda: CPU, init=_nothing, synchronize=_nothing, empty_cache=_nothing)
    _replace(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _generators() -> None:
    """Megatron's tracker saves and sets the state of CUDA's generator, one state per parallel region."""
    generator = torch.default_generator

    def state(*_: Any, **__: Any) -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        generator.set_state(state)

    _replace(torch.cuda, get_rng_state=state, set_rng_state=set_state, manual_seed=generator.manual_seed)
    _replace(torch.cuda.random, get_rng_state=state, set_rng_state=set_state)
    import megatron.core.tensor_parallel.random as megatron_random

    _replace(megatron_random, _set_cuda_rng_state=set_state)  # sets the state of a CUDA generator by itself
    # The tracker warns when the CPU's generator changes in a region of the GPU's. Here they are one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)


class Stream:
    """A stream or an event of CUDA whose work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()


def _streams() -> None:
    stream = Stream()
    _replace(torch.cuda, Stream=Stream, Event=Stream, stream=lambda _: contextlib.nullcontext())
    _replace(torch.cuda, current_stream=lambda *_: stream, default_stream=lambda *_: stream)
    _replace(torch.Tensor, record_stream=_nothing)


def _types() -> None:
    """Megatron's optimizers tell float32 from float16 parameters by the name "torch.cuda.FloatTensor"."""
    plain = torch.Tensor.type

    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    _replace(torch.Tensor, type=type_)


def _nothing(*_: Any, **__: Any) -> None: ...


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)
