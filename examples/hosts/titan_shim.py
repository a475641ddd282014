"""Runs a job of torchtitan on the CPU, also on gloo. A job on GPUs does not need this file.

torchrun --nproc-per-node 4 examples/hosts/titan_shim.py examples/hosts/torchtitan_job.py commlayer

torchtitan's meshes, sharding, collectives, Trainer and optimizer stay as they are.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def device_is_cpu() -> None:
    """Replaces names of torch and torchtitan in this process. Call it before torchtitan is imported."""
    names: Any = torch._utils
    names._get_available_device_type = lambda: "cpu"  # torchtitan.tools.utils asks once, while it is imported
    figures = {"get_device_name": "CPU", "get_device_properties": SimpleNamespace(total_memory=1), "memory_stats": {}}
    for name, figure in {**figures, "reset_peak_memory_stats": None, "empty_cache": None, "set_device": None}.items():
        setattr(torch.cpu, name, lambda *_, figure=figure: figure)  # torchtitan logs the memory of its device

    os.environ["LOCAL_RANK"] = "0"  # the number of its device
    symbols = ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata")
    kernels: Any = SimpleNamespace(**dict.fromkeys(symbols, object))  # another dispatcher of tokens needs triton
    sys.modules["torchtitan.distributed.minimal_async_ep"] = kernels
    settings: Any = SimpleNamespace(maybe_update_minimal_async_ep_config=lambda *_: None)
    sys.modules["torchtitan.distributed.minimal_async_ep.api"] = settings

    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.attention import FlexAttention

    distributed.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo refuses
    FlexAttention.forward = causal


def causal(self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: Any = None, **__: Any) -> Tensor:  # noqa: N803, ARG001
    """Causal attention, in place of FlexAttention, which has no backward pass on the CPU."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
    shared = q.shape[1] != k.shape[1]
    return nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=shared
    ).transpose(1, 2)


def gloo_multiplies() -> None:
    """FSDP2 multiplies gradients within their reduction (PREMUL_SUM). gloo lacks it: there it multiplies before."""
    sharded: Any = FSDPModule
    plain = sharded.set_gradient_divide_factor

    def set_gradient_divide_factor(module: FSDPModule, factor: float) -> None:
        plain(module, factor)
        module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")

    sharded.set_gradient_divide_factor = set_gradient_divide_factor


if __name__ == "__main__":
    device_is_cpu()
    gloo_multiplies()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
