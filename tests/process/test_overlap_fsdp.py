"""FSDP2: gradients that travel during the next forward pass; training is bit by bit that of the plain loop."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn import functional

import commlayer
from commlayer.frontend.overlap.fsdp import groups_of
from commlayer.frontend.overlap.handle import Overlap
from tests import ranks
from tests.fake_transport import on_fake
from tests.process import training_loop
from tests.process.training_loop import STEPS, Make, check_one_step_late, one_step, run_both, usual

WIDTH, LAYERS = 24, 4

OPTIMIZERS = training_loop.OPTIMIZERS | {"RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01)}


class Training:
    """One training, plain or overlapped."""

    def __init__(self, rank: int, *, overlapped: bool, make: Make, options: dict[str, Any]) -> None:
        torch.manual_seed(1)
        self.rank = rank
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model: Any = nn.Sequential(*layers, options.get("head", nn.Linear)(WIDTH, 3))
        sharding = {name: value for name, value in options.items() if name in ("mesh", "mp_policy")}
        for layer in layers:
            fully_shard(layer, **sharding)
        if "head" in options:
            fully_shard(self.model[LAYERS], **sharding)
            register_fsdp_forward_method(self.model[LAYERS], "twice")
        fully_shard(self.model, **sharding)
        if "codec" in options:
            commlayer.compress_fsdp(self.model, commlayer.Policy(codec=options["codec"]), weights="bf16")
        self.optimizer = make(self.model.parameters())
        self.handle: Overlap | None = None
        if overlapped:
            self.handle = commlayer.overlap(self.model, self.optimizer, staleness=options.get("staleness", 0))
        self.seen: list[Tensor] = []

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        loss: Tensor = self.model(torch.randn(6, WIDTH, generator=generator)).square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def see_parameters(self) -> None:
        self.seen += [value.full_tensor().clone() for value in self.model.state_dict().values()]


Loop = Callable[[Training], None]


def compare(rank: int, loop: Loop, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> Training:
    """Runs the loop plainly and overlapped; returns the overlapped training."""
    return run_both(
        loop, *(Training(rank, overlapped=overlapped, make=make, options=options) for overlapped in (False, True))
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_losses_and_parameters_are_those_of_the_plain_loop(rank: int, size: int, name: str) -> None:
    compare(rank, usual, OPTIMIZERS[name])


@ranks.on(4, ranks.run_job)
def test_four_ranks_of_a_host(rank: int, size: int) -> None:
    compare(rank, usual)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_codecs_of_compress_fsdp_stay(rank: int, size: int) -> None:
    ours = compare(rank, usual, codec="int8")
    with pytest.raises(commlayer.ConfigError, match="compress_fsdp has given this model a policy"):
        commlayer.overlap(ours.model, OPTIMIZERS["SGD"](ours.model.parameters()), commlayer.Policy())


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_clipping_and_a_checkpoint_midway(rank: int, size: int) -> None:
    def loop(training: Training) -> None:
        for step in range(STEPS):
            training.loss(step).backward()
            norm: Any = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            training.seen.append(norm.full_tensor())
            training.optimizer.step()
            training.see_parameters()
            training.optimizer.zero_grad()

    compare(rank, loop)


@pytest.mark.parametrize("case", ["accumulation in shards", "accumulation unsharded", "bf16", "hooks", "factor"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_what_reads_gradients_at_once_is_exact(rank: int, size: int, case: str) -> None:
    def loop(training: Training) -> None:
        if case == "factor":
            training.model.set_gradient_divide_factor(4.0)
        if case == "hooks":
            for parameter in training.model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(0.5))
        for step in range(STEPS):
            for part in range(2 if case.startswith("accumulation") else 1):
                if case.endswith("unsharded"):
                    training.model.set_requires_gradient_sync(part == 1)
                training.loss(10 * step + part).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {"mp_policy": half} if case == "bf16" else {}
    compare(rank, loop, **options)


@ranks.on(4, ranks.run_job)
def test_replicas(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(rank, usual, mesh=mesh)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_evaluation_prefetch_and_a_failure(rank: int, size: int) -> None:
    def loop(training: Training) -> None:
        training.model[0].set_modules_to_forward_prefetch([training.model[1]])
        for step in range(STEPS):
            one_step(training, step)
            with torch.no_grad():
                training.seen.append(training.model(torch.ones(1, WIDTH)).clone())
        if training.handle is not None:
            training.handle.remove()
        usual(training)

    compare(rank, loop)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_staleness_one_is_the_rule_of_its_name(rank: int, size: int) -> None:
    make = OPTIMIZERS["SGD"]
    plain = Training(rank, overlapped=False, make=make, options={})
    stale = Training(rank, overlapped=True, make=make, options={"staleness": 1})
    check_one_step_late(plain, stale)


@ranks.on(2, on_fake)
def test_classes_and_waits(rank: int, size: int) -> None:
    training = Training(rank, overlapped=True, make=OPTIMIZERS["SGD"], options={})
    assert training.handle is not None
    left: list[int] = []
    for layer in training.model[:LAYERS]:
        layer.register_forward_hook(lambda *_: left.append(len(training.handle._deferred._claims)))
    group: Any = groups_of(training.model._get_fsdp_state())[0]
    native: Any = group.mesh_info.shard_process_group._native
    for step in range(3):
        left.clear()
        native.operations.clear()
        one_step(training, step)
        assert len(training.handle._deferred._claims) == 2 * LAYERS + 2
    assert left == [6, 4, 2, 0]  # the root's own parameters go first
    found = [(call.collective, priority) for call, _, priority in native.operations]
    scatters = [priority for collective, priority in found if collective == "reduce_scatter"]
    assert sorted(scatters) == [1, 2, 4, 6, 7]
    assert [priority for priority in scatters if priority != 1] == [7, 6, 4, 2]  # the root's is 1
    assert {priority for collective, priority in found if collective == "all_gather"} == {0}
    training.handle.finish()


@ranks.on(2, on_fake)
def test_encoded_weights_are_urgent_too(rank: int, size: int) -> None:
    training = Training(rank, overlapped=True, make=OPTIMIZERS["SGD"], options={"codec": "int8"})
    gathers = [groups_of(layer._get_fsdp_state())[0]._all_gather_comm for layer in training.model[:LAYERS]]
    assert {(gather.policy.codec, gather.policy.priority) for gather in gathers} == {("bf16", 0)}


@ranks.on(2, on_fake)
def test_an_error_has_its_type_at_the_wait(rank: int, size: int) -> None:
    training = Training(rank, overlapped=True, make=OPTIMIZERS["SGD"], options={})
    assert training.handle is not None
    usual(training)
    training.optimizer.zero_grad()
    loss = training.loss(0)
    group: Any = groups_of(training.model._get_fsdp_state())[0]
    native: Any = group.mesh_info.shard_process_group._native
    training.model.set_reshard_after_backward(False)
    native.delay_s = 0.05
    with contextlib.suppress(RuntimeError):
        loss.backward()
    native.failure = commlayer.PeerLostError("rank 1 of 2 is lost")
    training.optimizer.step()
    for action in (lambda: training.model(torch.ones(1, WIDTH)), training.handle.finish, training.model.state_dict):
        with pytest.raises(commlayer.PeerLostError, match="rank 1 of 2 is lost"):
            action()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_wait_is_told_once(rank: int, size: int) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    training = Training(rank, overlapped=True, make=OPTIMIZERS["SGD"], options={"mp_policy": half})
    told = ranks.logged()
    usual(training)
    assert len(told) == 1
    assert told[0].startswith("overlap: reduce_dtype differs from the parameters' dtype: the backward pass waits")


@ranks.on(2, ranks.run_job)
def test_refusals(rank: int, size: int) -> None:
    training = Training(rank, overlapped=False, make=OPTIMIZERS["SGD"], options={})
    given: Any = training.model
    for options, text in (
        ({"policy": commlayer.Policy(codec="int4")}, "codec='int4'.*no place for the state"),
        ({"policy": commlayer.Policy(loss_bound=0.1)}, "loss_bound=0.1.*use loss_bound=0"),
        ({"state": commlayer.HookState()}, r"overlap\(state=...\): FSDP2 has no place for its residuals"),
    ):
        with pytest.raises(commlayer.ConfigError, match=text):
            commlayer.overlap(given, training.optimizer, **options)
    with pytest.raises(commlayer.ConfigError, match="overlap with LBFGS"):
        commlayer.overlap(given, torch.optim.LBFGS(nn.Linear(2, 2).parameters()))


@ranks.on(2, on_fake)
def test_another_policy_after_remove(rank: int, size: int) -> None:
    training = Training(rank, overlapped=True, make=OPTIMIZERS["SGD"], options={})
    handle = training.handle
    for codec in ("int8", "none"):
        assert handle is not None
        handle.remove()
        handle = commlayer.overlap(training.model, training.optimizer, commlayer.Policy(codec=codec))
        group = groups_of(training.model._get_fsdp_state())[0]
        assert group._reduce_scatter_comm.policy.codec == codec


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_weights_gathered_without_a_forward_hook(rank: int, size: int) -> None:
    """A method that the user registers, `unshard()` by hand, and shards that are read: no hook of a module runs."""

    class Twice(nn.Linear):
        def twice(self, values: Tensor) -> Tensor:
            return 2 * functional.linear(values, self.weight, self.bias)

    def loop(training: Training) -> None:
        layer: Any = training.model[LAYERS]
        for step in range(STEPS):
            training.optimizer.zero_grad()
            training.loss(step).backward()
            training.optimizer.step()
            shard: Any = training.model[0][0].weight
            training.seen.append(shard.detach().norm().full_tensor())
            if step % 2:
                values = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
                training.seen.append(layer.twice(values).detach().clone())
            else:
                training.model[1].unshard()
                training.seen.append(training.model[1][0].weight.detach().clone())
                training.model[1].reshard()

    def make(overlapped: bool) -> Training:
        return Training(rank, overlapped=overlapped, make=OPTIMIZERS["SGD"], options={"head": Twice})

    run_both(loop, make(False), make(True))
