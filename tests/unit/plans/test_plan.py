import enum
import re

import numpy as np
import pytest

from commlayer.plans.plan import STEP, Buffer, PlanBuilder, StepKind
from tests import ROOT

HEADER = ROOT / "native" / "include" / "commlayer.h"
INPUT, OUTPUT, SCRATCH, STAGING = Buffer


def header_enum(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} {{(.*?)}};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"CL_(\w+) = (\d+)", body[1])}


@pytest.mark.parametrize(("name", "kind"), [("cl_step_kind", StepKind), ("cl_buffer", Buffer)])
def test_enums_equal_the_header(name: str, kind: type[enum.IntEnum]) -> None:
    assert {member.name: member.value for member in kind} == header_enum(name)


def test_step_is_struct_cl_step() -> None:
    body = re.search(r"struct cl_step {(.*?)};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    fields = re.findall(r"uint(\d+)_t (\w+);", body[1])
    assert [(name, STEP[name].itemsize * 8) for name in STEP.names or ()] == [
        (name, int(bits)) for bits, name in fields
    ]
    assert STEP.itemsize == 64


def test_every_field_of_every_kind() -> None:
    b = PlanBuilder(1, 4)
    b.scratch(10)
    at = b.scratch(100)
    b.send(2, INPUT, 8, 16)
    b.recv_copy(3, SCRATCH, at, 100)
    b.recv_reduce(3, OUTPUT, 24, 16)
    b.copy(INPUT, 1, STAGING, 100, 3)
    b.reduce(STAGING, 200, OUTPUT, 5, 7, staging_of=3)
    b.scale(OUTPUT, 8, 16, 4, weight=3)
    b.post()
    b.await_(3, 1)
    b.tell(5, 8)
    b.check(2, 6, 200)
    plan = b.build()
    names = ["kind", "peer", "source", "target", "source_offset", "target_offset", "length", "message"]
    assert plan.steps[names].tolist() == [
        (StepKind.SEND, 2, INPUT, 0, 8, 0, 16, 0),
        (StepKind.RECV_COPY, 3, 0, SCRATCH, 0, 64, 100, 0),
        (StepKind.RECV_REDUCE, 3, 0, OUTPUT, 0, 24, 16, 1),
        (StepKind.COPY, 1, INPUT, STAGING, 1, 100, 3, 0),
        (StepKind.REDUCE, 3, STAGING, OUTPUT, 200, 5, 7, 0),
        (StepKind.SCALE, 4, 0, OUTPUT, 0, 8, 16, 3),
        (StepKind.POST, 1, 0, 0, 0, 0, 0, 1),
        (StepKind.AWAIT, 3, 0, 0, 0, 0, 0, 1),
        (StepKind.TELL, 1, 0, 0, 5, 8, 0, 0),
        (StepKind.CHECK, 2, 0, 0, 200, 6, 0, 0),
    ]
    assert (plan.rank, plan.world_size, plan.posts) == (1, 4, 1)
    assert plan.scratch_bytes == 64 + 128
    assert plan.staging_bytes == 208
    assert plan.steps.flags.c_contiguous


def test_messages_are_numbered_per_peer_and_direction() -> None:
    b = PlanBuilder(0, 3)
    for peer in (1, 2, 1):
        b.send(peer, INPUT, 0, 1)
    b.recv_copy(1, OUTPUT, 0, 1)
    b.recv_reduce(1, OUTPUT, 0, 1)
    assert b.build().steps["message"].tolist() == [0, 0, 1, 0, 1]


def test_dependencies_and_successors() -> None:
    b = PlanBuilder(0, 1)
    first = b.copy(INPUT, 0, OUTPUT, 0, 1)
    second = b.copy(INPUT, 1, OUTPUT, 1, 1, [first])
    third = b.copy(INPUT, 2, OUTPUT, 2, 1, [first, second])
    plan = b.build()
    assert plan.steps["dependencies"].tolist() == [0, 1, 2]
    slices = zip(plan.steps["successor_first"], plan.steps["successor_count"], strict=True)
    assert [plan.successors[at : at + count].tolist() for at, count in slices] == [[second, third], [third], []]


def test_chain_orders_only_the_steps_added_within() -> None:
    b = PlanBuilder(0, 2)
    chain = b.chain()
    with chain:
        b.post()
        b.post()
    b.send(1, INPUT, 0, 1)
    assert chain.tail == (1,)
    with chain:
        b.post([2])
    assert b.build().steps["dependencies"].tolist() == [0, 1, 0, 2]


def test_empty_ranges_are_refused() -> None:
    b = PlanBuilder(5, 6)
    with pytest.raises(ValueError, match="rank 5: a SEND step of 0 bytes"):
        b.send(1, INPUT, 0, 0)


def test_an_empty_plan() -> None:
    plan = PlanBuilder(0, 1).build()
    assert len(plan.steps) == len(plan.successors) == plan.posts == plan.scratch_bytes == plan.staging_bytes == 0


def test_plans_are_shared_and_so_cannot_be_written() -> None:
    b = PlanBuilder(0, 1)
    b.post([])
    plan = b.build()
    with pytest.raises(ValueError, match="read-only"):
        plan.steps["kind"] = 0
    assert plan.successors.dtype == np.uint32
