"""Models for tests of tensor parallelism."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HEADS, LAYERS, BATCH = 16, 4, 3, 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + down


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.o(mixed)
        return x + out


class Net(nn.Module):
    """Layers between an embedding and a head, which are not parallel."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(kind() for _ in range(LAYERS) for kind in kinds))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(x)))
        return out


STYLES: dict[str, type[ColwiseParallel | RowwiseParallel]] = {
    "up": ColwiseParallel,
    "down": RowwiseParallel,
    **dict.fromkeys("qkv", ColwiseParallel),
    "o": RowwiseParallel,
}


def parallel(mesh: DeviceMesh, *kinds: type[nn.Module]) -> Net:
    """The same model at each call."""
    torch.manual_seed(1)
    net = Net(*kinds)
    for layer in net.layers:
        parallelize_module(layer, mesh, {name: STYLES[name]() for name, _ in layer.named_children() if name in STYLES})
    return net


def inputs(seed: int = 2) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(BATCH, 5, WIDTH)
