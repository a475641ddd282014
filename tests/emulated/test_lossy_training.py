"""DDP with a loss bound over emulated links that lose packets: one process per rank, on as many hosts as wanted."""

import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.tools.bench.papers import PapersPolicy
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks
from tests.residual import total

STEPS = 6
SIZES = (200_000, 70_001, 150_000, 5)
TIMEOUT_S = 450
pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.slow,
    pytest.mark.timeout(480),
]  # a busy machine takes minutes to start four ranks


def on_lossy_network(function: Callable[..., Any], hosts: Sequence[int]) -> list[Any]:
    """Runs a function on ranks; returns their results. `hosts` names each rank's host."""
    with Network(Scenario(hosts=max(hosts) + 1, nics=(Link(loss=0.02),))) as network:
        places = [network.name(host) for host in hosts]
        return ranks.run(function, len(hosts), timeout_s=TIMEOUT_S, environ=network.rendezvous(), places=places)


class Drift(nn.Module):
    """Its gradients are its inputs, independent of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, directions: list[Tensor]) -> Tensor:
        return torch.stack([(w * d).sum() for w, d in zip(self.weights, directions, strict=True)]).sum()


def train(
    policy: commlayer.Policy, tolerance: commlayer.Tolerance | None = None, wrap: Callable[..., Any] | None = None
) -> dict[str, object]:
    """Some steps with the losses of a policy, and a restart in the middle.

    With one of torch's wrappers there is no restart, and gradients are small whole numbers: 16 bits hold them exactly.
    """
    rank = dist.get_rank()
    drift = Drift()
    model, state = wrapped(drift, commlayer.HookState(policy, tolerance=tolerance), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = list(drift.weights)
    exact = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(rank)
    late = [torch.zeros_like(weight) for weight in weights]
    twice = 0
    for step in range(STEPS):
        if step == STEPS // 2 and not wrap:
            file = io.BytesIO()
            torch.save(state.state_dict(), file)
            state = commlayer.HookState(tolerance=tolerance)
            state.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            model, state = wrapped(drift, state)
        directions = [torch.randn(weight.shape, generator=generator) for weight in weights]
        if wrap:
            directions = [(2 * direction).round() for direction in directions]
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
    """The distance of the weights and residuals from the sum of all ranks' gradients."""
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


def wrapped(
    drift: Drift, state: commlayer.HookState, wrap: Callable[..., Any] | None = None
) -> tuple[DistributedDataParallel, commlayer.HookState]:
    model = DistributedDataParallel(drift, bucket_cap_mb=1)
    hook = wrap(commlayer.allreduce_hook) if wrap else commlayer.allreduce_hook
    # DDP refuses a bf16 hook of torch's on the CPU, by its name
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return model, state


def forget() -> dict[str, object]:
    """One step of ones with the papers' rule: the sums show their losses."""
    model, state = wrapped(Drift(), commlayer.HookState(commlayer.Policy(loss_bound=0.1, treatment="zero")))
    model([torch.ones_like(weight) for weight in model.module.weights]).backward()
    size = dist.get_world_size()
    lacking = sum(int((size - size * w.grad).round().sum()) for w in model.module.weights if w.grad is not None)
    return {"lacking_bytes": 4 * lacking, "uncounted_bytes": state.uncounted_bytes}


def _policies(rank: int, size: int) -> dict[str, Any]:
    with ranks.job(rank, size, "gloo"):
        found: dict[str, Any] = {
            "feedback": train(commlayer.Policy(loss_bound=0.05)),
            "schedule": train(commlayer.Policy(), commlayer.BySteps({0: 0.0, 1: 0.05, 4: 0.2})),
            "forgotten": forget(),
            "urgent": train(commlayer.Policy(loss_bound=0.2, priority=2)),
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
        dist.barrier()
        return found


@pytest.fixture(scope="module", params=[(0, 1), (0, 1, 2), (0, 0, 1, 1)], ids=str)
def found(request: pytest.FixtureRequest) -> list[Any]:
    """The findings of each rank of a job. The parameter is each rank's host."""
    return on_lossy_network(_policies, request.param)


@pytest.mark.parametrize("policy", ["feedback", "urgent", "schedule"])
def test_replicas_agree_and_nothing_is_forgotten(found: list[Any], policy: str) -> None:
    results = [rank[policy] for rank in found]
    assert len({result["digest"] for result in results}) == 1
    assert max(result["error"] for result in results) < 1e-3
    assert sum(result["left"] for result in results) > 0
    assert sum(result["twice"] for result in results) == 0  # in a row: nothing is more than a step late
    steps = STEPS - STEPS // 2  # since the state was loaded
    assert {result["averaged_bytes"] for result in results} == {4 * sum(SIZES) * steps}
    bound = {"feedback": 0.05, "urgent": 0.2, "schedule": 0.2}[policy]
    assert (
        0
        < sum(result["uncounted_bytes"] for result in results)
        <= bound * sum(result["averaged_bytes"] for result in results)
    )


def test_the_ranks_are_told_all_losses(found: list[Any]) -> None:
    results = [rank["forgotten"] for rank in found]
    uncounted = sum(result["uncounted_bytes"] for result in results)
    ranks_per_host = 2 if len(found) == 4 else 1  # the sum of a host is lost as a whole, and one of its ranks notes it
    assert results[0]["lacking_bytes"] == ranks_per_host * uncounted
    assert uncounted > 0


def test_the_counters_show_the_losses(found: list[Any]) -> None:
    total = {name: sum(rank["stats"][name] for rank in found) for name in found[0]["stats"]}
    sent = total["packets_sent"]
    assert 0.01 * sent < total["packets_lost"] < 0.2 * sent  # the links lose 2 %; a late packet is taken for lost
    assert 0 < total["packets_given_up"] < total["packets_lost"]
    assert total["messages_stopped"] > 0
    assert total["operations_failed"] == 0


def test_rescaling_makes_up_at_once(found: list[Any]) -> None:
    results = [rank["rescale"] for rank in found]
    assert len({result["digest"] for result in results}) == 1
    assert all(result["exact"] for result in results)  # the mean of ones is one for any missing rank
    assert all(rank["integers"]["exact"] for rank in found)


def _wrappers(rank: int, size: int) -> dict[str, Any]:
    with ranks.job(rank, size, "gloo"):
        found = {
            "fp16": train(commlayer.Policy(loss_bound=0.1), wrap=fp16_compress_wrapper),
            "bf16": train(commlayer.Policy(loss_bound=0.1), wrap=bf16_compress_wrapper),
            "papers": train(PapersPolicy(loss_bound=0.1), wrap=fp16_compress_wrapper),
        }
        dist.barrier()
        return found


@pytest.fixture(scope="module")
def found_in_16_bits() -> list[Any]:
    """The findings of each rank of two hosts."""
    return on_lossy_network(_wrappers, (0, 1))


@pytest.mark.parametrize("wrapper", ["fp16", "bf16"])
def test_nothing_is_forgotten_in_16_bits(found_in_16_bits: list[Any], wrapper: str) -> None:
    results = [rank[wrapper] for rank in found_in_16_bits]
    assert len({result["digest"] for result in results}) == 1
    # Averages are rounded; a forgotten contribution is at least 1.
    assert max(result["error"] for result in results) < 0.5
    assert sum(result["left"] for result in results) > 0


def test_the_papers_rule_forgets(found_in_16_bits: list[Any]) -> None:
    results = [rank["papers"] for rank in found_in_16_bits]
    assert max(result["error"] for result in results) >= 1
    assert all(result["left"] == 0 for result in results)
