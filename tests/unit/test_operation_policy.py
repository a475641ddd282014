"""A policy's effect on the plans and operations of a group."""

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from commlayer import Policy
from commlayer.config import PRIORITIES
from commlayer.frontend.group.tensors import REDUCTIONS
from commlayer.loss.operation_policy import OperationPolicy, PartialPolicy, can_lose
from commlayer.plans.select import plan_for
from commlayer.plans.settings import Settings
from commlayer.tools.bench.papers import policy_of
from commlayer.transport.base import ADAPTIVE_DEADLINE_US, Treatment

FLAT = ((0,), (1,), (2,))
PACKET_BYTES = 1000
RELIABLE = Settings(segment_bytes=4096, staging_bytes=1 << 20)


def partial(hosts: Any = FLAT, **policy: Any) -> PartialPolicy | None:
    return PartialPolicy.of(policy_of(policy), hosts, (PACKET_BYTES, PACKET_BYTES), RELIABLE)


def lossy(**policy: Any) -> PartialPolicy:
    made = partial(**policy)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("hosts", "policy", "loses"),
    [
        (FLAT, {"loss_bound": 0.0}, False),
        (FLAT, {"loss_bound": 0.01}, True),
        (((0, 1, 2),), {"loss_bound": 0.5}, False),
        (((0,),), {"loss_bound": 0.5}, False),
        (((0, 1), (2, 3)), {"loss_bound": 0.5, "treatment": "rescale"}, True),
        (((0, 1), (2,)), {"loss_bound": 0.5, "treatment": "rescale"}, False),
        (((0, 1), (2,)), {"loss_bound": 0.5, "treatment": "feedback"}, True),
        (((0, 1), (2,)), {"loss_bound": 0.5, "treatment": "zero"}, True),
    ],
)
def test_groups_that_may_lose(hosts: Any, policy: dict[str, Any], loses: bool) -> None:
    assert (partial(hosts, **policy) is not None) == loses


def test_a_policy_that_yields_yields_in_every_class() -> None:
    for policy in (Policy(yields=True), Policy(priority=0, yields=True)):
        made = OperationPolicy.of(policy, FLAT, (PACKET_BYTES, PACKET_BYTES), RELIABLE)
        assert made.priority == PRIORITIES
    assert made.without_class().priority is None


@pytest.mark.parametrize("share", [0.5, 0.01, 0.000_001, 0.123_456_7])
def test_the_loss_bound_of_operations_is_that_of_the_policy(share: float) -> None:
    assert lossy(loss_bound=share).qos.loss_bound == share


@pytest.mark.parametrize("treatment", ["feedback", "rescale", "zero"])
def test_treatments(treatment: str) -> None:
    made = lossy(loss_bound=0.1, treatment=treatment)
    assert made.qos.treatment == Treatment[treatment.upper()]
    assert made.qos.deadline_us == ADAPTIVE_DEADLINE_US
    assert made.makes_up_at_once == (treatment != "feedback")


def test_messages_are_as_long_as_their_bound_needs() -> None:
    for share, packets in ((0.01, 100), (0.03, 34), (0.5, 2), (1 / 161, 161)):
        made = lossy(loss_bound=share, partial_results=True)
        assert made.settings.partial_message_bytes == packets * PACKET_BYTES
        assert int(share * packets + 1e-9) == 1  # as the engine rounds: cl_partial_loss_budget
        assert made.settings.partial
        assert made.settings.partial_results
        assert made.settings.segment_bytes == RELIABLE.segment_bytes


def test_packets_of_several_sizes() -> None:
    """A sender of the largest packets may lose some of them, too; protection is per packet of the smallest size."""
    made = PartialPolicy.of(Policy(loss_bound=0.01), FLAT, (1000, 4000), RELIABLE)
    assert made is not None
    assert made.settings.partial_message_bytes == 100 * 4000
    assert made.packet_bytes == 1000


def test_settings_that_must_agree_are_part_of_a_plans_signature() -> None:
    policies: list[dict[str, Any]] = [
        {"loss_bound": 0.1},
        {"loss_bound": 0.05},
        {"loss_bound": 0.1, "partial_results": True},
    ]
    made = [lossy(**policy) for policy in policies]
    how: dict[str, Any] = {"rank": 0, "hosts": FLAT, "numel": 1 << 20, "itemsize": 4}
    signatures = {plan_for("all_reduce", settings=policy.settings, **how).signature for policy in made}
    assert len(signatures | {plan_for("all_reduce", settings=RELIABLE, **how).signature}) == 4
    assert len({policy.plan_key for policy in made}) == 3


def test_only_sums_of_floating_point_numbers_can_lose() -> None:
    able = {key for key, kind in REDUCTIONS.items() if can_lose(kind.op, kind.dtype)}
    floats = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    for (dtype, op), kind in REDUCTIONS.items():
        if dtype in floats:
            sums = op in (ReduceOp.SUM.value, ReduceOp.AVG.value, ReduceOp.PREMUL_SUM.value)
            assert can_lose(kind.op, kind.dtype) == sums, (dtype, op)
    assert not any(not dtype.is_floating_point and not dtype.is_complex for dtype, _ in able)
