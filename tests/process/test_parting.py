"""Loops of one site that end after different steps: all ranks of the site raise an error that names them, long before
the timeout, and the other sites go on as after the end of a site."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from commlayer.frontend.local import parting
from tests import ranks
from tests.process.test_local_errors import begin
from tests.process.test_local_steps import Net, train

TIMEOUT = timedelta(seconds=300)
"""Far beyond that of the tests: a rank that waits for it fails them."""

STEPS = 12


def model_of(layout: str, sites: int, width: int) -> Any:
    shape = (sites, 2, width // 2) if layout == "HSDP" else (sites, width)
    mesh: Any = init_device_mesh("cpu", shape, mesh_dim_names=("site", "replica", "rank")[: len(shape)])
    mesh = mesh["replica", "rank"] if layout == "HSDP" else mesh["replica"]
    model: Any = Net()
    if layout == "DDP":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    fully_shard(model, mesh=mesh)
    return model


def ends(
    rank: int,
    size: int,
    layout: str,
    backend: str,
    width: int,
    short: dict[int, int],
    before: Callable[[int, int], None] | None,
    given: dict[str, Any],
) -> tuple[str, str]:
    """The loops of some ranks are `short`: they have so many steps. Returns the kind of the error, and its text."""
    ranks.init(rank, size, backend, timeout=TIMEOUT)
    model = model_of(layout, size // width, width)
    try:
        with begin(model, **given) as local:
            for step in range(short.get(rank, STEPS)):
                if before is not None:
                    before(rank, step)
                train(model, local._optimizer, rank, [step])
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        dist.destroy_process_group()
    return "", ""


def found(
    layout: str,
    backend: str,
    short: dict[int, int],
    *,
    width: int = 2,
    before: Callable[[int, int], None] | None = None,
    **given: Any,
) -> list[tuple[str, str]]:
    return ranks.run(ends, 2 * width, layout, backend, width, short, before, given, environ=ranks.UDP)


def check_parted(ended: list[tuple[str, str]], said: str) -> None:
    for rank, (kind, text) in enumerate(ended):
        assert kind == "MismatchError", (kind, text)
        assert text.startswith(f"rank {rank + len(ended)}: LocalSteps: the loops of one site"), text
        assert said in text
        assert "give the ranks of a site equally many steps" in text


@pytest.mark.parametrize("layout", ["DDP", "FSDP2", pytest.param("HSDP", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["commlayer", "gloo", "cpu:gloo"])
@pytest.mark.parametrize("steps", [0, 7, STEPS - 1])
def test_a_rank_that_ends_its_loop_earlier(layout: str, backend: str, steps: int) -> None:
    """The last rank; the other site goes on."""
    width = 4 if layout == "HSDP" else 2
    last = 2 * width - 1
    ended = found(layout, backend, {last: steps}, width=width, min_sites=1)
    assert ended[:width] == [("", "")] * width
    check_parted(ended[width:], f"rank {last} has left `with` after step {steps}, and rank ")
    check_parted(ended[width:], f" makes step {steps + 1}, in which it waits for that one")


@pytest.mark.parametrize("given", [{}, {"exact_steps": 100}, {"quorum": 2}, {"every": "auto"}], ids=str)
def test_without_min_sites_all_raise(given: dict[str, Any]) -> None:
    ended = found("DDP", "commlayer", {2: 7}, **given)
    assert [kind for kind, _ in ended[:2]] == ["AbortedError"] * 2, ended
    check_parted(ended[2:], "rank 2 has left `with` after step 7, and rank 3 makes step 8")


def test_one_of_three_goes_on() -> None:
    ended = found("FSDP2", "commlayer", {3: 5, 5: 5}, width=3, min_sites=1)
    assert ended[:3] == [("", "")] * 3
    check_parted(ended[3:], "has left `with` after step 5, and rank 4 makes step 6")


def test_two_of_three_go_on() -> None:
    ended = found("DDP", "gloo", {4: 5}, width=3, min_sites=1)
    assert ended[:3] == [("", "")] * 3
    check_parted(ended[3:], "rank 4 has left `with` after step 5, and rank ")


def after_the_loop(rank: int, size: int, backend: str) -> float:
    """Loops of equally many steps, after which ranks of a site exchange unequally many messages and collectives, and
    some leave later than others. Returns the sum of the weights."""
    ranks.init(rank, size, backend, timeout=TIMEOUT)
    model = model_of("DDP", 2, 2)
    group, place = model.process_group, rank % 2
    with begin(model) as local:
        for step in range(STEPS):
            train(model, local._optimizer, rank, [step])
        values = torch.zeros(4)
        if place:
            dist.send(values, rank - 1, group=group)
            dist.send(values, rank - 1, group=group)
            works = [dist.all_reduce(values, group=group, async_op=True)]
        else:
            dist.recv(values, rank + 1, group=group)
            dist.recv(values, rank + 1, group=group)
            works = [dist.all_reduce(values, group=group, async_op=True)]
            with torch.no_grad():
                model.module.eval()(torch.ones(2, 40))
            time.sleep(3 * parting.LOOK_S)
        for work in works:
            work.wait()
    found = sum(float(parameter.sum()) for parameter in model.parameters())
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["commlayer", "gloo"])
def test_what_ranks_do_after_equal_loops_is_no_step(backend: str) -> None:
    assert len(set(ranks.run(after_the_loop, 4, backend, environ=ranks.UDP))) == 1
