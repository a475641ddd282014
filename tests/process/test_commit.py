"""AMP: an overflow in one bucket leaves the residuals of all buckets as they were."""

from typing import Any

import pytest
import torch

import commlayer
from tests import ranks
from tests.drift import directions, hooked, step_of
from tests.residual import same_bits, saved

BUCKETS: dict[str, Any] = {"finds_unused": True, "bucket_cap_mb": 0.1}
"""Two, which stay: of the parameters 1 to 3, and of parameter 0."""


@pytest.mark.parametrize("codec", ["int4", "sign", "powersgd:2"])
@pytest.mark.parametrize("overflowing", [0, 3])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_skipped_step_has_never_happened(rank: int, size: int, codec: str, overflowing: int) -> None:
    policy = commlayer.Policy(codec=codec, deterministic=True)
    pairs = [hooked(policy, **BUCKETS) for _ in range(2)]
    for step in range(2):
        for model, _ in pairs:
            step_of(model, directions(rank, step))
    (model, state), (other, never) = pairs
    before = saved(state)
    assert len(before) >= 2
    assert same_bits(before, saved(never))
    inputs = directions(rank, 2)
    if rank == 1:
        inputs[overflowing].view(-1)[7] = float("inf")
    gradients = step_of(model, inputs)
    assert not gradients[overflowing].isfinite().all()
    assert gradients[3 - overflowing].isfinite().all()  # of the other bucket
    assert same_bits(saved(state), before)
    never.steps += 1  # the rotations of `int4` depend on it
    for step in range(3, 6):
        ours, theirs = step_of(model, directions(rank, step)), step_of(other, directions(rank, step))
        assert same_bits(ours, theirs)
        assert all(bool(tensor.isfinite().all()) for tensor in ours)
    assert same_bits(saved(state), saved(never))
    assert not same_bits(saved(state), before)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_scaler_skips_the_step_on_all_ranks(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(codec="int4"), **BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        state.loss_scale = scaler.get_scale()
        inputs = directions(rank, step)
        if step == 2 and rank == 1:
            inputs[3].view(-1)[7] = float("inf")
        weights, before = [parameter.detach().clone() for parameter in model.parameters()], saved(state)
        scaler.scale(model(inputs)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = step == 2
        assert same_bits([parameter.detach() for parameter in model.parameters()], weights) == skipped
        assert same_bits(saved(state), before) == skipped
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("codec", ["int4", "powersgd:2"])
@ranks.on(1)
def test_residuals_follow_the_scale_of_the_scaler(rank: int, size: int, codec: str) -> None:
    """The job says nothing: a residual of one scale, added in another, would be wrong by their ratio."""
    scales: dict[bool, list[tuple[float, float]]] = {}
    for is_given in (True, False):
        state = commlayer.HookState(commlayer.Policy(codec=codec))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
        with ranks.job(rank, size):
            found = scales[is_given] = []
            for _ in range(3):
                if is_given:
                    state.loss_scale = scaler.get_scale()
                state.enter([torch.ones(3)] if not found else list(state.feedback._numbers), 0, is_last=True)
                found.append((state.feedback._loss_scale, state.loss_scale))
                scaler._scale = torch.tensor(scaler.get_scale() * 2)  # as `update` does
        del scaler
    assert scales[True] == scales[False] == [(2.0**exponent,) * 2 for exponent in (16, 17, 18)]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_lost_contributions_wait_for_a_finite_step(rank: int, size: int) -> None:
    model, state = hooked(commlayer.Policy(loss_bound=0.1), **BUCKETS)
    step_of(model, directions(rank, 0))
    weight = model.module.weights[0]
    state.feedback.keep(torch.full((weight.numel(),), 1.0 + rank), [weight], [0], [(0, 4 * weight.numel())])
    before = saved(state)
    inputs = directions(rank, 1)
    inputs[3].view(-1)[7] = float("inf")
    assert step_of(model, inputs)[0].isfinite().all()
    assert same_bits(saved(state), before)
    step_of(model, directions(rank, 2))
    assert not state.feedback
