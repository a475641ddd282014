"""`commlayer.megatron` on a layer that looks like Megatron-core's, which is not installed here.."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.megatron import Dispatcher, dispatch_by_host
from tests import ranks
from tests.process.hosts import LOOPBACK, on_hosts

SIZE, WIDTH, EXPERTS, TOP_K = 4, 64, 8, 3
HOSTS = [0, 0, 1, 1]


@dataclasses.dataclass
class Settings:
    """The fields of a TransformerConfig that are read."""

    num_moe_experts: int = EXPERTS
    moe_router_topk: int = TOP_K
    moe_pad_expert_input_to_capacity: bool = False
    moe_shared_expert_overlap: bool = False
    cuda_graph_impl: str = "none"
    params_dtype: torch.dtype = torch.float32


class BaseMoELayer(nn.Module):
    """Megatron-core's steps in its order; the experts multiply rows by a matrix, and by the routing weight."""

    __module__ = "megatron.core.transformer.moe.moe_layer"

    def __init__(self, settings: Settings, group: Any = None, tp_size: int = 1) -> None:
        super().__init__()
        self.config = settings
        self.token_dispatcher: Any = SimpleNamespace(config=settings, ep_group=group, tp_size=tp_size)

    def forward(self, tokens: Tensor, routing_map: Tensor, probs: Tensor, matrices: list[Tensor]) -> Tensor:
        steps = self.token_dispatcher
        rows, weights = steps.dispatch_preprocess(tokens, routing_map, probs)
        rows, counts, weights = steps.dispatch_postprocess(*steps.token_dispatch(rows, weights))
        parts = zip(rows.split(counts.tolist()), weights.split(counts.tolist()), strict=True)
        first = dist.get_rank() * EXPERTS // SIZE
        outputs = torch.cat([(part @ matrices[first + at]) * by[:, None] for at, (part, by) in enumerate(parts)])
        return steps.combine_postprocess(steps.token_combine(steps.combine_preprocess(outputs)))  # type: ignore[no-any-return]


class Job:
    """Values of one rank, whole numbers: sums are exact in any order. Some choices are dropped, as by a capacity."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float64) -> None:
        drawn = torch.Generator().manual_seed(rank)
        count = (5, 0, 7, 3)[rank]

        def whole(*shape: int) -> Tensor:
            return torch.randint(-4, 5, shape, generator=drawn).to(dtype)

        self.tokens = whole(count, 1, WIDTH).requires_grad_()
        order = torch.rand(count, EXPERTS, generator=drawn).argsort(1)[:, :TOP_K]
        kept = torch.rand(count, TOP_K, generator=drawn) < 0.8
        self.routing_map = torch.zeros(count, EXPERTS, dtype=torch.bool).scatter_(1, order, kept)
        self.probs = whole(count, EXPERTS).requires_grad_()
        shared = torch.Generator().manual_seed(99)
        self.matrices = [torch.randint(-2, 3, (WIDTH, 2), generator=shared).to(dtype) for _ in range(EXPERTS)]
        self.gradient = whole(count, 1, 2)

    def expected(self) -> Tensor:
        """The layer's output, of one process that has all experts."""
        share = self.probs * self.routing_map
        every = torch.stack([self.tokens.squeeze(1) @ matrix for matrix in self.matrices], 1)
        return (every * share[:, :, None]).sum(1, keepdim=True)

    def values(self, output: Tensor) -> list[Tensor]:
        """The output and the gradients of tokens and routing weights."""
        return [output.detach(), *torch.autograd.grad(output, [self.tokens, self.probs], self.gradient)]


@ranks.on(SIZE, environ=LOOPBACK)
def test_a_layer_computes_as_in_one_process(rank: int, size: int) -> None:
    with on_hosts(rank, size, HOSTS):
        layer, job = BaseMoELayer(Settings(), dist.group.WORLD), Job(rank)
        assert dispatch_by_host(nn.Sequential(nn.Linear(1, 1), layer)) == 1
        assert isinstance(layer.token_dispatcher, Dispatcher)
        for again in (False, True):  # activations that are computed again in the backward pass
            given = (job.tokens, job.routing_map, job.probs, job.matrices)
            output = checkpoint(layer, *given, use_reentrant=False) if again else layer(*given)
            for mine, theirs in zip(job.values(output), job.values(job.expected()), strict=True):
                assert torch.equal(mine, theirs)
        with torch.no_grad():
            assert torch.equal(layer(*given), job.expected())


@ranks.on(SIZE, environ=LOOPBACK)
def test_rows_between_hosts_may_have_a_codec(rank: int, size: int) -> None:
    with on_hosts(rank, size, HOSTS):
        layer, job = BaseMoELayer(Settings(), dist.group.WORLD), Job(rank, torch.float32)
        dispatch_by_host(layer, policy=commlayer.Policy(codec="int8"))
        found, expected = layer(job.tokens, job.routing_map, job.probs, job.matrices), job.expected()
        torch.testing.assert_close(found, expected, rtol=0.05, atol=2.0)
        assert rank == 1 or not torch.equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "tp_size", "codec", "told"),
    [
        (Settings(), 2, "none", r"each expert is divided among 2 ranks .*: set it to 1"),
        (Settings(moe_pad_expert_input_to_capacity=True), 1, "none", "without padding: switch it off"),
        (Settings(moe_shared_expert_overlap=True), 1, "none", "moe_shared_expert_overlap=True: .*: switch it off"),
        (Settings(cuda_graph_impl="local"), 1, "none", "cuda_graph_impl='local': .*: set 'none'"),
        (Settings(), 1, "topk:0.01", "rows have no next step"),
        (Settings(params_dtype=torch.int32), 1, "int8", "codecs are for floating-point rows"),
    ],
)
def test_unfit_layers_are_refused_by_name(settings: Settings, tp_size: int, codec: str, told: str) -> None:
    model = nn.ModuleDict({"first": BaseMoELayer(Settings()), "second": BaseMoELayer(settings, tp_size=tp_size)})
    before = model["first"].token_dispatcher
    with pytest.raises(commlayer.ConfigError, match=rf"^megatron\.dispatch_by_host: (first|second): .*{told}"):
        dispatch_by_host(model, policy=commlayer.Policy(codec=codec))
    assert model["first"].token_dispatcher is before  # all layers or none


def test_misuse_is_told() -> None:
    with pytest.raises(commlayer.ConfigError, match="no expert layer"):
        dispatch_by_host(nn.Linear(1, 1))
    layer = BaseMoELayer(Settings())
    dispatch_by_host(layer)
    with pytest.raises(commlayer.ConfigError, match="call the steps in Megatron's order"):
        layer.token_dispatcher.token_combine(torch.zeros(1, 1))
