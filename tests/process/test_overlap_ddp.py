"""Gradients that travel during the next forward pass: training is bit by bit that of the plain loop."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import commlayer
from commlayer.frontend.overlap.ddp import DdpOverlap
from tests import ranks
from tests.fake_transport import on_fake
from tests.process import training_loop
from tests.process.training_loop import STEPS, Make, check_one_step_late, one_step, run_both, usual

POLICY = commlayer.Policy(deterministic=True)
FLAGS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}

OPTIMIZERS = training_loop.OPTIMIZERS | {
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.5),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.01),
}


class Net(nn.Module):
    """A model with tied, borrowed and late parameters, buffers, and several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.norm = nn.BatchNorm1d(20)
        self.lender = nn.Linear(20, 20, bias=False)
        self.gain = nn.Parameter(torch.ones(20))
        self.head = nn.Linear(20, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        hidden = functional.linear(self.norm(hidden), self.lender.weight) * self.gain
        return self.head(self.lender(hidden))  # type: ignore[no-any-return]


@dataclasses.dataclass
class Trainer:
    """One training, plain or overlapped."""

    rank: int
    handle: DdpOverlap | None
    model: DistributedDataParallel
    optimizer: Optimizer
    seen: list[Tensor] = dataclasses.field(default_factory=list)
    """Everything to be compared."""

    @staticmethod
    def of(rank: int, *, overlapped: bool, make: Make, policy: commlayer.Policy = POLICY, **flags: Any) -> Trainer:
        torch.manual_seed(1)
        model = DistributedDataParallel(Net(), **(FLAGS | flags))
        optimizer = make(model.parameters())
        if overlapped:
            return Trainer(rank, commlayer.overlap(model, optimizer, policy), model, optimizer)
        model.register_comm_hook(commlayer.HookState(policy, optimizer=optimizer), commlayer.allreduce_hook)
        return Trainer(rank, None, model, optimizer)

    def loss(self, step: int) -> Tensor:
        words = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(100 * step + self.rank))
        loss = functional.cross_entropy(self.model(words[0]), words[1])
        self.seen.append(loss.detach().clone())
        return loss

    def finish(self) -> None:
        if self.handle is not None:
            self.handle.finish()

    def see_parameters(self) -> None:
        self.finish()
        self.seen += [tensor.detach().clone() for tensor in self.model.state_dict().values()]


Loop = Callable[[Trainer], None]


def compare(rank: int, loop: Loop, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> Trainer:
    """Runs the loop plainly and overlapped; returns the overlapped training."""
    return run_both(
        loop, *(Trainer.of(rank, overlapped=overlapped, make=make, **options) for overlapped in (False, True))
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_losses_and_parameters_are_those_of_the_plain_loop(rank: int, size: int, name: str) -> None:
    compare(rank, usual, OPTIMIZERS[name])


@pytest.mark.parametrize("shm", ["0", "1"])
def test_four_ranks(shm: str) -> None:
    ranks.run_job(_four, 4, environ={"COMMLAYER_SHM": shm})


def _four(rank: int, size: int) -> None:
    compare(rank, usual, OPTIMIZERS["SGD"])


@pytest.mark.parametrize("codec", ["int8", "int4", "auto", "powersgd:2", "topk:0.1"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_codecs(rank: int, size: int, codec: str) -> None:
    """Auto measures times, which differ: it only has to run."""
    policy = commlayer.Policy(deterministic=True, codec=codec, exact_steps=2)
    if codec == "auto":
        ours = Trainer.of(rank, overlapped=True, make=OPTIMIZERS["AdamW"], policy=policy)
        usual(ours)
        ours.finish()  # or a rank would leave the job while gradients are in flight
    else:
        compare(rank, usual, OPTIMIZERS["SGD" if codec == "topk:0.1" else "AdamW"], policy=policy)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_loss_bound(rank: int, size: int) -> None:
    """Nothing is lost on loopback, so the results are the same."""
    ours = compare(rank, usual, policy=commlayer.Policy(loss_bound=0.1, algorithm="direct"))
    assert ours.handle is not None
    assert ours.handle.state.averaged_bytes > 0


@pytest.mark.parametrize(
    "flags", [{"static_graph": True}, {"bucket_cap_mb": 25}, {"broadcast_buffers": False}], ids=str
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_flags(rank: int, size: int, flags: dict[str, Any]) -> None:
    compare(rank, usual, **flags)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_clipping(rank: int, size: int) -> None:
    def loop(training: Trainer) -> None:
        for step in range(STEPS):
            training.loss(step).backward()
            training.seen.append(nn.utils.clip_grad_norm_(training.model.parameters(), 0.5))
            training.optimizer.step()
            training.optimizer.zero_grad()

    compare(rank, loop)


@pytest.mark.parametrize("name", ["SGD", "Adam, fused"])
@pytest.mark.parametrize("unscales", [True, False])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_grad_scaler(rank: int, size: int, name: str, unscales: bool) -> None:
    def loop(training: Trainer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(STEPS):
            training.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = training.loss(step)
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if unscales:
                scaler.unscale_(training.optimizer)
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            scaler.step(training.optimizer)
            scaler.update()
            training.seen.append(torch.tensor(scaler.get_scale()))

    compare(rank, loop, OPTIMIZERS[name])


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_gradients_accumulate(rank: int, size: int) -> None:
    """They accumulate within no_sync, and over several reductions."""

    def loop(training: Trainer) -> None:
        for step in range(STEPS):
            for part in range(3):
                with training.model.no_sync() if part == 0 else contextlib.nullcontext():
                    training.loss(10 * step + part).backward()
            training.optimizer.step()
            if step % 2:
                training.optimizer.zero_grad(set_to_none=step == 1)

    compare(rank, loop)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_checkpoints_midway(rank: int, size: int) -> None:
    """They hold the steps in flight; and what is loaded is not stepped again."""

    def loop(training: Trainer) -> None:
        for step in range(STEPS):
            one_step(training, step)
            if step == 1:
                of_model = copy.deepcopy(training.model.module.state_dict())
            if step == 2:
                of_optimizer = copy.deepcopy(training.optimizer.state_dict())
                moments = [value for state in of_optimizer["state"].values() for value in state.values()]
                training.seen += [moment for moment in moments if isinstance(moment, Tensor)]
            if step == 3:
                training.optimizer.load_state_dict(of_optimizer)
                training.model.module.load_state_dict(of_model)

    compare(rank, loop)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_moving_averages_copies_and_evaluation(rank: int, size: int) -> None:
    def loop(training: Trainer) -> None:
        average = torch.optim.swa_utils.AveragedModel(training.model.module)
        for step in range(STEPS):
            one_step(training, step)
            training.model.eval()
            with torch.inference_mode(step % 2 == 0), torch.no_grad():
                training.seen.append(training.model.module(torch.arange(5)).clone())
            training.model.train()
            training.finish()
            average.update_parameters(training.model.module)
            training.seen.append(average.module(torch.arange(5)).detach())
        training.seen.append(copy.deepcopy(training.model.module)(torch.arange(5)).detach())

    compare(rank, loop)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_forward_pass_that_fails(rank: int, size: int) -> None:
    def loop(training: Trainer) -> None:
        for step in range(STEPS):
            with pytest.raises((IndexError, RuntimeError)):
                training.model(torch.tensor([99, 99]))
            assert torch.overrides._get_current_function_mode() is None
            one_step(training, step)

    compare(rank, loop, broadcast_buffers=False)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_after_remove_the_loop_is_plain(rank: int, size: int) -> None:
    def loop(training: Trainer) -> None:
        usual(training)
        if training.handle is not None:
            training.handle.remove()
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.loss(step).backward()
            training.seen += [
                parameter.grad.clone() for parameter in training.model.parameters() if parameter.grad is not None
            ]
            training.optimizer.step()

    ours = compare(rank, loop)
    assert not ours.model.module._forward_pre_hooks
    assert not ours.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("codec", ["none", "bf16"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_staleness_one_is_the_rule_of_its_name(rank: int, size: int, codec: str) -> None:
    policy = commlayer.Policy(deterministic=True, codec=codec)
    plain = Trainer.of(rank, overlapped=False, make=OPTIMIZERS["SGD"], policy=policy)
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), **FLAGS)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    stale = Trainer(rank, commlayer.overlap(model, optimizer, policy, staleness=1), model, optimizer)
    check_one_step_late(plain, stale)


LAYERS = 5


def deep(staleness: int = 0) -> tuple[DistributedDataParallel, DdpOverlap, Optimizer]:
    """A model with a bucket for each layer, from the second step on."""
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(LAYERS))),
        gradient_as_bucket_view=True,
        bucket_cap_mb=0.03,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, commlayer.overlap(model, optimizer, staleness=staleness), optimizer


@ranks.on(2, on_fake)
def test_classes_follow_the_next_use(rank: int, size: int) -> None:
    model, handle, optimizer = deep()
    native: Any = handle.state.group()._native
    for _ in range(3):
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
    handle.finish()
    found = [priority for call, _, priority in native.operations if call.collective == "all_reduce"]
    assert found == [4] + [7, 6, 5, 3, 1] * 2  # the first step has one bucket
    assert native.orders[-2 * LAYERS :] == [5, 4, 3, 2, 1] * 2
    handle.by_next_use = False
    model(torch.randn(2, 100)).sum().backward()
    handle.remove()
    found = [priority for call, _, priority in native.operations if call.collective == "all_reduce"]
    assert found[-LAYERS:] == [4] * LAYERS
    assert native.orders[-LAYERS:] == [0] * LAYERS


@ranks.on(2, on_fake)
def test_with_staleness_one_gradients_travel_first_in_first_out(rank: int, size: int) -> None:
    """Strict classes would keep the last layer's gradients behind the next step's, which are needed later."""
    model, handle, optimizer = deep(staleness=1)
    native: Any = handle.state.group()._native
    for _ in range(3):
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
    handle.finish()
    assert {priority for call, _, priority in native.operations if call.collective == "all_reduce"} == {4}
    assert set(native.orders) == {0}


@ranks.on(2, on_fake)
def test_gradients_travel_until_their_layer(rank: int, size: int) -> None:
    model, handle, optimizer = deep()
    native: Any = handle.state.group()._native
    left: list[int] = []
    for layer in model.module:
        layer.register_forward_hook(lambda *_: left.append(len(handle._deferred._claims)))
    for _ in range(3):
        left.clear()
        model(torch.randn(2, 100)).sum().backward()
        native.delay_s = 0.1
        optimizer.step()
        assert len(handle._deferred._claims) == LAYERS
    assert left == [4, 3, 2, 1, 0]
    handle.finish()


@ranks.on(2, on_fake)
def test_an_error_has_its_type_at_the_wait(rank: int, size: int) -> None:
    model, handle, optimizer = deep()
    native: Any = handle.state.group()._native
    for _ in range(2):
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
    handle.finish()
    native.failure = commlayer.PeerLostError("rank 1 of 2 is lost")
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
    for action in (lambda: model(torch.randn(2, 100)), handle.finish, model.state_dict, handle.remove):
        with pytest.raises(commlayer.PeerLostError, match="rank 1 of 2 is lost"):
            action()
    model.state_dict()


@ranks.on(1, on_fake)
def test_refusals_while_training(rank: int, size: int) -> None:
    model, _, optimizer = deep()
    with pytest.raises(commlayer.ConfigError, match=r"SGD.step\(closure\)"):
        optimizer.step(lambda: 0.0)
    with model.join(), pytest.raises(RuntimeError, match=r"overlap within model.join\(\): .* leave join\(\) out"):
        model(torch.randn(2, 100)).sum().backward()
    sparse = DistributedDataParallel(nn.Embedding(5, 2, sparse=True), gradient_as_bucket_view=True)
    commlayer.overlap(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"use sparse=False"):
        sparse(torch.tensor([1])).sum().backward()
    assert dist.is_initialized()


@ranks.on(4, ranks.run_job)
def test_a_state_of_the_caller_averages_over_the_group_of_the_model(rank: int, size: int) -> None:
    """Ranks 0 and 1 train a model, and 2 and 3 another one."""
    pair = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    model = DistributedDataParallel(nn.Linear(3, 3), process_group=pair, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(commlayer.ConfigError, match=r"its process_group has ranks \[0, 1, 2, 3\], and the gradients"):
        commlayer.overlap(model, optimizer, state=commlayer.HookState(process_group=dist.group.WORLD))
    handle = commlayer.overlap(model, optimizer, state=commlayer.HookState())
    model(torch.full((1, 3), float(rank))).sum().backward()
    handle.finish()
    assert torch.equal(model.module.weight.grad, torch.full((3, 3), 2 * (rank // 2) + 0.5))
