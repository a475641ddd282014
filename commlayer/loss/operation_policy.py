"""`OperationPolicy`: the priority of an operation and, as `PartialPolicy`, the contributions it may lose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..config import Policy
from ..plans.settings import Settings
from ..transport import base
from ..transport.base import FLOATS, DType, Op, Qos


@dataclasses.dataclass(frozen=True)
class PartialPolicy:
    """How sums and averages of floating-point numbers are made when contributions may be lost."""

    settings: Settings
    """Settings of their plans."""
    qos: Qos
    """Loss bound, treatment and deadline of their operations."""
    packet_bytes: int
    """Payload of the smallest full packet between two ranks of the group."""

    @staticmethod
    def of(
        policy: Policy, hosts: Sequence[Sequence[int]], packets: tuple[int, int], settings: Settings
    ) -> PartialPolicy | None:
        """The partial policy of a group whose reliable plans have `settings`; None if the group loses nothing.

        Only networks lose packets, so the group must span several hosts. A lost contribution is the sum of one host's
        ranks; rescaling for it needs hosts of equal size. `packets`: payload bytes of the smallest and of the largest
        full packet between two ranks.
        """
        uneven = len(set(map(len, hosts))) > 1
        if policy.loss_bound == 0 or len(hosts) == 1 or (uneven and policy.treatment == "rescale"):
            return None
        qos = Qos(policy.loss_bound, base.Treatment[policy.treatment.upper()])
        partial = dataclasses.replace(
            settings,
            partial=True,
            partial_results=_loses_results(policy),
            # The shortest that may lose a packet. Longer ones would be fewer, and would overlap less.
            partial_message_bytes=math.ceil(1 / policy.loss_bound) * max(packets),
        )
        return PartialPolicy(partial, qos, min(packets))

    @property
    def plan_key(self) -> tuple[bool, int]:
        """The fields of `settings` that differ between the partial policies of one group."""
        return self.settings.partial_results, self.settings.partial_message_bytes

    @property
    def makes_up_at_once(self) -> bool:
        """Whether the result itself makes up for lost contributions, so that the caller need not ask for them."""
        return self.qos.treatment != base.Treatment.FEEDBACK


class OperationPolicy(NamedTuple):
    """Priority and permitted loss of one operation; they may differ between the operations of a group."""

    priority: int | None
    """Class of service, 0 (most urgent) to 7, or YIELDS. None: that of the context, or of the group."""
    partial: PartialPolicy | None
    """None: the operation loses nothing."""
    signed: tuple[object, ...] = ()
    """Loss settings of the policy. They are part of the signature, so that ranks which differ in them get MismatchError
    even where nothing can be lost."""

    @staticmethod
    def of(
        policy: Policy, hosts: Sequence[Sequence[int]], packets: tuple[int, int], settings: Settings
    ) -> OperationPolicy:
        """The operation policy for `policy` in a group; arguments as of `PartialPolicy.of`."""
        signed = (policy.loss_bound, policy.treatment, _loses_results(policy)) if policy.loss_bound else ()
        return OperationPolicy(policy.service_class, PartialPolicy.of(policy, hosts, packets, settings), signed)

    def without_class(self) -> OperationPolicy:
        """This policy as that of a group: the context may have another class."""
        return self._replace(priority=None)


def _loses_results(policy: Policy) -> bool:
    """Whether results may be lost as well as contributions: a baseline of the benches (`tools/bench/papers.py`)."""
    return getattr(policy, "partial_results", False)


def can_lose(op: Op, dtype: DType) -> bool:
    """Whether a reduction can do without a contribution: only sums and averages of floating-point numbers can."""
    return op == Op.SUM and dtype in FLOATS
