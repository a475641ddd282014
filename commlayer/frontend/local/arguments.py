"""`Arguments`: those of LocalSteps, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ...compress.codec import codec_of
from ...compress.fine import Fine
from ...config import Policy
from ...errors import ConfigError
from ...kind import whole
from ...plans.codec import VALUE_BYTES
from ...plans.encoded import bytes_per_value
from ..group.backend import CommProcessGroup
from .exact_state import policy_of
from .outer import Outer
from .rounds import Form
from .site import Site
from .turns import EVERY_MAX, Turns
from .weights import BUFFERS, Weights

LEAST_EVERY = 8
"""The least H of `auto`: a smaller one sends more, and saved no steps to a loss (byte GPT, AdamW; docs/local_bench.md).
With F < 4 fragments the least H is 2 F: with 8, each sync would be applied later, and a delay costs steps."""

CODECS = ("none", "bf16", "int8", "int4-int8")
"""The codecs of small error, with sums of 8 bits or more: see docs/local.md."""

WITHOUT = {"min_sites": "a death ends the training", "quorum": "a site that is late is waited for"}
"""For errors: what happens without a number of sites."""


def check_kinds(*given: tuple[str, object, type, bool]) -> None:
    """Raises ConfigError unless each argument of LocalSteps is of its kind: its name, its value, the class, and whether
    it may be None."""
    for name, value, kind, may_lack in given:
        if not isinstance(value, kind) and not (may_lack and value is None):
            raise ConfigError(f"LocalSteps({name}={value!r}): give a {kind.__name__}{', or None' * may_lack}")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """See `LocalSteps`."""

    every: int | str
    fragments: int
    delay: int | None
    outer: tuple[float, float] | None
    codec: str
    samples: Callable[[], float] | None
    exact_steps: int
    buffers: str | None
    fine: Fine
    policy: Policy | None
    min_sites: int | None
    uneven: bool
    quorum: int | None

    def check(self, group: CommProcessGroup | None, site: Site, *, joins: bool = False) -> None:
        """Raises ConfigError for values out of range, or that the two groups cannot serve: that between the sites, if
        it is known, and that of this site. `joins`: as the training was begun, by more sites perhaps than it has now.
        """
        if self.outer is not None:
            Outer.of(self.outer)
        if self.codec not in CODECS:
            raise ConfigError(
                f"LocalSteps(codec={self.codec!r}): use one of {', '.join(CODECS)}: the errors of others are too large "
                f"for weights"
            )
        if self.buffers not in BUFFERS:
            raise ConfigError(f"LocalSteps(buffers={self.buffers!r}): use one of {', '.join(map(repr, BUFFERS))}")
        if self.samples is not None and not callable(self.samples):
            raise ConfigError(f"LocalSteps(samples={self.samples!r}): give a function that returns a count, or None")
        if not isinstance(self.uneven, bool):
            raise ConfigError(f"LocalSteps(uneven={self.uneven!r}): use True or False")
        by_trained = "uneven=True" if self.uneven else f"quorum={self.quorum!r}" if self.quorum is not None else ""
        if by_trained and self.every == "auto":
            raise ConfigError(
                f"LocalSteps(every='auto', {by_trained}): auto makes exact steps, in which all sites wait for the "
                f"slowest, and may go on with them, which `trained` leaves out; give every"
            )
        if whole(self.exact_steps, -1) < 0:
            raise ConfigError(f"LocalSteps(exact_steps={self.exact_steps!r}): use a whole number, 0 or more (steps)")
        if group is not None:
            self._check_hosts(group)
            if not joins:
                self._check_groups(group, site)
                self._check_number("min_sites", self.min_sites, group)
                self._check_number("quorum", self.quorum, group)

    def _check_groups(self, group: CommProcessGroup, site: Site) -> None:
        """Raises ConfigError unless this rank alone is in both groups."""
        if len(site.ranks) == 1:
            return
        both = set(site.ranks) & set(dist.get_process_group_ranks(group))
        if len(both) > 1:
            raise ConfigError(
                f"LocalSteps(group=): the ranks {sorted(both)} of it are ranks of one site, {list(site.ranks)}, within "
                f"which DistributedDataParallel or fully_shard averages gradients; leave group out, or give one rank "
                f"of each site; if the site is too large, give process_group= or mesh= the ranks of one site"
            )

    def _check_hosts(self, group: CommProcessGroup) -> None:
        """Raises ConfigError where several ranks of a host encode the sum of their weighted changes."""
        shared = next((host for host in group.hosts if len(host) > 1), ())
        weighted = "samples=" if self.samples is not None else "uneven=True" if self.uneven else ""
        if weighted and codec_of(self.codec).pair is not None and shared and len(group.hosts) > 1:
            raise ConfigError(
                f"LocalSteps({weighted}, codec={self.codec!r}): the ranks {list(shared)} of the group share a host, "
                f"which encodes the sum of their changes: a rank with few samples would keep the error of all; use "
                f"codec='none', or make one site of the ranks of a host (DistributedDataParallel)"
            )

    def _check_number(self, name: str, sites: int | None, group: CommProcessGroup) -> None:
        """Raises ConfigError unless that many sites can go on without the others."""
        if sites is not None and not 1 <= whole(sites, -1) <= group.size():
            raise ConfigError(
                f"LocalSteps({name}={sites!r}): use a whole number, 1 to {group.size()}, the sites at the start; or "
                f"None, with which {WITHOUT[name]}"
            )

    def turns(self, restored: Mapping[str, Any] | None = None) -> Turns | None:
        """The schedule that is given, or that a restored training had found; None: it is to be found. Raises
        ConfigError for arguments that contradict each other."""
        if self.every != "auto":
            return Turns.of(self.every, self.fragments, self.delay)  # type: ignore[arg-type]  # it checks them
        if self.delay is not None:
            raise ConfigError(f"LocalSteps(every='auto', delay={self.delay!r}): leave delay out, or give every")
        Turns.of(EVERY_MAX, self.fragments, None)
        return None if restored is None or restored["turns"] is None else Turns(*restored["turns"])

    def turns_of(self, least: int) -> Turns | None:
        """The schedule for H* = `least`, with H raised to LEAST_EVERY; None, for 0 and 1: all steps stay exact."""
        if least <= 1:
            return None
        every = max(least, min(2 * self.fragments, LEAST_EVERY))
        return Turns.of(every, min(self.fragments, every), None)

    def outer_of(self, turns: Turns) -> Outer:
        """The optimizer of the shared weights."""
        return Outer.default(turns) if self.outer is None else Outer.of(self.outer)

    def value_bytes(self, hosts: int) -> float:
        """Bytes of a value on one of its two ways between so many hosts, in the mean of both."""
        pair = codec_of(self.codec).pair
        return VALUE_BYTES if pair is None else bytes_per_value(pair[:2], hosts) / 2

    @property
    def form(self) -> Form:
        """How fragments travel."""
        is_weighted = self.samples is not None or self.uneven
        return Form(self.codec, self.fine, is_weighted, self.uneven, self.quorum, self.every == "auto")

    def settings(self, turns: Turns | None, weights: Weights, site: Site) -> dict[str, Any]:
        """What must be alike on all ranks, by name."""
        return {
            **({"every": self.every, "fragments": self.fragments} if turns is None else dataclasses.asdict(turns)),
            "exact_steps": self.exact_steps,
            "min_sites": self.min_sites,
            "outer": None if self.outer is None else Outer.of(self.outer),
            "codec": self.codec,
            "buffers": self.buffers,
            "samples": self.samples is not None,
            "uneven": self.uneven,
            "quorum": self.quorum,
            "fine": [name for name, parameter in weights.parameters.items() if parameter in self.fine],
            "policy": dataclasses.asdict(policy_of(self.policy, site)),
        }
