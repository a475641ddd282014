"""The virtual hook of bench/jobs/virtual_ranks.py against DDP's hook over a network: equal bits, step after step."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.fidelity import CODECS, MODELS
from bench.jobs.virtual_ranks import VirtualHook
from tests import ranks

STEPS = 3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("codec", CODECS)
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_virtual_hook_has_the_bits_of_the_network(rank: int, size: int, codec: Any, name: str) -> None:
    torch.manual_seed(1)
    plain = MODELS[name]()
    fine, policy = commlayer.Fine(plain), commlayer.Policy(codec=codec, deterministic=True)
    state, buckets = commlayer.HookState(policy, fine=fine), []

    def hook(state: commlayer.HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append((bucket.buffer().clone(), bucket.parameters(), bucket.gradients()))
        return commlayer.allreduce_hook(state, bucket)

    model = DistributedDataParallel(plain, find_unused_parameters=True)  # keeps the buckets of the first step
    model.register_comm_hook(state, hook)
    virtual = None
    for step in range(STEPS):
        text = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        assert len(buckets) == step + 1
        buffer, parameters, gradients = buckets[-1]
        sizes = [parameter.numel() for parameter in parameters]
        assert [int(gradient.storage_offset()) for gradient in gradients] == [0, *accumulate(sizes)][:-1]
        rows = [torch.empty_like(buffer) for _ in range(size)]
        dist.all_gather(rows, buffer)
        virtual = virtual or VirtualHook(parameters, fine, policy, size, 0.0, [0])
        expected = virtual.average(torch.stack(rows).numpy(), step)
        got = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        assert got.numpy().tobytes() == expected.tobytes()
        assert (np.abs(expected) > 0).mean() > 0.5
