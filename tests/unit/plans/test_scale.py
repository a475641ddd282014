"""What a plan of 1,000 hosts of 8 ranks costs a rank: packets, steps, memory. `python -m bench.scale` has the times."""

from typing import Any

import numpy as np
import pytest

from commlayer.plans.plan import Plan, StepKind
from commlayer.plans.select import Collective, make_plan
from commlayer.plans.settings import Settings

PACKET_BYTES = 1432
"""Payload of a packet in Ethernet's usual frames."""

HOSTS = 1000
PER_HOST = 8
WORLD = HOSTS * PER_HOST
LARGE = tuple(tuple(range(first, first + PER_HOST)) for first in range(0, WORLD, PER_HOST))

MIB = 1 << 20
SUMS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "reduce")
DIVIDED: tuple[Collective, ...] = ("reduce_scatter", "all_gather")


def plan_of(collective: Collective, length: int, rank: int = 0, **options: Any) -> Plan:
    """The plan for a tensor of so many bytes, on all ranks together for DIVIDED."""
    numel = length // 4 // (WORLD if collective in DIVIDED else 1)
    settings = Settings(**options)
    return make_plan(collective, rank=rank, hosts=LARGE, numel=numel, itemsize=4, settings=settings)


def packets(plan: Plan) -> int:
    lengths = plan.steps["length"][plan.steps["kind"] == StepKind.SEND].astype(np.int64)
    return int((-(-lengths // PACKET_BYTES)).sum())


@pytest.mark.parametrize("length", [4, 4096, MIB, 100 * MIB], ids=str)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_plan_of_8000_ranks_takes_little_memory(collective: Collective, length: int, deterministic: bool) -> None:
    if (deterministic and collective not in SUMS) or (collective == "reduce" and length > MIB):
        return  # a long reduce: see docs/scale.md
    for rank in (0, WORLD - 1):
        plan = plan_of(collective, length, rank, deterministic=deterministic)
        assert len(plan.steps) < 50_000
        engine_bytes = plan.scratch_bytes + 2 * (plan.steps.nbytes + plan.successors.nbytes)  # Python has a copy, too
        assert engine_bytes < 80 * MIB


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_long_messages_of_8000_ranks_fill_their_packets(collective: Collective) -> None:
    """A host must send each byte once, or twice in an all-reduce, but for its own share."""
    length = 100 * MIB
    ideal = length * (HOSTS - 1) / HOSTS / PER_HOST / PACKET_BYTES * (2 if collective == "all_reduce" else 1)
    sent = [packets(plan_of(collective, length, rank)) for rank in range(0, WORLD, WORLD // 9)]
    assert sum(sent) / len(sent) < 1.1 * ideal
    assert max(sent) < 1.12 * ideal


def test_a_long_broadcast_to_8000_ranks_fills_its_packets() -> None:
    """The first ranks of all hosts share the work, and send each byte once."""
    for rank in (0, 8, WORLD - 8):
        assert packets(plan_of("broadcast", 100 * MIB, rank)) < 1.1 * 100 * MIB / PACKET_BYTES


def test_short_messages_of_1000_hosts_take_few_packets() -> None:
    cases: list[tuple[Collective, int]] = [("all_reduce", 4), ("all_reduce", 4096), ("broadcast", 1024), ("barrier", 0)]
    for collective, length in cases:
        # 31 rows of 32 or 33
        assert max(packets(plan_of(collective, length, rank)) for rank in (0, 8, 4000, WORLD - 8)) <= 2 * 33
