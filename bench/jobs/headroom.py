"""A small DDP job for `python -m bench.headroom`: its accelerator is a sleep, its communication is real.

    commlayer emulate clean50 -- python -m bench.jobs.headroom --setting plain

The setting `plain` is the job of a user who does not know commlayer: DDP on gloo. The others are what a user could do:
`commlayer`, a codec, `overlap`, `overlap+CODEC`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.options import options
from bench.harness.turns import Accelerator
from commlayer.config import Policy

LAYERS = 8
STEPS = 10_000
"""More than any trial."""


class Layer(nn.Module):
    """A linear layer whose computation takes a given time."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        """Computes, and sleeps."""
        result: Tensor = Accelerator.apply(self.linear(values), self.seconds)  # type: ignore[no-untyped-call]
        return result


def train(setting: str, width: int, forward_ms: float, slow_ms: float, bucket_mb: float | None) -> None:
    """Trains until the process ends. The last rank computes `slow_ms` longer in each step."""
    dist.init_process_group("gloo" if setting == "plain" else "commlayer")
    torch.manual_seed(0)
    late_ms = slow_ms / 3 / LAYERS if dist.get_rank() == dist.get_world_size() - 1 else 0.0
    layers = nn.Sequential(*(Layer(width, (forward_ms + late_ms) / 1e3) for _ in range(LAYERS)))
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    name, _, codec = setting.partition("+")
    if name == "overlap":
        commlayer.overlap(model, optimizer, Policy(codec=codec or "none", exact_steps=0))
    elif name not in ("plain", "commlayer"):
        state = commlayer.HookState(Policy(codec=name, exact_steps=0), optimizer=optimizer)
        model.register_comm_hook(state, commlayer.allreduce_hook)
    values = torch.randn(4, width)
    for _ in range(STEPS):
        model(values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--setting", default="plain", help="plain, commlayer, a codec, overlap, overlap+CODEC")
    parser.add_argument("--width", type=int, default=256, help="of each layer")
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of a layer; its backward pass takes twice that")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="longer computation of the last rank's step")
    parser.add_argument("--bucket-mb", type=float, default=0.5, help="DDP's bucket_cap_mb; 0: its own")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train(given.setting, given.width, given.forward_ms, given.slow_ms, given.bucket_mb or None)
