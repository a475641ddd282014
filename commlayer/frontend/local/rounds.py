"""`Rounds`: the local steps of a rank and their syncs, one in flight at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions

from ...compress.codec import FINE, codec_of
from ...compress.fine import Fine
from ...errors import ConfigError
from .bell import Bell
from .fragment import adopt, fragments_of
from .living import LOST, Living
from .outer import PLAIN, Outer
from .site import Site
from .sync import Head, Outcome, Sync, finite
from .turns import Turns
from .weights import Weights

FIELDS = ("sizes", "shared", "momentum", "steps", "syncs", "since", "counts", "weighed", "buffers", "sync")
"""The names in a saved state."""


class Form(NamedTuple):
    """How fragments travel."""

    codec: str
    fine: Fine
    is_weighted: bool
    """Whether sites count by their samples."""
    is_uneven: bool = False
    """Whether a site begins a turn as soon as another one does."""


class Rounds:
    """The shared weights G begin as the model's weights of now. All ranks make the same syncs in the same order."""

    def __init__(self, living: Living, weights: Weights, site: Site, turns: Turns, outer: Outer, form: Form) -> None:
        self.turns, self.outer = turns, outer
        self._living, self._weights, self._site, self._form = living, weights, site, form
        self.fragments = fragments_of(list(weights.parameters.values()), turns.fragments, form.fine, site)
        self.steps = 0
        """Local steps of this rank, including those before a checkpoint."""
        self.syncs = 0
        """Syncs that this rank has begun."""
        self._since = [0] * turns.fragments  # local steps since the last sync, by fragment
        self._counts = [0.0] * turns.fragments  # samples since the last sync, by fragment
        self._weighed = [0.0] * turns.fragments  # samples that the last sync had, by fragment
        self._buffers = weights.flat_buffers()  # as all sites have them
        self._sync: Sync | None = None
        self._last: Outcome | None = None  # of the last sync, for sites that lack it after a death
        self.trained = 0.0
        """See `LocalSteps.trained`."""
        self._bell: Bell | None = None

    def listen(self, silence_s: float) -> None:
        """Before the first step: from now on, turns that other sites begin are heard."""
        if self._form.is_uneven:
            self._bell = Bell(self._living.group.get_group_store(), self.syncs, silence_s)

    def close(self) -> None:
        """Ends the thread that listens. Idempotent."""
        if self._bell is not None:
            self._bell.close()

    def adopt(self) -> None:
        """Takes the weights of the first site. All ranks call."""
        adopt(self._living.group, self.fragments)
        self._put_shared()

    def step(self, samples: float) -> None:
        """A local step was made, with so many samples of this site. Applies a sync that is due, then begins one."""
        self.steps += 1
        for at in range(self.turns.fragments):
            self._since[at] += 1
            self._counts[at] += samples
        if self._sync is not None:
            self._sync.age += 1
            if self._sync.age >= self.turns.delay:
                self._finish()
        if self._is_due():
            self._finish()
            self._start()
            if not self.turns.delay:
                self._finish()

    def _is_due(self) -> bool:
        """Whether the next turn begins now: after as many steps of this site; of uneven sites, of the fastest."""
        if self._bell is None:
            return self.turns.begins(self.steps)
        latest = self.turns.fragment(self.syncs - 1)
        if self._since[latest] >= self.turns.length(self.syncs):
            return True
        return bool(self._site.largest([self._bell.rung(self.syncs)])[0])  # its ranks hear the bell at several times

    def leave(self) -> None:
        """Makes the last syncs, and gives the model the shared weights.

        Ranks that skipped steps have begun fewer syncs than others: they take part until all leave. Then each fragment
        is sent once more. A site that dies after that is not missed, but those that live make sure that all have the
        last sync.
        """
        self._finish()
        together = 0
        while together < self.turns.fragments:
            self._start(is_leaving=True)
            heads = self._finish()
            together = together + 1 if all(head.is_leaving for head in heads) else 0
        if self._living.goes_on:
            self._close()
        self._put_shared()

    def _close(self) -> None:
        """Returns once all sites that live have made the last sync."""
        while not self._living.is_finished:
            try:
                self._living.group.barrier().wait()
            except LOST as error:
                self._living.regroup(error, functools.partial(self._meet, None))
            else:
                self._living.finish()
                return

    def _start(self, *, is_leaving: bool = False) -> None:
        """Begins the next sync."""
        if self._bell is not None:
            self._bell.ring(self.syncs)
        self._weights.check_unchanged(self._living.group.who)
        at = self.turns.fragment(self.syncs)
        fragment = self.fragments[at]
        difference = fragment.weights().sub_(fragment.shared)
        if self._since[at]:
            self._weighed[at] = self._counts[at]
        samples = self._weighed[at]  # without a step, what is left has the weight that it had
        head = Head(self.syncs, fragment.digest(), finite(difference), is_leaving, self._since[at], samples)
        is_last = at == self.turns.fragments - 1
        buffers = self._site.average(self._weights.flat_buffers()) if is_last else torch.zeros(0)
        self._begin(head, difference, buffers)
        self.syncs += 1
        self._since[at], self._counts[at] = 0, 0.0

    def _begin(self, head: Head, difference: torch.Tensor, buffers: torch.Tensor, age: int = 0) -> None:
        pair = codec_of(self._form.codec).pair
        fine = None if pair is None else codec_of(FINE).pair
        parts = self.fragments[self.turns.fragment(head.turn)].parts
        weighted = self._form.is_weighted
        sync = Sync(self._living.group, head, difference, parts, pair, fine, buffers, weighted, age)
        sync.start()
        self._sync = sync

    def _finish(self) -> Sequence[Head]:
        """Waits for the sync in flight, if there is one, and applies it: x += (G' - G) - q."""
        if self._sync is None:
            return ()
        sync, self._sync = self._sync, None
        sync, outcome = self._site.agreed(lambda: self._ended(sync))
        fragment = self.fragments[self.turns.fragment(sync.head.turn)]
        outer = PLAIN if outcome.is_rest else self.outer
        fragment.add(fragment.update(outcome.average, outer).sub_(sync.counted()))
        if len(outcome.buffers) and any(head.samples for head in outcome.heads):
            self._buffers = outcome.buffers
            self._weights.put_buffers(outcome.buffers)
        self.trained += sum(head.samples for head in outcome.heads if head.steps) / self.turns.fragments
        if self._living.goes_on:
            self._last = outcome
        return outcome.heads

    # ---- after a death ----------------------------------------------------------------------------------------------

    def _ended(self, sync: Sync) -> tuple[Sync, Outcome]:
        """Waits for a sync. After a death the sites that live apply it if one of them has its outcome; else they send
        it again, each the same values. Returns the sync that has ended, and its outcome."""
        while True:
            try:
                if sync.group is not self._living.group:
                    sync = dataclasses.replace(sync, group=self._living.group)
                    sync.start()
                return sync, sync.finish()
            except LOST as error:
                outcome = self._living.regroup(error, functools.partial(self._meet, sync))
                if outcome is not None:
                    return sync, outcome

    def _meet(self, sync: Sync | None) -> Outcome | None:
        """All sites of the new group call, with their sync that has not ended. Returns its outcome, if another site has
        it.

        A site begins a sync when it has the outcome of the one before, so that is the only one that others may lack.
        """
        group = self._living.group
        ended = self.syncs if sync is None else sync.head.turn
        last = None if self._last is None else (self._last.heads, self._last.is_rest)
        reports: list[Any] = [None] * group.size()
        dist.all_gather_object(reports, (ended, last), group)
        most = max(theirs for theirs, _ in reports)
        if all(theirs == most for theirs, _ in reports):
            return None
        options = BroadcastOptions()
        options.rootRank = next(rank for rank, (theirs, _) in enumerate(reports) if theirs == most)
        outcome = self._last
        if sync is not None and ended < most:
            heads, is_rest = reports[options.rootRank][1]
            outcome = Outcome(heads, torch.empty_like(sync.difference), is_rest, torch.empty_like(sync.buffers))
        assert outcome is not None  # noqa: S101  # a site that has ended a sync keeps its outcome
        for values in (outcome.average, outcome.buffers):
            if len(values):
                group.broadcast([values], options).wait()
        return outcome if ended < most else None

    def _put_shared(self) -> None:
        self._weights.reshard()
        for fragment in self.fragments:
            fragment.put(fragment.shared)
        self._weights.put_buffers(self._buffers)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the shared weights. All ranks of a site enter it."""
        own, buffers = [fragment.weights() for fragment in self.fragments], self._weights.flat_buffers()
        self._put_shared()
        try:
            yield
        finally:
            self._weights.reshard()
            for fragment, weights in zip(self.fragments, own, strict=True):
                fragment.put(weights)
            self._weights.put_buffers(buffers)

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. A sync in flight is saved as this rank's part of it."""
        sync = self._sync
        flying: dict[str, Any] | None = None
        if sync is not None:
            flying = {"difference": sync.difference.clone(), "buffers": sync.buffers.clone()}
            flying |= {"head": list(sync.head), "age": sync.age}
        values = (
            [len(fragment.shared) for fragment in self.fragments],
            [fragment.shared.clone() for fragment in self.fragments],
            [fragment.momentum.clone() for fragment in self.fragments],
            self.steps,
            self.syncs,
            list(self._since),
            list(self._counts),
            list(self._weighed),
            self._buffers.clone(),
            flying,
        )
        return {**dict(zip(FIELDS, values, strict=True)), "trained": self.trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over the value of `state_dict`, before the first step. Raises ConfigError for that of another model."""
        sizes = [len(fragment.shared) for fragment in self.fragments]
        if state["sizes"] != sizes or len(state["buffers"]) != len(self._buffers):
            raise ConfigError(
                f"LocalSteps.load_state_dict: the state has fragments of {state['sizes']} values and "
                f"{len(state['buffers'])} of buffers, this model {sizes} and {len(self._buffers)}: restore the state "
                f"of this model, with the same fragments=, buffers= and ranks per site"
            )
        for fragment, shared, momentum in zip(self.fragments, state["shared"], state["momentum"], strict=True):
            fragment.shared, fragment.momentum = shared.clone(), momentum.clone()
        self.steps, self.syncs = state["steps"], state["syncs"]
        self._since, self._counts, self._weighed = (list(state[name]) for name in ("since", "counts", "weighed"))
        self._buffers = state["buffers"].clone()
        self.trained = state.get("trained", 0.0)

    def resume(self, flying: Mapping[str, Any]) -> None:
        """Sends this rank's part of a saved sync again, which no rank has applied."""
        self._begin(Head(*flying["head"]), flying["difference"].clone(), flying["buffers"].clone(), flying["age"])

    def digests(self) -> dict[str, int]:
        """Checksums of the shared weights, by fragment."""
        return {f"fragment {at}": fragment.digest() for at, fragment in enumerate(self.fragments)}
