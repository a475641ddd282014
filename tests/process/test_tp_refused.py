"""What `commlayer.tp.overlap` refuses by name, and the arguments and results that it splits and joins."""

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import commlayer
from tests import ranks
from tests.fake_transport import on_fake
from tests.tensor_parallel import BATCH, WIDTH, Mlp, inputs, parallel


def refused(text: str, layers: nn.Module, **options: Any) -> None:
    with pytest.raises(commlayer.ConfigError, match=text):
        commlayer.tp.overlap(layers, **options)


class Within(nn.Module):
    """Its layer within a context, or called by a function."""

    def __init__(self, layer: nn.Module, context: Any = contextlib.nullcontext, call: Any = None) -> None:
        super().__init__()
        self.layer, self.context, self.call = layer, context, call

    def forward(self, x: Tensor) -> Any:
        with self.context():
            return self.call(self.layer, x) if self.call else self.layer(x)


@ranks.on(1, on_fake)
def test_layers_that_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def styled(**styles: Any) -> nn.Module:
        return parallelize_module(Mlp(), mesh, styles)

    layers = parallel(mesh, Mlp).layers
    refused(r"tp.overlap\(Mlp\): it has no column and row layers", Mlp())
    refused("tp.overlap.ModuleList.: it has no forward .* as the model", nn.ModuleList(layers))
    with commlayer.tp.overlap(layers):
        for other in (layers, layers[0], nn.Sequential(layers)):
            refused("another tp.overlap has it, or a part of it", other)
    for parts in (0, True, 2.0):
        refused(rf"parts={parts}\): use a whole number from 1, as 2", layers, parts=parts)
    refused("Sequential.forward has no argument 'mask'", layers, split=["mask"])
    refused(
        "up .Linear. has input_layouts=Shard.*sequence parallelism", styled(up=ColwiseParallel(input_layouts=Shard(-1)))
    )
    refused("down .Linear. has .*output_layouts=Shard", styled(down=RowwiseParallel(output_layouts=Shard(-1))))
    refused("1 .BatchNorm1d. would be those of a part", nn.Sequential(styled(up=ColwiseParallel()), nn.BatchNorm1d(5)))
    refused("0 .CheckpointWrapper. is checkpointed", nn.Sequential(checkpoint_wrapper(styled(up=ColwiseParallel()))))
    compiled = styled(up=ColwiseParallel())
    compiled.compile()
    refused("leave torch.compile out", nn.Sequential(compiled))
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    sharded: Any = fully_shard(parallelize_module(Mlp(), both["tp"], {"up": ColwiseParallel()}), mesh=both["dp"])
    refused("FSDPMlp is sharded by fully_shard", nn.Sequential(sharded))
    with pytest.warns(UserWarning, match="1 draw their masks part by part"):
        commlayer.tp.overlap(nn.Sequential(layers, nn.Dropout(0.1))).remove()


@ranks.on(1, on_fake)
def test_installations_that_are_refused(rank: int, size: int) -> None:
    layers = parallel(init_device_mesh("cpu", (1,)), Mlp).layers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        refused("needs greenlet: pip install greenlet$", layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1, dtype=torch.int32))
        refused("has no _set_sequence_nr; use torch 2.11 to 2.15", layers)


@ranks.on(1, on_fake)
def test_calls_that_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def fails(text: str, layers: nn.Module, x: Tensor | None = None, **options: Any) -> None:
        with commlayer.tp.overlap(layers, **options), pytest.raises(commlayer.ConfigError, match=text):
            layers(inputs() if x is None else x).sum().backward()

    layers = parallel(mesh, Mlp).layers
    fails("a batch of 5 cannot be split in 2 equal parts", layers, inputs()[:5])
    for context, name in (
        (torch.no_grad, "torch.no_grad"),
        (functools.partial(torch.autocast, "cpu"), "torch.autocast"),
        (functools.partial(torch.autograd.graph.save_on_cpu), "saved_tensors_hooks"),
    ):
        fails(f"{name}.* began within the layers, and spans layer.*down .Linear.", Within(layers, context))
    for reentrant, text in ((False, "torch.utils.checkpoint"), (True, "torch.no_grad .*use_reentrant=True")):
        inner = Within(layers, call=functools.partial(checkpoint, use_reentrant=reentrant))
        fails(f"{text}.* began within the layers", inner, inputs().requires_grad_())
        with commlayer.tp.overlap(layers), pytest.raises(commlayer.ConfigError, match="a checkpoint calls the layers"):
            inner(inputs().requires_grad_()).sum().backward()
    fails(r"Within returned a tensor of shape \(\) for 3 samples", Within(layers, call=lambda layer, x: layer(x).sum()))
    fails("returned .* for one part", Within(layers, call=lambda layer, x: (layer(x), x[0, 0, 0].item())))
    linear = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel())
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    wrapped = parallelize_module(Within(linear), mesh, whole)
    fails("layer .Linear. is given a DTensor; leave PrepareModuleInput out", wrapped, inputs().requires_grad_())


class Masked(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mlp = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        return {"out": self.mlp(x * mask), "masks": (mask, scale is None), "name": "masked"}


@ranks.on(1, on_fake)
def test_arguments_and_results_of_any_structure(rank: int, size: int) -> None:
    torch.manual_seed(1)
    layers, x = Masked(init_device_mesh("cpu", (1,))), inputs()
    masks = torch.rand(BATCH, 1, 1)
    expected = layers(x, masks)
    with (
        commlayer.tp.overlap(layers),
        pytest.raises(commlayer.ConfigError, match=r"mask .*may be a batch, too; .*split="),
    ):
        layers(x, masks)
    with commlayer.tp.overlap(layers, split=["x", "mask"]):
        found = layers(x, mask=masks)
        with pytest.raises(commlayer.ConfigError, match=r"x, mask have \[5, 6\] samples"):
            layers(x, masks[:5])
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["masks"][0], masks)
    assert found["masks"][1] is True
    assert found["name"] == "masked"
    sequence_first = parallel(init_device_mesh("cpu", (1,)), Mlp).layers
    expected = sequence_first(x.transpose(0, 1))
    with commlayer.tp.overlap(sequence_first, dim=1):
        assert torch.equal(sequence_first(x.transpose(0, 1)), expected)


@ranks.on(1, on_fake)
def test_a_copy_is_not_split(rank: int, size: int) -> None:
    layers = parallel(init_device_mesh("cpu", (1,)), Mlp).layers
    with commlayer.tp.overlap(layers):
        copied = copy.deepcopy(layers)
        assert torch.equal(copied(inputs()[:5]), copied(inputs())[:5])
