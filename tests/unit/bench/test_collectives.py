import pytest
import torch
import torch.distributed as dist

from commlayer.tools.bench.collective import Collective
from commlayer.tools.bench.collectives import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
)
from commlayer.tools.bench.gradients import Gradients
from commlayer.tools.bench.spec import COLLECTIVE_NAMES, DTYPE_NAMES
from tests.unit.bench.test_pattern import COMBINE


def make(kind: type[Collective], world: int, size_bytes: int = 4000, dtype: torch.dtype = torch.float32) -> Collective:
    return kind(size_bytes, dtype, "sum", 0, world)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("all_reduce", {2: 1.0, 4: 1.5, 8: 1.75}),
        ("reduce_scatter", {2: 0.5, 4: 0.75, 8: 0.875}),
        ("all_gather", {2: 0.5, 4: 0.75, 8: 0.875}),
        ("broadcast", {2: 1.0, 4: 1.0, 8: 1.0}),
        ("reduce", {2: 1.0, 4: 1.0, 8: 1.0}),
        ("all_to_all", {2: 0.5, 4: 0.75, 8: 0.875}),
        ("gather", {2: 0.5, 4: 0.75, 8: 0.875}),
        ("scatter", {2: 0.5, 4: 0.75, 8: 0.875}),
        ("sendrecv", {2: 1.0, 4: 1.0, 8: 1.0}),
        ("pingpong", {2: 2.0, 4: 2.0, 8: 2.0}),
        ("window", {2: 8.0, 4: 8.0, 8: 8.0}),
        ("barrier", {2: 0.0, 4: 0.0, 8: 0.0}),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(name: str, factors: dict[int, float]) -> None:
    assert {world: make(COLLECTIVES[name], world).bus_factor for world in factors} == factors


def test_names_agree_with_the_spec() -> None:
    assert tuple(COLLECTIVES) == COLLECTIVE_NAMES
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPE_NAMES)


@pytest.mark.parametrize("kind", [ReduceScatter, AllGather, AllToAll, Gather, Scatter])
def test_sharded_sizes_are_whole_elements_per_rank(kind: type[Collective]) -> None:
    collective = make(kind, 3, size_bytes=1003)
    assert collective.count == 249  # 250 elements of float32, of which 249 divide by 3
    assert collective.size_bytes == 996


@pytest.mark.parametrize("kind", [AllReduce, Broadcast, ReduceScatter, AllGather])
def test_size_below_one_element_becomes_one(kind: type[Collective]) -> None:
    assert make(kind, 2, size_bytes=1).count >= 1


def simulated_all_reduce(collective: AllReduce, runs: int) -> None:
    """The buffer after `runs` correct all-reduces, computed in the type itself."""
    collective.restore()
    ranks = [AllReduce(collective.size_bytes, collective.dtype, collective.op, r, collective.world) for r in range(3)]
    combine = COMBINE[collective.op]
    buffers = [rank.source for rank in ranks]
    for _ in range(runs):
        total = combine(combine(buffers[0], buffers[1]), buffers[2])
        buffers = [total] * 3
        collective.runs += 1
    collective.buffer.copy_(buffers[0])


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64])
def test_all_reduce_knows_the_result_of_every_chain(dtype: torch.dtype, op: str) -> None:
    collective = AllReduce(4000, dtype, op, 0, 3)
    for runs in range(1, min(collective.chain(), 50) + 1):
        simulated_all_reduce(collective, runs)
        assert collective.wrong() == 0
        collective.buffer[17] += 1
        assert collective.wrong() == 1


@pytest.mark.parametrize("kind", [kind for kind in COLLECTIVES.values() if kind.name != "barrier"])
def test_doing_nothing_is_wrong(kind: type[Collective]) -> None:
    rank = 0 if kind in (Gather, Reduce) else 1  # where there is something to see
    collective = kind(40_000, torch.float32, "sum", rank, 2)
    collective.restore()
    if isinstance(collective, AllReduce):
        collective.runs = 1  # as if a backend had returned without moving anything
    if isinstance(collective, Gradients):
        collective.used = 1
    assert collective.wrong() > 0.8 * collective.count / (2 if kind in (ReduceScatter, Scatter) else 1)


@pytest.mark.parametrize("name", COLLECTIVE_NAMES)
def test_a_group_of_one_is_right(name: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        collective = make(COLLECTIVES[name], 1)
        collective.restore()
        for _ in range(3):
            collective.run(group)
        assert collective.wrong() == 0
    finally:
        dist.destroy_process_group()
