"""`commlayer.tp.mesh`: results of one process, bytes of the planner's formula, and what is refused by name."""

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import commlayer
from commlayer.frontend.tensor_parallel.mesh import FORMS, MeshLinear
from commlayer.planner import Layout, Mesh, Transformer
from tests import ranks

FORM = {4: [("2d", 1)], 8: [("2.5d", 2), ("3d", 1)], 16: [("2d", 1), ("2.5d", 4)]}
HOSTS = {**ranks.NETWORK, "OMP_NUM_THREADS": "1"}
"""Each rank is a host: every byte is counted."""


def chain(form: str, depth: int, linears: list[nn.Linear], **options: Any) -> list[MeshLinear]:
    """Layers, each of which takes what the one before it returns."""
    return [
        commlayer.tp.mesh(linear, form, depth=depth, swapped=form == "3d" and place % 2 == 1, **options)  # type: ignore[arg-type]
        for place, linear in enumerate(linears)
    ]


def whole_numbers(*shape: int, most: int = 3) -> Tensor:
    """Small whole numbers, whose sums and products float64 has exactly, in any order."""
    return torch.randint(-most, most + 1, shape).double()


def linears_of(widths: list[int], *, bias: bool) -> list[nn.Linear]:
    """Layers of whole numbers; the same on all ranks."""
    found = []
    for inputs, outputs in itertools.pairwise(widths):
        linear = nn.Linear(inputs, outputs, bias=bias).double()
        for parameter in linear.parameters():
            parameter.data = whole_numbers(*parameter.shape)
        found.append(linear)
    return found


def block_of(layer: MeshLinear, weight: Tensor) -> Tensor:
    """This rank's block of a whole matrix of weights."""
    q = layer.mesh.side
    block = weight.chunk(q, 0)[layer.n].chunk(q, 1)[layer.k]
    return block.chunk(q, 0)[layer.part] if layer.mesh.form == "3-D" else block


@pytest.mark.parametrize("size", [4, 8, 16])
def test_results_equal_one_process(size: int) -> None:
    ranks.run_job(_compare, size, environ=HOSTS)


def _compare(rank: int, size: int) -> None:
    draw = torch.Generator().manual_seed(size)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    for form, depth in FORM[size]:
        mesh = Mesh.of(FORMS[form], size, depth)
        step = mesh.side**2
        for kept in (True, False):
            torch.manual_seed(number(0, 1000))
            widths = [step * number(1, 4) for _ in range(4)]
            linears = linears_of(widths, bias=kept)
            x = whole_numbers(mesh.rows * number(1, 4), number(1, 4), widths[0]).requires_grad_()
            dy = whole_numbers(*x.shape[:2], widths[-1])
            y = x
            for linear in linears:
                y = F.relu(linear(y))
            y.backward(dy)
            layers = chain(form, depth, linears, kept=kept, panels=number(1, 5))
            own = layers[0].split(x.detach()).clone().requires_grad_()
            found = own
            for layer in layers:
                found = F.relu(layer(found))
            found.backward(layers[-1].split_output(dy))
            assert torch.equal(found, layers[-1].split_output(y)), (form, kept)
            assert x.grad is not None
            assert own.grad is not None
            assert torch.equal(own.grad, layers[0].split(x.grad)), (form, kept)
            for linear, layer in zip(linears, layers, strict=True):
                assert linear.weight.grad is not None
                assert layer.weight.grad is not None
                assert torch.equal(layer.weight.grad, block_of(layer, linear.weight.grad)), (form, kept)
                if linear.bias is not None:
                    assert linear.bias.grad is not None
                    assert layer.bias is not None
                    assert layer.bias.grad is not None
                    assert torch.equal(layer.bias.grad, linear.bias.grad.chunk(mesh.side)[layer.n])
            with torch.no_grad():
                again = layers[0].split(x.detach())
                for layer in layers:
                    again = F.relu(layer(again))
            assert torch.equal(again, found)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_bytes_are_those_of_the_planner(size: int) -> None:
    ranks.run_job(_count, size, environ=HOSTS)


def _count(rank: int, size: int) -> None:
    for form, depth in FORM[size]:
        mesh = Mesh.of(FORMS[form], size, depth)
        width = 8 * mesh.side**2 if size < 16 else 128  # so that no all-reduce is short: these take one step
        model = Transformer(1, width, mesh.side, length=16, sequences=2 * mesh.rows, inner=2 * width, value_bytes=8)
        for kept in (True, False):
            torch.manual_seed(1)
            linears = [nn.Linear(inputs, outputs, bias=False).double() for inputs, outputs in model.linears]
            layers = chain(form, depth, linears, kept=kept)
            inputs = [
                layer.split(torch.randn(model.sequences, model.length, layer.in_features).double()) for layer in layers
            ]
            layout = Layout(mesh, batch=model.sequences, kept=kept)
            assert layout.refusal(model) == ""
            for _ in range(5):  # a packet that the kernel drops travels twice
                dist.barrier()
                before = commlayer.stats()["payload_bytes_received"]
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x.clone().requires_grad_()).sum().backward()
                own = commlayer.stats()["payload_bytes_received"] - before
                found: list[Any] = [None] * size
                dist.all_gather_object(found, own)
                if found == [layout.received_bytes(model)] * size:
                    break
            assert found == [layout.received_bytes(model)] * size, (form, kept, found, layout.received_bytes(model))


@ranks.on(4, ranks.run_job, environ={"OMP_NUM_THREADS": "1"})
def test_training_follows_one_process(rank: int, size: int) -> None:
    """Random values in float64, with an optimizer, and compiled."""
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    first, second = (commlayer.tp.mesh(alone[i], "2d") for i in (0, 2))  # type: ignore[arg-type]
    split: nn.Module = nn.Sequential(first, nn.GELU(), second)
    losses: list[list[float]] = []
    x, target = torch.randn(4, 3, 8).double(), torch.randn(4, 3, 4).double()
    for model, inputs, wanted in ((alone, x, target), (split, first.split(x), second.split_output(target))):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run = torch.compile(model, backend="eager") if model is split else model
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = (run(inputs) - wanted).square().sum()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            if model is split:
                dist.all_reduce(total)
            losses[-1].append(float(total))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][4] < losses[0][0]


class Head(nn.Module):
    """Its output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


@ranks.on(4, ranks.run_job)
def test_what_is_refused(rank: int, size: int) -> None:
    def fails(text: str, linear: nn.Module, form: str = "2d", **options: Any) -> None:
        with pytest.raises(commlayer.ConfigError, match=text):
            commlayer.tp.mesh(linear, form, **options)  # type: ignore[arg-type]

    torch.manual_seed(1)
    linear = nn.Linear(8, 16)
    fails("form='1d'.: use one of 2d, 2.5d, 3d", linear, "1d")
    fails("ranks=4 is no cube, which 3-D needs; give 8 or 27", linear, "3d")
    fails("ranks=4 is no square times 2, which 2.5-D needs; give 8 or 18", linear, "2.5d", depth=2)
    fails("depth=1 does not fit 2.5-D", linear, "2.5d")
    fails("only 3d swaps", linear, swapped=True)
    fails("panels=0.: use a whole number", linear, panels=0)
    fails("it has dropout, whose masks would be equal", nn.Sequential(linear, nn.Dropout(0.1)))
    fails("Sequential.: give an nn.Linear", nn.Sequential(linear))
    tied = Head()
    fails("belongs to another module, too, as that of a tied head", tied.head)
    fails("in_features=7 is no multiple of 2.*pad the layer to 8", nn.Linear(7, 16))
    fails("out_features=9 is no multiple of 2.*pad the layer to 10", nn.Linear(8, 9))
    fails("is not commlayer's", linear, group=dist.new_group(backend="gloo"))
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        fails("ranks=3 is no square, which 2-D needs; give 4 or 9", linear, group=three)
    torch.manual_seed(rank == 1)
    with pytest.raises(commlayer.MismatchError, match="of rank 1 of the group differ") as error:
        commlayer.tp.mesh(nn.Linear(8, 16), "2d")
    assert error.value.culprit == 1
    layer = commlayer.tp.mesh(linear, "2d")
    for x in (torch.randn(4, 8), torch.randn(4), torch.randn(4, 4).double()):
        with pytest.raises(commlayer.ConfigError, match=r"give this rank's rows of 4 columns in torch.float32"):
            layer(x)
    with pytest.raises(commlayer.ConfigError, match=r"give a multiple of 2 in dimension 0, and 8 columns"):
        layer.split(torch.randn(3, 8))
    assert layer(torch.randn(0, 4)).shape == (0, 8)


def _lose_a_peer(rank: int, size: int) -> str:
    ranks.init(rank, size)
    torch.manual_seed(1)
    layer = commlayer.tp.mesh(nn.Linear(8, 8), "2d")
    found = layer(torch.randn(2, 4))
    if rank == 1:
        os._exit(1)
    with pytest.raises(commlayer.CommError) as lost:  # noqa: PT012  # in whichever exchange comes first
        found.sum().backward()
        for _ in range(1000):
            layer(torch.randn(2, 4))
    with contextlib.suppress(commlayer.CommError):
        dist.destroy_process_group()
    return type(lost.value).__name__


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    found = ranks.outcomes(_lose_a_peer, 4, environ={"COMMLAYER_SHM": "0", "COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert [outcome.error for outcome in found[:1] + found[2:]] == [None] * 3
    assert found[1].exit_code == 1
