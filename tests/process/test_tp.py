"""`commlayer.tp.overlap`: results are those of the whole batch, all-reduces overlap, and errors stay errors."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.work.work import CommWork
from tests import ranks
from tests.fake_transport import on_fake
from tests.tensor_parallel import Attention, Mlp, inputs, parallel


def results(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the weights."""
    x = x.clone().requires_grad_()
    output = net(x)
    output.square().mean().backward()
    assert x.grad is not None
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    whole = [
        gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
        if gradient is not None
    ]
    return output.detach(), x.grad, whole


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@ranks.on(2, ranks.run_job)
def test_mlps_have_the_results_of_the_whole_batch(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    expected = results(parallel(mesh, Mlp), inputs())
    net = parallel(mesh, Mlp)
    for parts in (2, 3):
        with commlayer.tp.overlap(net.layers, parts=parts):
            output, gradient, weights = results(net, inputs())
        assert torch.equal(output, expected[0])
        assert torch.equal(gradient, expected[1])
        assert_near(weights, expected[2])
    assert type(net.layers) is nn.Sequential
    assert all(torch.equal(one, other) for one, other in zip(results(net, inputs())[2], expected[2], strict=True))


@ranks.on(2, ranks.run_job)
def test_attention_has_the_results_of_the_whole_batch(rank: int, size: int) -> None:
    """q, k and v share an all-reduce, so their gradients are added before it: to rounding."""
    mesh = init_device_mesh("cpu", (size,))
    expected = results(parallel(mesh, Attention, Mlp), inputs())
    net = parallel(mesh, Attention, Mlp)
    found = {}
    for parts in (1, 2):
        with commlayer.tp.overlap(net.layers, parts=parts):
            found[parts] = results(net, inputs())
        assert torch.equal(found[parts][0], expected[0])
        torch.testing.assert_close(found[parts][1], expected[1], rtol=1e-5, atol=1e-6)
        assert_near(found[parts][2], expected[2])
    assert torch.equal(found[1][1], found[2][1])


Events = list[tuple[str, int]]


def recorded() -> Events:
    """The starts of all-reduces from now on, by number, and the first wait for each; and their classes."""
    events: Events = []
    kind: Any = type(dist.group.WORLD)
    start, wait = kind.allreduce, CommWork.wait
    numbers: dict[int, int] = {}
    kept = []

    def allreduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = start(self, *args, **kwargs)
        kept.append(work)
        numbers[id(work)] = len(numbers)
        events.append(("start", numbers[id(work)]))
        return work

    def waited(self: CommWork, timeout: Any = None) -> bool:
        event = ("wait", numbers.get(id(self), -1))
        if event[1] >= 0 and event not in events:
            events.append(event)
        return wait(self, timeout)

    kind.allreduce, CommWork.wait = allreduce, waited  # type: ignore[method-assign]
    return events


def exposed(events: Events) -> list[int]:
    """The all-reduces that were waited for before another one was started."""
    spans = [(n, events[events.index(("start", n)) + 1 : i]) for i, (kind, n) in enumerate(events) if kind == "wait"]
    return [n for n, between in spans if all(kind == "wait" for kind, _ in between)]


@ranks.on(2, ranks.run_job)
def test_all_reduces_overlap_in_both_directions(rank: int, size: int) -> None:
    events = recorded()
    mesh = init_device_mesh("cpu", (size,))
    net = parallel(mesh, Attention, Mlp)
    counts = {}
    for parts in (0, 1, 2, 3):
        x = inputs().requires_grad_()
        handle = commlayer.tp.overlap(net.layers, parts=parts) if parts else None
        events.clear()
        output = net(x)
        forward = events.copy()
        events.clear()
        output.sum().backward()
        counts[parts] = [sum(kind == "start" for kind, _ in order) for order in (forward, events)]
        for order in (forward, events):
            if parts < 2:
                assert len(exposed(order)) == counts[parts][order is events]
            else:
                assert exposed(order) == [max(n for _, n in order)], order  # the last one has nothing to hide behind
        if handle is not None:
            handle.remove()
    assert counts == {0: [6, 12], 1: [6, 6], 2: [12, 12], 3: [18, 18]}


@ranks.on(2, on_fake)
def test_all_reduces_have_the_latency_class(rank: int, size: int) -> None:
    net = parallel(init_device_mesh("cpu", (size,)), Mlp)
    world: Any = dist.group.WORLD
    operations = world._native.operations
    with commlayer.tp.overlap(net.layers):
        operations.clear()
        results_of = net(inputs().requires_grad_())
        assert {priority for _, _, priority in operations} == {0}
        operations.clear()
        results_of.sum().backward()
        assert {priority for _, _, priority in operations} == {0}


@ranks.on(2, ranks.run_job)
def test_several_steps_of_training(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))

    def losses(parts: int) -> list[float]:
        net = parallel(mesh, Attention, Mlp)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if parts:
            commlayer.tp.overlap(net, parts=parts)  # the whole model
        found = []
        for step in range(5):
            optimizer.zero_grad()
            loss = net(inputs(step)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        with torch.no_grad():  # the last batch of an evaluation may be odd
            found.append(net(inputs()[:5]).square().mean().item())
        return found

    expected = losses(0)
    assert expected[4] < 0.9 * expected[0]
    torch.testing.assert_close(losses(2), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", ["fully_shard", "replicas", "DDP"])
@ranks.on(4, ranks.run_job)
def test_with_data_parallelism(rank: int, size: int, kind: str) -> None:
    """Data parallelism takes other dimensions of the mesh; gradients travel during the next forward pass."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))

    def losses(parts: int) -> list[float]:
        net = parallel(mesh["tp"], Attention, Mlp)
        model: nn.Module = net
        if kind == "DDP":
            _pre_dp_module_transform(net)
            group = mesh.get_group("replicate")
            model = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
        else:
            data = mesh["replicate"] if kind == "fully_shard" else mesh["replicate", "shard"]
            fully_shard(net.layers, mesh=data)
            fully_shard(net, mesh=data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = commlayer.overlap(model, optimizer)
        if parts:
            commlayer.tp.overlap(net.layers, parts=parts)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(inputs(step + 10 * mesh.get_local_rank("replicate"))).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        handle.remove()
        return found

    torch.testing.assert_close(losses(2), losses(0), rtol=1e-5, atol=0.0)


class Picky(nn.Module):
    """Fails in the call whose number is `fails_in`."""

    fails_in = 0

    def forward(self, x: Tensor) -> Tensor:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise ValueError("this sample is not for me")
        return x


@ranks.on(2, ranks.run_job)
def test_an_exception_in_a_part_leaves_everything_usable(rank: int, size: int) -> None:
    net = parallel(init_device_mesh("cpu", (size,)), Mlp)
    expected = results(net, inputs())
    picky = Picky()
    net.layers.insert(2, picky)
    commlayer.tp.overlap(net)
    for part in (1, 2):
        picky.fails_in = part
        with pytest.raises(ValueError, match="not for me"):
            net(inputs())
        found = results(net, inputs())
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def _lose_a_peer(rank: int, size: int, where: str) -> str:
    ranks.init(rank, size)
    net = parallel(init_device_mesh("cpu", (size,)), Mlp)
    commlayer.tp.overlap(net.layers)
    net(inputs()).sum().backward()
    if rank == 1 and where == "forward":
        os._exit(1)
    with pytest.raises(commlayer.PeerLostError) as lost:  # noqa: PT012  # in the forward or in the backward pass
        loss = net(inputs()).sum()
        if rank == 1:
            os._exit(1)
        loss.backward()
    return str(lost.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_peer_that_dies_is_named(where: str) -> None:
    environ = {"COMMLAYER_SHM": "0", "COMMLAYER_PEER_TIMEOUT_S": "1"}
    first, second = ranks.outcomes(_lose_a_peer, 2, where, environ=environ)
    assert first.error is None
    assert "rank 1" in first.result
    assert second.exit_code == 1
