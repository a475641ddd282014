"""Faults of `LocalSteps`: each is a typed error on all ranks, which names the rank, before anything hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks
from tests.process.hosts import LOOPBACK, on_hosts
from tests.process.test_disabled import DISABLED
from tests.process.test_local_steps import Given, Net, train

SIZE = 3
Arguments = dict[str, Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def begin(model: nn.Module, **arguments: Any) -> commlayer.LocalSteps:
    return commlayer.LocalSteps(model, sgd(model), **{"every": 4, "fragments": 2, **arguments})


def run(model: nn.Module, rank: int, steps: int, before: Callable[[int, Any], None], **arguments: Any) -> None:
    """A training that calls `before(step, local)` before each step."""
    with begin(model, **arguments) as local:
        for step in range(steps):
            before(step, local)
            train(model, local._optimizer, rank, [step])


def check_refused(text: str, model: nn.Module, **arguments: Any) -> None:
    """`with` does not begin, on any rank; and the job goes on."""
    with pytest.raises(commlayer.ConfigError, match=text), begin(model, **arguments):
        pass
    dist.barrier()


def bf16(model: nn.Module) -> None:
    model.bfloat16()


def wide(model: nn.Module) -> None:
    model.double()


def nudged(model: nn.Module) -> None:
    next(model.parameters()).detach()[0, 0] += 1e-6


def normed(model: Any) -> None:
    model.layers.append(nn.BatchNorm1d(7))


ODD: dict[str, tuple[Arguments, Callable[[nn.Module], None] | None, str]] = {
    "every": ({"every": 6}, None, r"every differs: 4 on rank 0, 6 on rank 1"),
    "fragments": ({"fragments": 1}, None, r"fragments differs: 2 on rank 0, 1 on rank 1"),
    "delay": ({"delay": 1}, None, r"delay differs: 2 on rank 0, 1 on rank 1"),
    "codec": ({"codec": "none"}, None, r"codec differs: 'int4-int8' on rank 0, 'none' on rank 1"),
    "outer": ({"outer": (1, 0.5)}, None, r"outer differs: .* on rank 1"),
    "samples": ({"samples": lambda: 1}, None, r"samples differs: False on rank 0, True on rank 1"),
    "too few steps": ({"every": 1}, None, r"rank 1: LocalSteps\(every=1, fragments=2\).*use fragments=1 or fewer"),
    "not a number": ({"every": "4"}, None, r"rank 1: LocalSteps\(every='4'\): use a whole number"),
    "long delay": ({"delay": 3}, None, r"rank 1: .*use a delay up to 2"),
    "large errors": ({"codec": "topk:0.01"}, None, r"rank 1: LocalSteps\(codec='topk:0.01'\): use one of none, bf16"),
    "no samples": ({"samples": 3}, None, r"rank 1: LocalSteps\(samples=3\)"),
    "no buffers": ({"buffers": "sum"}, None, r"rank 1: LocalSteps\(buffers='sum'\)"),
    "bf16": ({}, bf16, r"rank 1: LocalSteps\(Net\): the parameter 'layers.0.weight' is torch.bfloat16"),
    "float64": ({}, wide, r"rank 1: LocalSteps\(Net\): the parameter 'layers.0.weight' is torch.float64"),
    "weights": ({}, nudged, r"'layers.0.weight' has other values on rank 1 than on rank 0: all sites start with the"),
    "model": ({"buffers": "own"}, normed, r"(buffers|model) differs: .* on rank 1"),
    "BatchNorm": ({}, normed, r"rank 1: .*BatchNorm1d 'layers.3' changes its buffers .*buffers='average'"),
}


@pytest.mark.parametrize("name", ODD)
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_one_odd_rank_is_refused_on_all(rank: int, size: int, name: str) -> None:
    arguments, change, text = ODD[name]
    model = Net()
    if rank == 1 and change is not None:
        change(model)
    check_refused(text, model, **(arguments if rank == 1 else {}))


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_a_fault_of_all_ranks_names_all(rank: int, size: int) -> None:
    named = ", ".join(map(str, range(size)))
    check_refused(rf"ranks {named}: LocalSteps\(every=0\): use a whole number", Net(), every=0)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_models_that_are_refused(rank: int, size: int) -> None:
    check_refused("so they are one site", DistributedDataParallel(Net()))
    check_refused("are ranks of one site", DistributedDataParallel(Net()), group=dist.group.WORLD)
    alone = [dist.new_group([member]) for member in range(size)][rank]
    overlapped = DistributedDataParallel(Net(), process_group=alone, gradient_as_bucket_view=True)
    optimizer = sgd(overlapped)
    commlayer.overlap(overlapped, optimizer)
    with (
        pytest.raises(commlayer.ConfigError, match="SGD: its steps are not made in step"),
        commlayer.LocalSteps(overlapped, optimizer, 4),
    ):
        pass
    model = Net()
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    for optimizer, text in (
        (other, "the optimizer has 1 parameters of other modules"),
        (sgd(Net()), "the optimizer has no parameter of the model"),
    ):
        with pytest.raises(commlayer.ConfigError, match=text), commlayer.LocalSteps(model, optimizer, 4):
            pass
    usual: dict[str, Any] = {"model": model, "optimizer": sgd(model), "every": 4}
    cases: list[dict[str, Any]] = [{"model": 3}, {"optimizer": None}, {"group": "WORLD"}, {"fine": []}]
    for wrong in cases:
        with pytest.raises(commlayer.ConfigError, match=f"LocalSteps\\({next(iter(wrong))}="):
            commlayer.LocalSteps(**usual | wrong)


@ranks.on(2, ranks.run_job, environ=DISABLED)
def test_it_needs_the_engine(rank: int, size: int) -> None:
    with pytest.raises(commlayer.ConfigError, match="COMMLAYER_DISABLE"), begin(Net()):
        pass


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_weights_that_are_not_finite(rank: int, size: int, value: float) -> None:
    model = Net()

    def spoil(step: int, _: Any) -> None:
        if (rank, step) == (1, 3):
            next(model.parameters()).detach()[3, 3] = value

    with pytest.raises(commlayer.CommError, match="the weights of rank 1 are not finite"):
        run(model, rank, 8, spoil)
    assert rank == 1 or all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    dist.barrier()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("exact_steps", [0, 100])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_averaged_buffers_that_are_not_finite(rank: int, size: int, value: float, exact_steps: int) -> None:
    model: Any = Net()
    normed(model)

    def spoil(step: int, _: Any) -> None:
        if (rank, step) == (1, 2):
            model.layers[3].running_var[2] = value  # which training does not use, so weights stay finite

    found = "the buffer 'layers.3.running_var' of rank 1 is not finite; the sites must not average it"
    with pytest.raises(commlayer.CommError, match=found):
        run(model, rank, 6, spoil, buffers="average", exact_steps=exact_steps)
    assert rank == 1 or all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    dist.barrier()


@pytest.mark.parametrize("count", [-1, float("nan"), "many"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_samples_that_are_no_count(rank: int, size: int, count: Any) -> None:
    with pytest.raises(commlayer.ConfigError, match=r"LocalSteps\(samples=\.\.\.\) of rank 1 returned no count"):
        run(Net(), rank, 8, lambda *_: None, samples=lambda: count if rank else 3)
    dist.barrier()


@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_shared_weights_that_differ(rank: int, size: int) -> None:
    def spoil(step: int, local: Any) -> None:
        if (rank, step) == (2, 0):
            local._training.rounds.shared.fragments[1].shared[7] += 1e-6

    with pytest.raises(commlayer.CommError, match=r"sync 1: the shared weights of rank 2 are not those of the others"):
        run(Net(), rank, 8, spoil)
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_the_module_within_ddp_cannot_be_loaded(rank: int, size: int) -> None:
    alone = [dist.new_group([member]) for member in range(size)][rank]
    model = DistributedDataParallel(Net(), process_group=alone)
    with begin(model, group=dist.group.WORLD):
        for module in (model, model.module):
            with pytest.raises(commlayer.ConfigError, match="within `with LocalSteps"):
                module.load_state_dict(module.state_dict())


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_frozen_parameters_are_compared_after_a_restore(rank: int, size: int) -> None:
    model = Frozen()
    with begin(model) as local:
        train(model, local._optimizer, rank, range(4))
        state = local.state_dict()
    restored = Frozen()
    if rank == 1:
        restored.frozen.weight.detach().add_(1)
    again = begin(restored)
    again.load_state_dict(state)
    with pytest.raises(commlayer.ConfigError, match=r"'frozen.weight' has other values on rank 1"), again:
        pass


def on_shared_hosts(rank: int, size: int) -> None:
    with on_hosts(rank, size, [0, 0, 1, 1]):
        check_refused(
            r"ranks 0, 1, 2, 3: LocalSteps\(samples=, codec='int4-int8'\): the ranks \[0, 1\] of the group share",
            Net(),
            samples=lambda: 3 + rank,
        )
        for arguments in ({"samples": lambda: 3 + rank, "codec": "none"}, {}):
            model = Net()
            run(model, rank, 5, lambda *_: None, **arguments)


def test_samples_with_a_codec_are_refused_where_ranks_share_a_host() -> None:
    ranks.run(on_shared_hosts, 4, environ=LOOPBACK)


class Stopped(Exception):  # noqa: N818  # an error of a job
    pass


@pytest.mark.parametrize("at", [0, 2, 3, 7])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_an_exception_on_one_rank_ends_the_others(rank: int, size: int, at: int) -> None:
    def stop(step: int, _: Any) -> None:
        if (rank, step) == (1, at):
            raise Stopped("rank 1")

    with pytest.raises(Stopped if rank == 1 else commlayer.AbortedError, match="1"):
        run(Net(), rank, 12, stop)
    dist.barrier()


def dying(rank: int, size: int, at: int) -> str:
    def die(step: int, _: Any) -> None:
        if (rank, step) == (1, at):
            os.kill(os.getpid(), signal.SIGKILL)

    ranks.init(rank, size)
    with pytest.raises(commlayer.PeerLostError, match="rank 1") as error:
        run(Net(), rank, 12, die)
    return type(error.value).__name__


@pytest.mark.parametrize("at", [0, 3, 11])
def test_a_site_that_dies_is_an_error_on_all_others(at: int) -> None:
    found = ranks.outcomes(dying, SIZE, at, environ=ranks.UDP)
    assert [found[0].result, found[2].result] == ["PeerLostError"] * 2, found


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.Linear(40, 40)
        self.frozen.requires_grad_(False)
        self.layer = nn.Linear(40, 7)
        self.unused = nn.Linear(3, 3)
        self.tied = nn.Linear(40, 7)
        self.tied.weight = self.layer.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(self.frozen(values)) + self.tied(values) * self.scale  # type: ignore[no-any-return]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_frozen_tied_and_unused_parameters(rank: int, size: int) -> None:
    model = Frozen()
    before = [parameter.detach().clone() for parameter in model.frozen.parameters()]
    with begin(model) as local:
        train(model, local._optimizer, rank, range(9))
    assert all(torch.equal(one, other) for one, other in zip(before, model.frozen.parameters(), strict=True))
    assert model.tied.weight is model.layer.weight
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(every, values)
    assert torch.equal(*every)


def thaw(model: Any, local: Any) -> None:
    model.frozen.weight.detach().add_(1)


def scale(model: Any, local: Any) -> None:
    model.scale.add_(1)


def freeze(model: Any, local: Any) -> None:
    model.layer.requires_grad_(False)


def add(model: Any, local: Any) -> None:
    local._optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (thaw, "'frozen.weight' has changed"),
        (scale, "'scale' has changed"),
        (freeze, "'layer.weight' was frozen"),
        (add, "the optimizer has other parameters"),
    ],
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_changes_that_the_sites_do_not_share(rank: int, size: int, change: Any, text: str) -> None:
    """All ranks make the change here; if only one does, the others get an AbortedError."""
    model = Frozen()

    def alter(step: int, local: Any) -> None:
        if step == 1:
            change(model, local)

    with pytest.raises((commlayer.ConfigError, commlayer.AbortedError)) as error:
        run(model, rank, 6, alter)
    assert isinstance(error.value, commlayer.AbortedError) or text in str(error.value)
    everywhere: list[Any] = [None] * size
    dist.all_gather_object(everywhere, str(error.value))
    assert any(text in texts for texts in everywhere)


@pytest.mark.parametrize("name", ["frozen.weight", "scale"])
@pytest.mark.parametrize("exact_steps", [0, 100])
@ranks.on(SIZE, ranks.run_job, environ=ranks.NETWORK)
def test_changes_that_torch_does_not_tell(rank: int, size: int, name: str, exact_steps: int) -> None:
    """Those through `.data`: the ranks compare checksums at the end of `with`."""
    model = Frozen()

    def alter(step: int, _: Any) -> None:
        if (rank, step) == (1, 2):
            model.state_dict()[name].data.add_(1)

    with pytest.raises(commlayer.ConfigError, match=f"on rank 1, '{name}' has changed, which the sites do not share"):
        run(model, rank, 6, alter, exact_steps=exact_steps)
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_wrong_uses_within_with(rank: int, size: int) -> None:
    model = Net()
    local = begin(model)
    for outside in (local.state_dict, local.explain, local.averaged().__enter__):
        with pytest.raises(commlayer.ConfigError, match="works within `with LocalSteps"):
            outside()
    with local:
        state = local.state_dict()
        with pytest.raises(commlayer.ConfigError, match="call it before `with` begins"):
            local.load_state_dict(state)
        with pytest.raises(commlayer.ConfigError, match="within `with LocalSteps"):
            model.load_state_dict(model.state_dict())
        with pytest.raises(commlayer.ConfigError, match="within `with LocalSteps"):
            model.layers[0].load_state_dict(model.layers[0].state_dict())
        with pytest.raises(commlayer.ConfigError, match="begun before"), local:
            pass
        with local.averaged():
            with pytest.raises(commlayer.ConfigError, match="averaged"), local.averaged():
                pass
            with pytest.raises(commlayer.ConfigError, match="would take back this site's steps"):
                local.state_dict()
            with pytest.raises(commlayer.ConfigError, match="a step within `averaged"):
                train(model, local._optimizer, rank, [0])
        train(model, local._optimizer, rank, range(5))
    with pytest.raises(commlayer.ConfigError, match="begun before"), local:
        pass
    with pytest.raises(commlayer.ConfigError, match="it lacks"):
        begin(model).load_state_dict({"steps": 3})
    model.load_state_dict(model.state_dict())


def open_end(rank: int, size: int) -> list[str]:
    texts = ranks.logged()
    with ranks.job(rank, size):
        model = Given()
        local = commlayer.LocalSteps(model, sgd(model), 4, 1)
        local.__enter__()
        model.step(local._optimizer, rank, 0)
        from commlayer.frontend.local import local_steps

        local_steps._warn_of_open()  # as the interpreter does at its end
    return texts


def test_a_process_that_ends_within_with_says_so() -> None:
    for texts in ranks.run(open_end, 2, environ=ranks.NETWORK):
        assert any("the process ends within `with`, after 1 steps" in line for line in texts)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_second_context_of_the_same_optimizer_is_refused(rank: int, size: int) -> None:
    model = Net()
    with begin(model) as local:
        with pytest.raises(commlayer.ConfigError, match="that of another LocalSteps"):
            commlayer.LocalSteps(model, local._optimizer, 4, 2).__enter__()
        train(model, local._optimizer, rank, range(4))
        assert local.syncs == 2
    with commlayer.LocalSteps(model, local._optimizer, 4, 2):  # one after the other
        train(model, local._optimizer, rank, range(4))
