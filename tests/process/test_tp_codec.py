"""`commlayer.tp.overlap(codec=...)`: sums in fewer bits, equal on all ranks, whose error the user can read."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import commlayer
from tests import ranks
from tests.process.test_tp import exposed, recorded, results
from tests.tensor_parallel import BATCH, LAYERS, WIDTH, Attention, Mlp, parallel


def long_inputs() -> Tensor:
    """Sequences so long that no sum of a part is short: short ones travel as they are."""
    torch.manual_seed(2)
    return torch.randn(BATCH, 256, WIDTH)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def assert_same_on_all_ranks(values: Tensor) -> None:
    everywhere = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, values.contiguous())
    assert all(torch.equal(received, values) for received in everywhere)


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.1), ("bf16", 0.03), ("f16", 0.003)])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_rounded_results_are_near_and_equal_on_all_ranks(rank: int, size: int, codec: Any, most: float) -> None:
    mesh = init_device_mesh("cpu", (size,))
    net = parallel(mesh, Mlp)
    exact = results(net, long_inputs())
    with commlayer.tp.overlap(net.layers, parts=2, codec=codec):
        output, gradient, weights = results(net, long_inputs())
    for one, other in zip([output, gradient, *weights], [exact[0], exact[1], *exact[2]], strict=True):
        assert 0 < relative(one, other) < most
    for values in (output, gradient, *weights):
        assert_same_on_all_ranks(values)
    assert all(torch.equal(one, other) for one, other in zip(results(net, long_inputs())[2], exact[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_every_floating_point_type_is_encoded(rank: int, size: int, dtype: torch.dtype) -> None:
    net = parallel(init_device_mesh("cpu", (size,)), Mlp).to(dtype)
    x = long_inputs().to(dtype)
    exact = results(net, x)
    with commlayer.tp.overlap(net.layers, codec="int8"):
        output, gradient, _ = results(net, x)
    assert output.dtype == gradient.dtype == dtype
    assert 0 < relative(output, exact[0]) < 0.1
    assert 0 < relative(gradient, exact[1]) < 0.1
    assert_same_on_all_ranks(output)


def gradient_of(net: nn.Module, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(net(x).square().sum(), x)
    return found


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_the_error_of_each_layer_is_that_of_its_values(rank: int, size: int) -> None:
    """The first layer's output and the input's gradient are the only sums that reach the outside alone."""
    net = parallel(init_device_mesh("cpu", (size,)), Attention, Mlp)
    one, x = net.layers[1], long_inputs()
    exact = one(x) - x
    with commlayer.tp.overlap(one, codec="int8") as handle:
        with handle.measured() as errors:
            found = one(x) - x
        assert set(errors) == {"down"}
        assert errors["down"].forward == pytest.approx(relative(found, exact), rel=1e-3)
        assert math.isnan(errors["down"].backward)
        one(x)
        assert set(errors) == {"down"}  # no longer measured
    with commlayer.tp.overlap(net.layers, codec="int8") as handle, handle.measured() as errors:
        expected = {f"{2 * i}.{name}" for i in range(LAYERS) for name in ("q", "o")}
        expected |= {f"{2 * i + 1}.{name}" for i in range(LAYERS) for name in ("up", "down")}
        gradient_of(net.layers, long_inputs().requires_grad_())
    assert set(errors) == expected
    for name, error in errors.items():
        way = error.forward if name.endswith(("o", "down")) else error.backward
        assert 0 < way < 0.03, name
    with commlayer.tp.overlap(net.layers) as handle, handle.measured() as errors:
        net(long_inputs())
    assert errors == {}  # without a codec nothing is rounded


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_encoded_sums_overlap_in_both_directions(rank: int, size: int) -> None:
    events = recorded()
    net = parallel(init_device_mesh("cpu", (size,)), Attention, Mlp)
    with commlayer.tp.overlap(net.layers, codec="int8"):
        events.clear()
        output = net(long_inputs().requires_grad_())
        forward = events.copy()
        events.clear()
        output.sum().backward()
    for seen in (forward, events):
        assert exposed(seen) == [max(n for _, n in seen)], seen  # the last one has nothing to hide behind


class Wide(nn.Module):
    """Large sums: packets are full."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4096, 8, bias=False)
        self.down = nn.Linear(8, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(x))
        return found


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_int8_sends_a_quarter_of_the_bytes(rank: int, size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(Wide(), mesh, styles)
    x = torch.randn(64, 4096, requires_grad=True)
    sent: dict[str, int] = {}
    for codec in ("none", "int8"):
        with commlayer.tp.overlap(net, codec=codec):
            sent[codec] = ranks.payload_sent(lambda: net(x).sum().backward())
    assert sent["none"] >= 2 * 64 * 4096 * 4  # two all-reduces; of each, a rank sends one shard and one sum
    assert 3.7 < sent["none"] / sent["int8"] < 4


@ranks.on(2, ranks.run_gloo)
def test_a_group_of_another_backend_is_refused(rank: int, size: int) -> None:
    net = parallel(init_device_mesh("cpu", (size,)), Mlp)
    with pytest.raises(commlayer.ConfigError, match="is not commlayer's; call init_process_group"):
        commlayer.tp.overlap(net.layers, codec="int8")
    with commlayer.tp.overlap(net.layers) as handle:  # refused without a trace
        net(long_inputs())
        with handle.measured(), pytest.raises(commlayer.ConfigError, match="within measured"), handle.measured():
            pass
    for codec in ("int4", "topk:0.1", None):
        with pytest.raises(commlayer.ConfigError, match="use one of none, f16, bf16, int8; the others keep errors"):
            commlayer.tp.overlap(net.layers, codec=codec)  # type: ignore[arg-type]
