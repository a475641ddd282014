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
from torch.distributed.fsdp import FSDPModule


def device_is_cpu() -> None:
    """Replaces names of torch and torchtitan in this process. Call it before torchtitan is imported."""
    names: Any = torch._utils
    names._get_available_device_type = lambda: "cpu"  # torchtitan.tools.utils asks once, while it is imported
    figures = {"get_device_name": "CPU", "get_device_properties": SimpleNamespace(total_memory=1), "memory_stats": {}}
    for name, figure in {**figures, "reset_peak_memory_stats": None, "empty_cache": None}.items():
        setattr(torch.cpu, name, lambda *_, figure=figure: figure)  # torchtitan logs the memory of its device

    os.environ["LOCAL_RANK"] = "0"  # the number of its device
    kernels: Any = SimpleNamespace(generate_permute_indices=None)  # the kernels of experts need triton
    sys.modules["torchtitan.models.moe.kernels"] = kernels

    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda **_: None  # its barrier names a device, which gloo refuses


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
