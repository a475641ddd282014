"""The largest values of gradients: DDP's hook with `topk:SHARE`, between ranks that share no memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.compress.codec import codec_of
from commlayer.compress.topk import BLOCK, selected
from tests import ranks
from tests.drift import SHAPES, check_equal, directions, hooked, mean, nmse, step_of
from tests.residual import total

CODEC = "topk:0.05"
TOPK = commlayer.Policy(codec=CODEC)
COARSE = (0, 2, 3)
"""Indices of the parameters of which only the largest values travel."""


def residuals(model: Any, state: commlayer.HookState) -> list[torch.Tensor]:
    return [total(state.feedback, parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(("dtype", "residual"), [("float32", "f32"), ("float32", "bf16"), ("bfloat16", "f32")])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_replicas_agree_and_the_rest_comes_back(rank: int, size: int, dtype: str, residual: Any) -> None:
    kind = getattr(torch, dtype)
    model, state = hooked(commlayer.Policy(codec=CODEC, residual=residual), kind)
    results, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(5):
        gradients = step_of(model, directions(rank, step, kind))
        check_equal(gradients, size)
        sent = sum(int(gradients[i].count_nonzero()) for i in COARSE)
        values = sum(gradients[i].numel() for i in COARSE)
        assert selected(codec_of(CODEC).share, values) < sent <= size * (0.05 * values + len(COARSE))
        for i, right in enumerate(mean(size, step, kind)):
            results[i] += gradients[i]
            exact[i] += right
            assert (nmse(gradients[i], right) > 0.1) == (i in COARSE)
    for i, left in enumerate(residuals(model, state)):
        assert left.any() == (i in COARSE)
        left = left.double()
        dist.all_reduce(left)
        limit = 1e-10 if i in COARSE and dtype == "float32" and residual == "f32" else 1e-5
        assert nmse(results[i] + left / size, exact[i]) < limit
    assert state.uncounted_bytes == 0


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_overflow_reaches_every_rank_and_leaves_the_residual(rank: int, size: int) -> None:
    model, state = hooked(TOPK)
    for step in range(2):
        step_of(model, directions(rank, step))
    before = residuals(model, state)
    for value in (float("inf"), float("nan")):
        inputs = directions(rank, 2)
        if rank == 1:
            inputs[0][7, 7] = inputs[2][7, 7] = inputs[3][7, 1] = value
        gradients = step_of(model, inputs)
        assert all(gradients[i].isnan().all() for i in COARSE)
        assert all(torch.equal(a, b) for a, b in zip(residuals(model, state), before, strict=True))
    assert all(gradient.isfinite().all() for gradient in step_of(model, directions(rank, 3)))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_overflow_of_a_fine_parameter_reaches_its_whole_bucket(rank: int, size: int) -> None:
    model, state = hooked(TOPK)
    step_of(model, directions(rank, 0))
    step_of(model, directions(rank, 1))
    before = residuals(model, state)
    inputs = directions(rank, 2)
    inputs[1][3] = float("inf")
    gradients = step_of(model, inputs)
    assert gradients[1].isnan().all()
    overflown = [i for i in COARSE if gradients[i].isnan().all()]
    assert overflown  # those in the bucket of the fine parameter
    assert all(gradients[i].isfinite().all() for i in COARSE if i not in overflown)
    assert all(torch.equal(a, b) for a, b in zip(residuals(model, state), before, strict=True))


class Embedding(torch.nn.Module):
    """An embedding, which is fine by a default pattern, and a head, which the caller may make fine."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(500, 16)
        self.out = torch.nn.Linear(16, 30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.embed(tokens))
        return outputs.square().sum()


@pytest.mark.parametrize(("patterns", "fine"), [(None, {"out.bias"}), (["out.*"], {"out.bias", "out.weight"})])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_embeddings_are_selected_from_unless_the_caller_makes_them_fine(
    rank: int, size: int, patterns: list[str] | None, fine: set[str]
) -> None:
    torch.manual_seed(1)
    model = Embedding()
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = commlayer.Policy(codec="topk:0.01", exact_steps=0)
    state = commlayer.HookState(policy, fine=commlayer.Fine(model, patterns), optimizer=optimizer)
    replica.register_comm_hook(state, commlayer.allreduce_hook)
    for step in range(2):
        model.zero_grad()
        replica(torch.arange(20 * step, 20 * step + 60)).backward()
        left = {name: total(state.feedback, parameter) for name, parameter in model.named_parameters()}
        assert {name for name, residual in left.items() if not residual.any()} == fine
        assert not left["embed.weight"][80:].any()  # rows without a token


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_bytes_on_the_network_follow_the_formula(rank: int, size: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400, bias=False) for _ in range(2)))
    replica = torch.nn.parallel.DistributedDataParallel(model)  # one bucket
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = commlayer.HookState(commlayer.Policy(codec="topk:0.02", exact_steps=0), optimizer=optimizer)
    replica.register_comm_hook(state, commlayer.allreduce_hook)
    values, sent = 2 * 400 * 400, []
    for _ in range(8):
        before = commlayer.stats()["payload_bytes_sent"]
        replica(torch.randn(8, 400)).square().sum().backward()
        sent.append(commlayer.stats()["payload_bytes_sent"] - before)
    formula = (size - 1) * (4 * values * 0.02 + 4 * -(-values // BLOCK))
    assert formula <= min(sent) <= 1.02 * formula, (sent, formula)  # others have retransmissions


@pytest.mark.parametrize(
    "share", ["", "0", "0.0", "0.51", "1", "1e-100", "-0.1", "nan", "inf", "x", " 0.1", "1_0", "."]
)
def test_bad_shares_are_refused_by_name(share: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=rf"codec='topk:{share}'\): .*SHARE a number above 0 and up to 0.5"):
        commlayer.Policy(codec=f"topk:{share}")


@pytest.mark.parametrize("share", ["0.5", ".5", "1e-05", "0.000001"])
def test_good_shares(share: str) -> None:
    assert commlayer.Policy(codec=f"topk:{share}").codec == f"topk:{share}"
