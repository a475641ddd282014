"""`Shared`: what all sites have alike: the shared weights G and their momentum, buffers, and the samples so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...compress.fine import Fine
from ...errors import ConfigError
from .fragment import adopt, fragments_of
from .outer import PLAIN, Outer
from .site import Site
from .sync import Outcome
from .weights import Weights


class Shared:
    """G begins as the model's weights of now."""

    def __init__(self, weights: Weights, site: Site, fragments: int, outer: Outer, fine: Fine) -> None:
        self.fragments = fragments_of(list(weights.parameters.values()), fragments, fine, site)
        self.outer = outer
        self.syncs = 0
        """Those that have been applied."""
        self.trained = 0.0
        """See `LocalSteps.trained`."""
        self._weights = weights
        self._buffers = weights.flat_buffers()

    def apply(self, outcome: Outcome, counted: torch.Tensor | float = 0.0) -> None:
        """The next sync has ended: x += (G' - G) - q. `counted`: q of this site. All replicas call."""
        fragment, buffers = self.fragments[self.syncs % len(self.fragments)], self._buffers
        fragment.add(self.follow(outcome).sub_(counted))
        if self._buffers is not buffers:
            self._weights.put_buffers(self._buffers)

    def follow(self, outcome: Outcome) -> torch.Tensor:
        """The next sync has ended; the model stays as it is. Returns G' - G."""
        fragment = self.fragments[self.syncs % len(self.fragments)]
        change = fragment.update(outcome.average, PLAIN if outcome.is_rest else self.outer)
        if len(outcome.buffers) and not outcome.is_rest:
            self._buffers = outcome.buffers
        self.trained += sum(head.samples for head in outcome.heads) / len(self.fragments)
        self.syncs += 1
        return change

    def like(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the averages of a sync: of its fragment, and of its buffers."""
        at = turn % len(self.fragments)
        buffers = self._buffers if at == len(self.fragments) - 1 else torch.zeros(0, dtype=torch.float32, device="cpu")
        return torch.empty_like(self.fragments[at].shared), torch.empty_like(buffers)

    # ---- the model --------------------------------------------------------------------------------------------------

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Takes the weights of the first site. All ranks call."""
        adopt(group, self.fragments)
        self.put()

    def put(self) -> None:
        """Gives the model the shared weights. All ranks of the site call."""
        self._weights.reshard()
        for fragment in self.fragments:
            fragment.put(fragment.shared)
        self._weights.put_buffers(self._buffers)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the shared weights. All ranks of a site enter it. Each leaves it without
        the others, which may never come to its end if it raises: so each keeps all weights of its own."""
        own, buffers = [fragment.whole() for fragment in self.fragments], self._weights.flat_buffers()
        try:
            self.put()
            yield
        except BaseException:
            with contextlib.suppress(ConfigError):  # the body's own error counts
                self._take_back(own, buffers)
            raise
        self._take_back(own, buffers)

    def _take_back(self, own: Sequence[torch.Tensor], buffers: torch.Tensor) -> None:
        """Gives the model these weights and buffers, which it had before."""
        self._weights.reshard()
        for fragment, whole in zip(self.fragments, own, strict=True):
            fragment.put_whole(whole)
        self._weights.put_buffers(buffers)

    # ---- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All of it, without a copy: `apply` changes the momentum in its place."""
        return {
            "sizes": [len(fragment.shared) for fragment in self.fragments],
            "shared": [fragment.shared for fragment in self.fragments],
            "momentum": [fragment.momentum for fragment in self.fragments],
            "buffers": self._buffers,
            "trained": self.trained,
        }

    def restore(self, state: Mapping[str, Any], syncs: int) -> None:
        """Takes over a copy of the value of `state`, of so many syncs. Raises ConfigError for that of another model."""
        sizes = [len(fragment.shared) for fragment in self.fragments]
        if state["sizes"] != sizes or len(state["buffers"]) != len(self._buffers):
            raise ConfigError(
                f"LocalSteps.load_state_dict: the state has fragments of {state['sizes']} values and "
                f"{len(state['buffers'])} of buffers, this model {sizes} and {len(self._buffers)}: restore the state "
                f"of this model, with the same fragments=, buffers= and ranks per site"
            )
        for fragment, shared, momentum in zip(self.fragments, state["shared"], state["momentum"], strict=True):
            fragment.shared, fragment.momentum = shared.clone(), momentum.clone()
        self._buffers = state["buffers"].clone()
        self.trained = state.get("trained", 0.0)
        self.syncs = syncs

    def forget(self) -> None:
        """G is not known: x becomes what x - G is to be, until `arrive`. All replicas call."""
        for fragment in self.fragments:
            fragment.shared = torch.zeros_like(fragment.shared)
            fragment.put(fragment.shared)

    def arrive(self) -> None:
        """G is known: the model has the difference from it. All replicas call."""
        rests = [fragment.weights() for fragment in self.fragments]
        self.put()
        for fragment, rest in zip(self.fragments, rests, strict=True):
            fragment.add(rest)

    def digests(self) -> dict[str, int]:
        """Checksums of the shared weights, by fragment."""
        return {f"fragment {at}": fragment.digest() for at, fragment in enumerate(self.fragments)}
