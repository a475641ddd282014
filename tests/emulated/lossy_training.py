"""One rank of a job on a lossy network, for test_lossy_training.py: prints what it found as one line of JSON."""

from __future__ import annotations

import hashlib
import io
import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests.residual import total

STEPS = 6
SIZES = (200_000, 70_001, 150_000, 5)


class Drift(nn.Module):
    """Its gradients are what it is called with, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, directions: list[Tensor]) -> Tensor:
        return torch.stack([(w * d).sum() for w, d in zip(self.weights, directions, strict=True)]).sum()


def train(policy: commlayer.Policy, tolerance: commlayer.Tolerance | None = None) -> dict[str, object]:
    """Some steps with what a policy loses, and a restart in the middle."""
    rank = dist.get_rank()
    drift = Drift()
    model, state = wrapped(drift, commlayer.HookState(policy, tolerance=tolerance))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = list(drift.weights)
    exact = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(rank)
    late = [torch.zeros_like(weight) for weight in weights]
    twice = 0
    for step in range(STEPS):
        if step == STEPS // 2:
            file = io.BytesIO()
            torch.save(state.state_dict(), file)
            state = commlayer.HookState(tolerance=tolerance)
            state.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            model, state = wrapped(drift, state)
        directions = [torch.randn(weight.shape, generator=generator) for weight in weights]
        optimizer.zero_grad()
        model(directions).backward()
        optimizer.step()
        for exactly, direction in zip(exact, directions, strict=True):
            exactly += direction
        before, late = late, [total(state.feedback, weight) for weight in weights]
        twice += sum(int((a != 0).logical_and(b != 0).sum()) for a, b in zip(before, late, strict=True))
    counted = {"averaged_bytes": state.averaged_bytes, "uncounted_bytes": state.uncounted_bytes}
    return {**account(weights, exact, state), "twice": twice, **counted}


def account(weights: list[nn.Parameter], exact: list[torch.Tensor], state: commlayer.HookState) -> dict[str, object]:
    """How far the weights and what waits for the next step are from what all ranks' gradients come to."""
    size = dist.get_world_size()
    digest, error, left = hashlib.sha256(), 0.0, 0
    for weight, exactly in zip(weights, exact, strict=True):
        digest.update(weight.detach().numpy().tobytes())
        kept = total(state.feedback, weight).float()
        left += int((kept != 0).sum())
        everything = torch.stack([exactly, kept])
        dist.all_reduce(everything)
        error = max(error, float((weight.detach() * size + everything[0] - everything[1]).abs().max()))
    return {"digest": digest.hexdigest(), "error": error, "left": left}


def wrapped(drift: Drift, state: commlayer.HookState) -> tuple[DistributedDataParallel, commlayer.HookState]:
    model = DistributedDataParallel(drift, bucket_cap_mb=1)
    model.register_comm_hook(state, commlayer.allreduce_hook)
    return model, state


def forget() -> dict[str, object]:
    """One step of ones with the papers' rule: what the sums lack shows in them."""
    model, state = wrapped(Drift(), commlayer.HookState(commlayer.Policy(loss_bound=0.1, treatment="zero")))
    model([torch.ones_like(weight) for weight in model.module.weights]).backward()
    size = dist.get_world_size()
    lacking = sum(int((size - size * w.grad).round().sum()) for w in model.module.weights if w.grad is not None)
    return {"lacking_bytes": 4 * lacking, "uncounted_bytes": state.uncounted_bytes}


def main() -> None:
    rank, size, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29500, size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found: dict[str, object] = {
        "feedback": train(commlayer.Policy(loss_bound=0.05)),
        "schedule": train(commlayer.Policy(), commlayer.BySteps({0: 0.0, 1: 0.05, 4: 0.2})),
        "forgotten": forget(),
        "protected": train(commlayer.Policy(loss_bound=0.2, protect_share=0.3, priority=2)),
    }
    options = commlayer.Options(commlayer.Policy(loss_bound=0.05, treatment="rescale"))
    group = dist.new_group(backend="commlayer", pg_options=options)
    ones = torch.ones(500_000)
    dist.all_reduce(ones, group=group)
    found["rescale"] = {
        "exact": bool((ones == size).all()),
        "digest": hashlib.sha256(ones.numpy().tobytes()).hexdigest(),
    }
    counts = torch.arange(500_000)
    dist.all_reduce(counts, group=group)  # integers are reliable
    found["integers"] = {"exact": bool((counts == size * torch.arange(500_000)).all())}
    found["stats"] = commlayer.stats()
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
