"""`Bound`: what reductions may lose, as their policy says; and `Terms`: that and their priority."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..config import Policy
from ..plans.settings import Settings
from ..transport.base import ADAPTIVE_DEADLINE_US, FLOATS, DType, Op, Qos, Treatment

BUDGET_PACKETS = 4
"""Packets that a message should at least be allowed to lose. With fewer, the number lost is above its bound too often,
and what exceeds it has to be sent again; with many more, segments are too long to overlap."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """How sums and averages of floating-point numbers are made whose contributions may be lost."""

    settings: Settings
    """Of their plans."""
    qos: Qos
    """Of their operations."""
    packet_bytes: int
    """What a full packet carries."""

    @staticmethod
    def of(
        policy: Policy, hosts: Sequence[Sequence[int]], packets: tuple[int, int], settings: Settings
    ) -> Bound | None:
        """The bound of a group whose reliable plans have `settings`; None: it loses nothing.

        Only networks lose: it takes several hosts. What is lost there of a host with several ranks is their sum; to
        rescale that, all hosts must have as many. `packets`: bytes of the smallest and of the largest full
        packet between two of the ranks.
        """
        uneven = len(set(map(len, hosts))) > 1
        if policy.loss_bound == 0 or len(hosts) == 1 or (uneven and policy.treatment == "rescale"):
            return None
        deadline_us = ADAPTIVE_DEADLINE_US
        if policy.deadline_s is not None:
            deadline_us = 0 if math.isinf(policy.deadline_s) else max(int(policy.deadline_s * 1e6), 1)
        qos = Qos(round(policy.loss_bound * 1e6), Treatment[policy.treatment.upper()], deadline_us)
        bounded = dataclasses.replace(
            settings,
            bounded=True,
            relaxed=policy.consistency == "relaxed",
            bounded_message_bytes=math.ceil(BUDGET_PACKETS / policy.loss_bound) * max(packets),
        )
        return Bound(bounded, qos, min(packets))

    @property
    def plan_key(self) -> tuple[bool, int]:
        """What of `settings` differs from bound to bound within a group."""
        return self.settings.relaxed, self.settings.bounded_message_bytes

    @property
    def makes_up_at_once(self) -> bool:
        """Whether the result makes up for what was lost, so that no caller has to ask."""
        return self.qos.treatment != Treatment.FEEDBACK


class Terms(NamedTuple):
    """What one operation wants; the others of its group may want something else."""

    priority: int
    """Class of service, 0 (most urgent) to 7."""
    bound: Bound | None
    """None: it loses nothing."""
    said: tuple[object, ...] = ()
    """What its policy says of losses: ranks that differ in it are told so where nothing can be lost, too."""

    @staticmethod
    def of(policy: Policy, hosts: Sequence[Sequence[int]], packets: tuple[int, int], settings: Settings) -> Terms:
        """Those of a policy in a group, see `Bound.of`."""
        said = (policy.loss_bound, policy.treatment, policy.consistency) if policy.loss_bound else ()
        return Terms(policy.priority, Bound.of(policy, hosts, packets, settings), said)


def can_lose(op: Op, dtype: DType) -> bool:
    """Whether a reduction can do without a part: sums and averages of floating-point numbers can."""
    return op == Op.SUM and dtype in FLOATS
