"""Faults in jobs with several ranks per site: the ranks of a site share no group with other sites' ranks, but all
raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.errors import AbortedError, CommError, ConfigError
from tests import ranks
from tests.process.test_local_errors import Stopped, sgd
from tests.process.test_local_steps import Net, train

TIMEOUT = timedelta(seconds=60)
"""A rank that waits for a neighbour raises OperationTimeoutError, which no test here expects."""


class Scaled(Net):
    """It has a buffer, which it does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


def train_on_two_sites(
    rank: int, before: Callable[[int, nn.Module], None], net: nn.Module | None = None, **arguments: Any
) -> None:
    """Two sites of two ranks each. `before(step, model)` is called before each step."""
    site = [dist.new_group([0, 1], timeout=TIMEOUT), dist.new_group([2, 3], timeout=TIMEOUT)][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(net or Net(), process_group=site)
    optimizer = sgd(model)
    usual: dict[str, Any] = {"every": 4, "fragments": 1, "delay": 0, "codec": "none"}
    with commlayer.LocalSteps(model, optimizer, **usual | arguments, group=between) as local:
        vars(model)["local"] = local
        for step in range(9):
            before(step, model)
            train(model, optimizer, rank, [step])


def nothing(step: int, model: nn.Module) -> None:
    pass


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_all_ranks_know_the_ranks_of_all_sites(rank: int, size: int) -> None:
    """Also of a training that a death ends, and with no warning of torch's that a name is deprecated."""
    site = [dist.new_group([0, 3], timeout=TIMEOUT), dist.new_group([1, 2], timeout=TIMEOUT)][rank in (1, 2)]
    model = DistributedDataParallel(Net(), process_group=site)
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with commlayer.LocalSteps(model, optimizer, every=2, fragments=1) as local:
            train(model, optimizer, rank, range(4))
            assert local.ranks == [0, 3, 1, 2]
    assert local.ranks == [0, 3, 1, 2]


@ranks.on(4, ranks.run_gloo, environ=ranks.NETWORK)
def test_ranks_that_are_in_different_numbers_of_groups_train(rank: int, size: int) -> None:
    """The names of torch's `new_group(use_local_synchronization=True)` count the groups of a process."""
    dist.new_group([0, 3])
    train_on_two_sites(rank, nothing)
    dist.barrier()


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_weights_that_are_not_finite_in_one_shard(rank: int, size: int) -> None:
    """The first shard has the value, so ranks 0 and 2 find it; ranks 1 and 3 exchange the other shard."""

    def spoil(step: int, model: Any) -> None:
        if step == 3 and rank // 2 == 1:
            weight = model.module.layers[0].weight
            weight.detach()[0, 0] = torch.inf
            model.module.layers[0].weight.register_hook(torch.zeros_like)
            model.module.layers[0].bias.register_hook(torch.zeros_like)

    with pytest.raises(CommError, match="the weights of rank 2 are not finite"):
        train_on_two_sites(rank, spoil)
    dist.barrier()


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_buffers_that_ddp_writes_have_not_changed(rank: int, size: int) -> None:
    train_on_two_sites(rank, nothing, Scaled())


def spoil_buffer(net: Any, *_: Any) -> None:
    net.scale.fill_(torch.nan)


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_a_buffer_that_is_not_finite_on_one_rank_of_a_site(rank: int, size: int) -> None:
    """Ranks 1 and 3 find it; ranks 0 and 2 get the average of their site, and the heads of each other."""

    def spoil(step: int, model: Any) -> None:
        if (rank, step) == (3, 3):
            model.module.register_forward_hook(spoil_buffer)  # DDP has written its buffers by then

    with pytest.raises(CommError, match="the buffer 'scale' of rank 3 is not finite"):
        train_on_two_sites(rank, spoil, Scaled(), buffers="average")
    dist.barrier()


@pytest.mark.parametrize("raising", [(1,), (0, 1, 2, 3)])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_an_exception_within_averaged_changes_nothing(rank: int, size: int, raising: Sequence[int]) -> None:
    """Not even if the others of the site end it well, and later: the exception comes out before they do. The loop goes
    on. Another training has the same bits."""
    found, store = [], dist.distributed_c10d._get_default_store()
    for fails in (True, False):
        net = Scaled()

        def evaluate(step: int, model: Any, fails: bool = fails) -> None:
            if step != 6:
                return
            before = [values.clone() for values in model.module.state_dict().values()]
            caught: list[Stopped] = []
            try:
                with model.local.averaged():
                    if fails and rank in raising:
                        raise Stopped("evaluation")
                    if fails:
                        store.wait(["caught"], TIMEOUT)
            except Stopped as error:
                caught.append(error)
                store.set("caught", "")
            assert [(str(error), error.__context__) for error in caught] == (
                [("evaluation", None)] if fails and rank in raising else []
            )
            after = model.module.state_dict().values()
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

        train_on_two_sites(rank, evaluate, net, buffers="average")
        found.append(torch.cat([values.flatten() for values in net.state_dict().values()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("at", range(4))
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_an_argument_that_one_rank_refuses(rank: int, size: int, at: int) -> None:
    wrong: dict[str, Any] = {"codec": "topk:0.01"} if rank == at else {}
    with pytest.raises(ConfigError, match=f"rank {at}: .*topk"):
        train_on_two_sites(rank, nothing, **wrong)
    dist.barrier()


@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_steps_that_differ_within_a_site(rank: int, size: int) -> None:
    """Ranks 0 and 2 have every=4, and ranks 1 and 3 every=6: no two of them that differ exchange weights."""
    with pytest.raises(ConfigError, match=r"every differs: 4 on rank (\d), 6 on rank"):
        train_on_two_sites(rank, nothing, every=6 if rank % 2 else 4)
    dist.barrier()


@pytest.mark.parametrize("exact_steps", [0, 100])
@pytest.mark.parametrize("at", [0, 5])
@ranks.on(4, ranks.run_job, environ=ranks.NETWORK)
def test_an_exception_on_one_rank_ends_all_others(rank: int, size: int, at: int, exact_steps: int) -> None:
    def stop(step: int, model: nn.Module) -> None:
        if (rank, step) == (1, at):
            raise Stopped("rank 1")

    with pytest.raises(Stopped if rank == 1 else RuntimeError) as caught:  # DDP wraps what its average raises
        train_on_two_sites(rank, stop, exact_steps=exact_steps)
    assert rank == 1 or isinstance(caught.value, AbortedError) or "AbortedError: " in str(caught.value)
    dist.barrier()
