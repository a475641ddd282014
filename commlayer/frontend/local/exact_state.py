"""`ExactState`: the HookState of exact steps; `policy_of`: its policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...config import Config, Policy, policy_of_groups, policy_of_job
from ...errors import ConfigError
from ..gradients.hook_state import HookState
from ..gradients.shards import needs_whole
from ..group.backend import CommProcessGroup
from .heads import Heads
from .site import Site


class ExactState(HookState):
    """Before its ranks agree on anything, each knows that all of them make this step: one that has left would let the
    others wait."""

    heads: Heads
    """They are told before the first bucket of each step."""

    def compare(self, group: CommProcessGroup) -> None:
        """Nothing: LocalSteps compares the policies before it begins."""

    def begin_weight(self, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:  # noqa: ARG002
        self.weight = self.heads.weight()

    def largest_of(self, own: Sequence[float]) -> list[float]:
        self.heads.meet()
        return super().largest_of(own)


def policy_of(given: Policy | None, site: Site) -> Policy:
    """That of exact steps: the given one, or that of hooks to which code gives none, deterministic if groups are.

    Raises ConfigError as `check_whole`.
    """
    policy = given
    if policy is None:
        policy = policy_of_job()
        is_deterministic = policy_of_groups(Config.from_environment()).deterministic and not policy.loss_bound
        policy = dataclasses.replace(policy, deterministic=is_deterministic)
    check_whole(site, policy)
    return policy


def check_whole(site: Site, policy: Policy) -> None:
    """Raises ConfigError for codecs of whole buckets where a site has several ranks."""
    if site.size > 1 and needs_whole(policy):
        raise ConfigError(
            f"LocalSteps(policy=Policy(codec={policy.codec!r})): where a site has several ranks, each averages its "
            f"shard of a bucket, and this codec needs whole buckets; use another codec"
        )
