"""`commlayer.tp.overlap` with sequence parallelism: activations are split along the sequence between the layers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import commlayer
from commlayer.frontend.tensor_parallel.travel import LayerError
from commlayer.frontend.work.work import CommWork
from tests import ranks
from tests.process.test_tp import assert_near, exposed, results
from tests.process.test_tp_codec import relative
from tests.tensor_parallel import LAYERS, STYLES, WIDTH, Attention, Mlp

BATCH, LENGTH = 6, 8


class Inner(nn.Module):
    """A layer within a block, given its normed input: as in torchtitan."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.inner(self.norm(x)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.down(torch.relu(self.up(x))))


def stack(kind: str) -> nn.Sequential:
    """The same plain layers at each call."""
    torch.manual_seed(1)
    if kind == "titan":
        return nn.Sequential(*(Inner(Perceptron()) for _ in range(LAYERS)))
    return nn.Sequential(
        *(kind_of() for _ in range(LAYERS) for kind_of in ((Attention, Mlp) if kind == "mixed" else (Mlp,)))
    )


def parallel(kind: str, mesh: DeviceMesh) -> nn.Sequential:
    """The layers with parts of the sequence between them."""
    layers = stack(kind)
    for layer in layers:
        if kind == "titan":
            gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan: dict[str, Any] = {
                "norm": SequenceParallel(),
                "inner": gather,
                "inner.up": ColwiseParallel(),
                "inner.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        else:
            plan = {"norm": SequenceParallel(use_local_output=kind == "mixed")}
            for name in (name for name, _ in layer.named_children() if name in STYLES):
                is_column = STYLES[name] is ColwiseParallel
                plan[name] = (
                    ColwiseParallel(input_layouts=Shard(1)) if is_column else RowwiseParallel(output_layouts=Shard(1))
                )
        parallelize_module(layer, mesh, plan)
    return layers


def whole_input(seed: int = 2) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH)


def joined(part: Tensor) -> Tensor:
    """The sequence of all ranks' parts."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", ["mlps", "mixed", "titan"])
@ranks.on(2, ranks.run_job)
def test_results_are_those_of_the_whole_batch_and_of_one_process(rank: int, size: int, kind: str) -> None:
    mesh, x = init_device_mesh("cpu", (size,)), whole_input()
    own = x.chunk(size, 1)[rank]
    plain = stack(kind)
    alone = x.clone().requires_grad_()
    plain(alone).square().mean().mul(size).backward()  # each rank takes the mean of its part
    layers = parallel(kind, mesh)
    expected = results(layers, own)
    for parts in (2, 3):
        with commlayer.tp.overlap(layers, parts=parts):
            output, gradient, weights = results(layers, own)
        torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-5, atol=1e-6)
        assert_near(weights, expected[2])
        torch.testing.assert_close(joined(output), plain(x), rtol=1e-4, atol=1e-5)
        assert alone.grad is not None
        torch.testing.assert_close(joined(gradient), alone.grad, rtol=1e-4, atol=1e-6)
        exact = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
        for found, right in zip(weights, exact, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
    again = results(layers, own)  # the styles work as before
    assert torch.equal(again[0], expected[0])
    with commlayer.tp.overlap(layers), torch.no_grad():
        torch.testing.assert_close(layers(own), expected[0], rtol=1e-5, atol=1e-6)


NAMES = (
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "all_gather_single", "reduce_scatter_single"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)


def recorded() -> list[tuple[str, int]]:
    """The starts of gathers and scatters from now on, by number, and the first wait for each."""
    events: list[tuple[str, int]] = []
    kind: Any = type(dist.group.WORLD)
    wait = CommWork.wait
    numbers: dict[int, int] = {}
    kept = []

    def noted(start: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = start(self, *args, **kwargs)
            if id(work) not in numbers:
                kept.append(work)
                numbers[id(work)] = len(numbers)
                events.append(("start", numbers[id(work)]))
            return work

        return run

    def waited(self: CommWork, timeout: Any = None) -> bool:
        event = ("wait", numbers.get(id(self), -1))
        if event[1] >= 0 and event not in events:
            events.append(event)
        return wait(self, timeout)

    for name in NAMES:
        setattr(kind, name, noted(getattr(kind, name)))
    CommWork.wait = waited  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("kind", ["mlps", "titan"])
@ranks.on(2, ranks.run_job)
def test_exchanges_overlap_in_both_directions(rank: int, size: int, kind: str) -> None:
    events = recorded()
    layers = parallel(kind, init_device_mesh("cpu", (size,)))
    counts = {}
    for parts in (1, 2, 3):
        with commlayer.tp.overlap(layers, parts=parts):
            x = whole_input().chunk(size, 1)[rank].clone().requires_grad_()
            events.clear()
            output = layers(x)
            forward = events.copy()
            events.clear()
            output.sum().backward()
        counts[parts] = [sum(kind == "start" for kind, _ in seen) for seen in (forward, events)]
        for seen in (forward, events):
            if parts == 1:
                assert len(exposed(seen)) == 2 * LAYERS
            else:
                assert exposed(seen) == [max(n for _, n in seen)], seen  # the last one has nothing to hide behind
    assert counts == {parts: [2 * LAYERS * parts] * 2 for parts in (1, 2, 3)}


@pytest.mark.parametrize("kind", ["mlps", "titan"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_codec_encodes_gathers_and_scatters(rank: int, size: int, kind: str) -> None:
    layers, own = parallel(kind, init_device_mesh("cpu", (size,))), whole_input().chunk(size, 1)[rank]
    exact = results(layers, own)
    errors: dict[str, LayerError]
    with commlayer.tp.overlap(layers, codec="int8") as handle:
        with handle.measured() as errors:
            output, gradient, _ = results(layers, own)
        again = results(layers, own)
    for found, right in ((output, exact[0]), (gradient, exact[1]), (again[0], exact[0])):
        assert 0 < relative(found, right) < 0.1
    names = ("inner", "inner.down") if kind == "titan" else ("up", "down")
    assert set(errors) == {f"{i}.{name}" for i in range(LAYERS) for name in names}
    for error in errors.values():  # one way is a gather, the other one a sum
        assert 0 < error.forward < 0.03
        assert 0 < error.backward < 0.03


@ranks.on(2, ranks.run_job)
def test_what_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))

    def styled(**styles: Any) -> nn.Module:
        return parallelize_module(Mlp(), mesh, styles)

    odd = styled(up=ColwiseParallel(), down=RowwiseParallel(output_layouts=Shard(1)))
    with (
        commlayer.tp.overlap(odd),
        pytest.raises(commlayer.ConfigError, match=r"down .* has 5 places in dimension 1, which do not divide among 2"),
    ):
        odd(torch.randn(4, 5, WIDTH))
    last = styled(up=ColwiseParallel(input_layouts=Shard(2)))
    with (
        commlayer.tp.overlap(last),
        pytest.raises(commlayer.ConfigError, match="splits dimension 2 of 3; sequence parallelism splits the sequence"),
    ):
        last(torch.randn(4, 6, WIDTH))
    with pytest.raises(commlayer.ConfigError, match=r"up .Linear. has input_layouts=Shard.dim=-1"):
        commlayer.tp.overlap(styled(up=ColwiseParallel(input_layouts=Shard(-1))))
    for options, text in (
        ({"use_local_output": True}, "leave use_local_output at its default"),
        (
            {
                "input_layouts": None,
                "desired_input_layouts": None,
                "input_kwarg_layouts": {"x": Shard(1)},
                "desired_input_kwarg_layouts": {"x": Replicate()},
            },
            "an argument that has a name; pass it by its place",
        ),
    ):
        given: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate(), **options}
        block = parallelize_module(
            Inner(Perceptron()), mesh, {"inner": PrepareModuleInput(**given), "inner.up": ColwiseParallel()}
        )
        with pytest.raises(commlayer.ConfigError, match=text):
            commlayer.tp.overlap(block)
