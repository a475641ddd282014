"""torchft's DiLoCo and LocalSGD in the place of LocalSteps, for bench.local_steps. Each rank is a replica of its own.

torchft is in an environment of its own: `make .venv-hosts/torchft/.stamp`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

DILOCO, LOCAL_SGD = "DiLoCo", "LocalSGD"
FRAGMENTS = 4
"""Of DiLoCo, each averaged as one bucket, and taken over as late as torchft allows: a step before the next one begins.
Only one fragment travels at a time."""
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
TIMEOUT = timedelta(seconds=60)


@contextlib.contextmanager
def torchft_of(kind: str, every: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which the weights of all ranks are averaged after `every` steps, by gloo: `kind` is DILOCO or
    LOCAL_SGD. All ranks enter it."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    rank, world = dist.get_rank(), dist.get_world_size()
    lighthouse: Any = None
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world, join_timeout_ms=9000)
    told = [None if lighthouse is None else lighthouse.address()]
    dist.broadcast_object_list(told)
    here = socket.gethostname() if "RANK" in os.environ else "localhost"
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=world,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=told[0],
        replica_id=f"site{rank}",
        init_sync=False,
    )
    try:
        if kind == LOCAL_SGD:
            context: Any = LocalSGD(manager, model, optimizer, every)
        else:
            count = min(FRAGMENTS, every)
            fragments = [nn.Sequential(*list(model)[at::count]) for at in range(count)]
            outer = [torch.optim.SGD(fragment.parameters(), **OUTER) for fragment in fragments]
            delay = every // count - 1
            context = DiLoCo(
                manager, fragments, optimizer, outer, every, use_bucketization=True, fragment_sync_delay=delay
            )
        with context:
            yield
        if manager.current_step() == 0:
            raise RuntimeError(f"torchft's {kind} averaged nothing")
    finally:
        dist.barrier()  # a manager that ends would take part in no quorum of the others
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
