"""Bytes of replicas, shards, stages and experts, counted while they run on virtual ranks; memory in numbers by hand."""

import dataclasses
import re
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from commlayer.planner.exchange import Exchange
from commlayer.planner.layout import Layout
from commlayer.planner.mesh import Mesh
from commlayer.planner.transformer import Transformer
from tests.meshes import Shards, Virtual, groups

DENSE = Transformer(layers=16, width=8, heads=2, length=4, sequences=32, value_bytes=8)
EXPERTS = dataclasses.replace(DENSE, experts=16, top_k=4)
COUNTS = (4, 8, 16)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Every linear layer of DENSE; the first third of the widest one's output goes on, for want of attention."""
    qkv, projection, up, down = weights
    x = x + (x @ qkv)[:, : DENSE.width] @ projection
    return x + torch.tanh(x @ up) @ down


def assert_counted(ranks: Virtual, exchanges: list[Exchange], count: int) -> None:
    for rank in range(count):
        expected: Counter[tuple[int, ...]] = Counter()
        messages: Counter[tuple[int, ...]] = Counter()
        for exchange in exchanges:
            expected[exchange.axis.group(rank)] += exchange.received_bytes
            messages[exchange.axis.group(rank)] += exchange.messages
        assert expected == {group: size for (own, group), size in ranks.bytes.items() if own == rank}
        assert messages == {group: size for (own, group), size in ranks.messages.items() if own == rank}


def trained(x: Shards, weights: list[Shards], dy: Shards) -> list[Shards]:
    """Gradients of each rank's weights, by weight."""
    found = []
    for rank, (own_x, own_dy) in enumerate(zip(x, dy, strict=True)):
        own = [weight[rank].clone().requires_grad_() for weight in weights]
        found.append(torch.autograd.grad(forward(own_x, own), own, own_dy))
    return [list(column) for column in zip(*found, strict=True)]


def one_process() -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    tokens = DENSE.sequences * DENSE.length
    x, dy = random(tokens, DENSE.width), random(DENSE.width, tokens).T
    weights = [random(*shape) / 3 for shape in DENSE.linears]
    return x, dy, weights, [outputs[0] for outputs in trained([x], [[a] for a in weights], [dy])]


@pytest.mark.parametrize("count", COUNTS)
def test_replicas(count: int) -> None:
    x, dy, weights, right = one_process()
    ranks = Virtual()
    found = trained(list(x.chunk(count)), [[a] * count for a in weights], list(dy.chunk(count)))
    flat = [torch.cat([shards[rank].flatten() for shards in found]) for rank in range(count)]
    for own in ranks.all_reduce(flat, groups((count,), 0)):
        torch.testing.assert_close(own, torch.cat([tensor.flatten() for tensor in right]))
    layout = Layout(replicas=count, batch=DENSE.sequences // count)
    assert_counted(ranks, list(layout.exchanges(DENSE)), count)
    assert layout.received_bytes(DENSE) == 8 * 24 * (count - 1) * DENSE.width**2 // count


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_shards(count: int, kept: bool) -> None:
    x, dy, weights, right = one_process()
    ranks, along = Virtual(), groups((count,), 0)
    flat = torch.cat([weight.flatten() for weight in weights])
    sizes = [weight.numel() for weight in weights]
    shards = list(flat.chunk(count))
    for _ in range(1 if kept else 2):  # before the forward and before the backward pass
        gathered = [
            [part.view(shape) for part, shape in zip(own.split(sizes), DENSE.linears, strict=True)]
            for own in ranks.all_gather(shards, along, 0)
        ]
    by_weight = [list(column) for column in zip(*gathered, strict=True)]
    found = trained(list(x.chunk(count)), by_weight, list(dy.chunk(count)))
    whole = [torch.cat([by_rank[rank].flatten() for by_rank in found]) for rank in range(count)]
    gradient = torch.cat(ranks.reduce_scatter(whole, along, 0))
    torch.testing.assert_close(gradient, torch.cat([tensor.flatten() for tensor in right]))
    layout = Layout(replicas=count, is_sharded=True, batch=DENSE.sequences // count, kept=kept)
    assert_counted(ranks, list(layout.exchanges(DENSE)), count)
    if not kept:  # 36 (P - 1) / P h^2, at 8 ranks 31.5 h^2
        assert layout.received_bytes(DENSE) == 8 * 36 * (count - 1) * DENSE.width**2 // count


@pytest.mark.parametrize("count", COUNTS)
def test_experts(count: int) -> None:
    """Every expert gets as many tokens; their outputs, added up at home, are those of one process."""
    tokens, k = EXPERTS.sequences * EXPERTS.length, EXPERTS.top_k
    x, dy = random(tokens, EXPERTS.width), random(EXPERTS.width, tokens).T
    up = random(EXPERTS.experts, EXPERTS.width, EXPERTS.hidden)
    chosen = torch.stack([(torch.arange(tokens) + shift) % EXPERTS.experts for shift in (0, 8, 4, 12)], 1)

    def run(x: Tensor, chosen: Tensor) -> Tensor:
        return torch.stack([torch.tanh(x[t] @ up[e]).sum() * x[t] for t, row in enumerate(chosen) for e in row])

    whole_x = x.clone().requires_grad_()
    y = run(whole_x, chosen).view(tokens, k, -1).sum(1)
    right = torch.autograd.grad(y, whole_x, dy)[0]

    ranks, along = Virtual(), groups((count,), 0)
    owner = chosen // (EXPERTS.experts // count)
    order = [own.flatten().argsort(stable=True) for own in owner.chunk(count)]
    rows = [
        own.flatten()[o].bincount(minlength=count).tolist() for own, o in zip(owner.chunk(count), order, strict=True)
    ]
    assert {row for own in rows for row in own} == {tokens * k // count**2}

    def there(values: Shards) -> list[Shards]:
        """Copies of each token, one for each expert, at the experts."""
        copies = [v.repeat_interleave(k, 0)[o] for v, o in zip(values, order, strict=True)]
        return ranks.all_to_all([list(c.split(r)) for c, r in zip(copies, rows, strict=True)], along)

    def back(values: list[Shards]) -> Shards:
        """The sums of a token's values, at home."""
        found = []
        for own, o in zip(ranks.all_to_all(values, along), order, strict=True):
            home = torch.empty(len(o), EXPERTS.width, dtype=torch.float64)
            home[o] = torch.cat(own)
            found.append(home.view(-1, k, EXPERTS.width).sum(1))
        return found

    picked = [own.flatten()[o].split(r) for own, o, r in zip(chosen.chunk(count), order, rows, strict=True)]
    inputs = [[tensor.detach().requires_grad_() for tensor in own] for own in there(list(x.chunk(count)))]
    outputs = [
        [run(values, picked[source][rank].unsqueeze(1)) for source, values in enumerate(own)]
        for rank, own in enumerate(inputs)
    ]
    torch.testing.assert_close(torch.cat(back([[o.detach() for o in own] for own in outputs])), y.detach())
    gradients = there(list(dy.chunk(count)))
    through = [list(torch.autograd.grad(o, i, g)) for o, i, g in zip(outputs, inputs, gradients, strict=True)]
    torch.testing.assert_close(torch.cat(back(through)), right)

    layout = Layout(replicas=count, expert_ranks=count, batch=EXPERTS.sequences // count)
    assert layout.refusal(EXPERTS) == ""
    all_to_all = [exchange for exchange in layout.exchanges(EXPERTS) if exchange.kind == "all_to_all"]
    assert_counted(ranks, all_to_all, count)
    rest = [exchange for exchange in layout.exchanges(EXPERTS) if exchange.kind != "all_to_all"]
    assert [exchange.received_bytes for exchange in rest] == [
        8 * 8 * (count - 1) * EXPERTS.width**2 // count
    ]  # 4 h^2 of DP


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("count", COUNTS)
def test_stages(count: int, tensor: int) -> None:
    """Each rank of a mesh sends its columns to the next stage, where the whole is gathered."""
    ranks = Virtual()
    tokens = 2 * DENSE.length
    x = random(tokens, DENSE.width)
    shape = (count, tensor)
    for way in (-1, 1):  # outputs, and gradients on the way back
        parts = [x.chunk(tensor, 1)[rank % tensor] for rank in range(count * tensor)]
        sent = list(parts)
        for rank, group in enumerate(groups(shape, 0)):
            source = rank + way * tensor
            if source in group:
                parts[rank] = ranks.receive(rank, group, source, sent[source])
        if tensor > 1:
            receives = [0 <= rank // tensor + way < count for rank in range(count * tensor)]
            along = [group if receives[rank] else (rank,) for rank, group in enumerate(groups(shape, 1))]
            whole = ranks.all_gather(parts, along, 1)
            assert all(torch.equal(received, x) for received, is_there in zip(whole, receives, strict=True) if is_there)
    layout = Layout(Mesh.of("1-D", tensor) if tensor > 1 else Mesh(), stages=count, batch=2)
    for rank in range(count * tensor):
        stage = layout.stage_of(rank)
        expected = sum(exchange.received_bytes for exchange in layout.boundary(DENSE, stage))
        assert sum(size for (own, _), size in ranks.bytes.items() if own == rank) == expected
        assert expected == x.nbytes * (1 if stage in (0, count - 1) else 2)  # S from each neighbour


def test_recomputation_repeats_the_forward_exchanges() -> None:
    layout = Layout(Mesh.of("1-D", 4), batch=2)
    again = dataclasses.replace(layout, recompute=True)
    assert again.received_bytes(DENSE) == 1.5 * layout.received_bytes(DENSE)


def test_memory_of_replicas_and_shards() -> None:
    """12 h^2 parameters of 16 bytes; 16 h values per token of 2 bytes; 8 tokens."""
    model = Transformer(2, width=8, heads=2, length=4, sequences=8)
    parameters, activations = 12 * 64, 2 * 16 * 8 * 8
    assert Layout(replicas=4, batch=2).layer_bytes(model, 1) == 16 * parameters + activations
    shards = Layout(replicas=4, is_sharded=True, batch=2, kept=False)
    assert shards.layer_bytes(model, 1) == 4 * parameters + activations
    assert shards.working_bytes(model) == 3 * 2 * parameters
    assert dataclasses.replace(shards, kept=True).layer_bytes(model, 1) == 6 * parameters + activations
    again = Layout(replicas=4, batch=2, recompute=True)
    assert again.layer_bytes(model, 3) == 16 * parameters + 3 * 2 * 8 * 8
    assert again.working_bytes(model) == activations


def test_memory_of_meshes() -> None:
    """1-D keeps 4 of 16 h whole; a square and a cube split all, and keep their panels, if at all, beyond their own."""
    model = Transformer(2, width=8, heads=4, length=4, sequences=8)
    parameters, tokens = 12 * 64, 32
    assert Layout(Mesh.of("1-D", 4), batch=8).layer_bytes(model, 1) == 4 * parameters + 2 * tokens * 8 * (4 + 12 // 4)
    square = Layout(Mesh.of("2-D", 4), batch=8, kept=False)
    assert square.layer_bytes(model, 2) == 4 * parameters + 2 * 2 * tokens * 8 * 16 // 4
    assert square.working_bytes(model) == 2 * (tokens * 32 + 256) // 4  # the last linear layer: X has 4 h columns
    panels = 2 * (tokens * 7 * 8 + parameters) // 4
    kept = dataclasses.replace(square, kept=True)
    assert kept.layer_bytes(model, 1) == 4 * parameters + 2 * tokens * 8 * 16 // 4 + panels
    cube = Layout(Mesh.of("3-D", 8), batch=8, kept=False)
    assert cube.layer_bytes(model, 1) == Fraction(16 * parameters + 2 * tokens * 8 * 16, 8)


def test_live_micro_batches() -> None:
    assert [Layout(stages=4).live(stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert Layout(stages=4).live(0, 2) == 2
    assert Layout(stages=4, slices=2).live(3, 8) == 8


@pytest.mark.parametrize(
    ("layout", "model", "reason"),
    [
        (Layout(stages=17), DENSE, "16 layers are fewer than 17 stages"),
        (Layout(kept=False, recompute=True), DENSE, "recomputation gathers all again anyway"),
        (Layout(batch=5), DENSE, "32 sequences are no multiple of micro-batches of 5"),
        (Layout(replicas=4, batch=16), DENSE, "2 micro-batches are fewer than 4 replicas"),
        (Layout(replicas=3, is_sharded=True), DENSE, "32 micro-batches are no multiple of 3 replicas"),
        (Layout(replicas=6, expert_ranks=3, batch=2), EXPERTS, "16 micro-batches are no multiple of 6"),
        (Layout(replicas=8, expert_ranks=3), EXPERTS, "16 experts and 8 replicas cannot be divided by 3 ranks"),
        (Layout(Mesh.of("1-D", 2), replicas=4, expert_ranks=2), EXPERTS, "exclude each other"),
        (Layout(Mesh.of("2-D", 4), batch=2), EXPERTS, "2-D splits dense layers, and the model has 16 experts"),
        (Layout(Mesh.of("2-D", 4), replicas=2, is_sharded=True, batch=2), DENSE, "no second sharding"),
        (Layout(slices=2), DENSE, "2 token slices need a pipeline"),
        (Layout(stages=2, slices=3), DENSE, "3 token slices need .* a length that they divide"),
        (Layout(Mesh.of("1-D", 4)), DENSE, "heads=2 is no multiple of 4"),
    ],
)
def test_layouts_that_cannot_run_the_model(layout: Layout, model: Transformer, reason: str) -> None:
    assert re.search(reason, layout.refusal(model))


def test_names() -> None:
    assert Layout().family == "one rank"
    assert Layout(replicas=2).family == "DP"
    assert Layout(replicas=2, is_sharded=True).family == "FSDP"
    assert Layout(replicas=4, expert_ranks=2).family == "EP x DP"
    assert Layout(replicas=4, expert_ranks=4).family == "EP"
    assert Layout(Mesh.of("2.5-D", 8, 2), stages=2, slices=2).family == "2.5-D TP x PP with token slices"
    assert str(Layout(Mesh.of("2.5-D", 8, 2), stages=2, replicas=3, batch=4, kept=False)) == (
        "2.5-D 2x2x2, 2 stages, 3 replicas, micro-batches of 4, gathered twice, stages outermost"
    )
