"""`LocalSteps.state_dict`: a training that is restored in mid-delay has the bits of one that went on; buffers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlayer
from tests import ranks
from tests.process.test_local_steps import Net, equal_on_all, train

EXACT = {**ranks.NETWORK, "COMMLAYER_DETERMINISTIC": "1"}
STEPS = 23


def made(momentum: float = 0.9) -> Any:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def begin(model: Any, optimizer: Any, codec: str) -> commlayer.LocalSteps:
    return commlayer.LocalSteps(model, optimizer, 6, 2, (0.7, 0.6), codec)


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def copied(state: Any) -> Any:
    """The state, after it went through a file, as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("codec", ["none", "int4-int8"])
@ranks.on(3, ranks.run_job, environ=EXACT)
def test_a_restored_training_has_the_bits_of_one_that_went_on(rank: int, size: int, codec: str) -> None:
    model, optimizer = made()
    saved: dict[int, Any] = {}
    with begin(model, optimizer, codec) as local:
        for step in range(STEPS):
            saved[step] = copied((model.state_dict(), optimizer.state_dict(), local.state_dict()))
            train(model, optimizer, rank, [step])
    expected = values(model)
    in_flight = 0
    for step in (0, 2, 3, 4, 5, 6, 10):  # turns begin after steps 3 and 6
        model, optimizer = made()
        local = begin(model, optimizer, codec)
        for part, state in zip((model, optimizer, local), saved[step], strict=True):
            part.load_state_dict(state)
        in_flight += saved[step][2]["rounds"]["sync"] is not None
        with local:
            assert (local.steps, local.syncs) == (step, step // 3)
            train(model, optimizer, rank, range(step, STEPS))
        assert torch.equal(values(model), expected), step
    assert in_flight == 5


@ranks.on(2, ranks.run_job, environ=EXACT)
def test_a_rank_that_has_skipped_a_step_is_one_sync_behind_after_a_restore(rank: int, size: int) -> None:
    results = []
    for restored in (False, True):
        model, optimizer = made()
        local = begin(model, optimizer, "none")
        with local:
            train(model, optimizer, rank, range(2 if rank else 3))  # rank 0 has begun a sync, and rank 1 has not
            state = copied((model.state_dict(), optimizer.state_dict(), local.state_dict()))
            assert (state[2]["rounds"]["sync"] is None) == bool(rank)
            if not restored:
                train(model, optimizer, rank, range(3, 12))
        if restored:
            model, optimizer = made()
            local = begin(model, optimizer, "none")
            for part, one in zip((model, optimizer, local), state, strict=True):
                part.load_state_dict(one)
            with local:
                train(model, optimizer, rank, range(3, 12))
        results.append(values(model))
    assert torch.equal(*results)
    assert equal_on_all(results[0])


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_turns_go_on_after_a_restart_with_another_h(rank: int, size: int) -> None:
    """A site that joins learns from their numbers how many steps were made."""
    saved, first = None, 0
    for every, end in ((6, 8), (14, 12), (4, 13), (4, 30)):
        model, optimizer = made()
        local = commlayer.LocalSteps(model, optimizer, every, 2, (0.7, 0.6), "none")
        if saved is not None:
            for part, state in zip((model, optimizer, local), saved, strict=True):
                part.load_state_dict(state)
        begun = []
        with local:
            for step in range(first, end):
                before = local.syncs
                train(model, optimizer, rank, [step])
                if local.syncs > before:
                    assert local._training.rounds is not None
                    assert local._training.rounds.turns.steps(before) == local.steps
                    begun.append(local.steps)
            saved, first = copied((model.state_dict(), optimizer.state_dict(), local.state_dict())), end
    assert begun == [16, 18, 20, 22, 24, 26, 28, 30]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_states_that_do_not_fit_are_refused_on_all(rank: int, size: int) -> None:
    model, optimizer = made()
    with begin(model, optimizer, "none") as local:
        train(model, optimizer, rank, range(4))
        early = copied(local.state_dict())
        train(model, optimizer, rank, range(4, 13))
        late = copied(local.state_dict())
    for state, fragments, text in (
        (late if rank else early, 2, "syncs differs: 0 on rank 0, 3 on rank 1; restore checkpoints that all ranks"),
        (early, 3, "ranks 0, 1: LocalSteps.load_state_dict: the state has fragments of"),
        (early if rank else None, 2, "restored differs: False on rank 0, True on rank 1"),
    ):
        other = commlayer.LocalSteps(model, optimizer, 6, fragments, (0.7, 0.6), "none")
        if state is not None:
            other.load_state_dict(state)
        with pytest.raises(commlayer.ConfigError, match=text), other:
            pass
    dist.barrier()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 7))

    def forward(self, given: Tensor) -> Tensor:
        return self.layers(given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("buffers", ["average", "own"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_buffers(rank: int, size: int, buffers: str) -> None:
    model: Any = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.LocalSteps(model, optimizer, 4, 2, (1, 0), buffers=buffers) as local:
        train(model, optimizer, rank, range(8))  # the sync that has begun now overwrites the buffers
        norm = model.layers[1]
        own = norm.running_var.clone()
        with local.averaged():
            assert equal_on_all(norm.running_var) == (buffers == "average")
        assert torch.equal(norm.running_var, own)
    assert int(norm.num_batches_tracked) == 8
    assert bool((norm.running_var > 0).all())
    assert equal_on_all(norm.running_var) == (buffers == "average")
    mean = own.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert torch.allclose(norm.running_var, mean if buffers == "average" else own, rtol=1e-6)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_copy_of_the_model_can_be_loaded_within_with(rank: int, size: int) -> None:
    model: Any = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.LocalSteps(model, optimizer, 4, 2, (1, 0), buffers="own"):
        train(model, optimizer, rank, range(2))
        saved = io.BytesIO()
        torch.save(model, saved)
        assert b"commlayer" not in saved.getvalue()
        saved.seek(0)
        copies = [copy.deepcopy(model), copy.deepcopy(model.layers), torch.load(saved, weights_only=False)]
        copies.append(copy.deepcopy(copies[-1]))
        train(model, optimizer, rank, range(2, 4))
        for other in copies:
            own = model.layers if isinstance(other, nn.Sequential) else model
            other.load_state_dict(own.state_dict())
            assert all(map(torch.equal, other.state_dict().values(), own.state_dict().values()))
        for module in (model, model.layers, model.layers[1]):
            with pytest.raises(commlayer.ConfigError, match="within `with LocalSteps"):
                module.load_state_dict(module.state_dict())
    model.load_state_dict(copies[0].state_dict())


class Smoothed(Normed):
    """It replaces its buffer in each pass."""

    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(40))

    def forward(self, given: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * given.mean(0)
        return super().forward(given)


@pytest.mark.parametrize("exact_steps", [0, 100])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_buffer_that_the_model_replaces_is_averaged(rank: int, size: int, exact_steps: int) -> None:
    model = Smoothed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.LocalSteps(model, optimizer, 4, 2, (1, 0), buffers="average", exact_steps=exact_steps) as local:
        train(model, optimizer, rank, range(7))
        own = model.ema.clone()
        with local.averaged():
            assert equal_on_all(model.ema) == (not exact_steps)
        assert torch.equal(model.ema, own)
    assert not equal_on_all(own)
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    assert torch.allclose(model.ema, own, rtol=1e-6)
    assert equal_on_all(model.ema)
