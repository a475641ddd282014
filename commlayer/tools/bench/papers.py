"""`PapersPolicy`: the rule of the papers on lossy gradients, a baseline of benches and not part of the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import Policy, Treatment


@dataclass(frozen=True)
class PapersPolicy(Policy):
    """The rule of DLCP (arXiv 2008.08445) and MLT (NSDI 2024).

    Results may be lost as well as contributions, and a lost contribution counts as zero. Where a result is lost, the
    tensor keeps the rank's own gradient, so replicas drift apart.
    """

    treatment: Treatment = "zero"
    partial_results: bool = True


def policy_of(fields: Mapping[str, Any]) -> Policy:
    """The policy with these fields; a `PapersPolicy` if `partial_results` is one of them and true."""
    fields = dict(fields)
    return (PapersPolicy if fields.pop("partial_results", False) else Policy)(**fields)
