"""`Arriving`: the state of a training on its way to sites that join. This site sends its own, or joins and gets one.

A site that joins takes part in syncs, counts nothing, and keeps their outcomes. It applies those that are not in the
state once that has come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..group.joining import Joining
from ..group.packing import Packing, unpack
from ..group.transfer import Transfers
from .living import Living
from .report import Report
from .shared import Shared
from .sync import Ended


class Arriving:
    """`shared`: what all sites have alike, of which the state is made. `tell` returns what else a site needs, in
    Python's own types and tensors."""

    def __init__(self, shared: Shared, tell: Callable[[], Mapping[str, Any]]) -> None:
        self._shared, self._tell = shared, tell
        self._transfers = Transfers(self._pack)
        self._joining: Joining[Ended] | None = None
        self.told: Mapping[str, Any] = {}
        """What `tell` returned on the site whose state has come."""

    # ---- this site joins ----

    def begin(self) -> None:
        """This site joins: it lacks the state, and all later outcomes."""
        self._shared.forget()
        self._joining = Joining[Ended](
            self._transfers,
            self._load,
            lambda ended: ended.turn >= self._shared.syncs,
            lambda ended: self._shared.follow(ended.outcome),
            lambda ended: ended.nbytes,
        )

    def end(self) -> None:
        """This site has all that the others have."""
        self._joining = None
        self._shared.arrive()

    @property
    def joins(self) -> bool:
        """Whether this site does, so that the model has the difference from the shared weights alone."""
        return self._joining is not None

    @property
    def lacks(self) -> bool:
        """Whether it lacks the state."""
        return self._joining is not None and not self._joining.is_loaded

    @property
    def is_complete(self) -> bool:
        """Whether it has all that the others have."""
        return self._joining is None or self._joining.is_done

    @property
    def is_full(self) -> bool:
        """Whether no more outcomes should come before the state."""
        return self._joining is not None and self._joining.is_full

    def keep(self, ended: Ended) -> None:
        """The latest outcome, of a sync in which this site has taken part as it joins."""
        assert self._joining is not None  # noqa: S101  # for mypy
        self._joining.keep(ended)

    def catch_up(self) -> None:
        """Applies all outcomes that are here, if the state is."""
        while self._joining is not None and self._joining.is_loaded and self._joining.catch_up():
            pass

    # ---- both ends ----

    @property
    def is_busy(self) -> bool:
        """Whether a state is on its way."""
        return bool(self._transfers.sendings) or self._joining is not None

    def pump(self, *, may_pack: bool, waits: bool) -> bool:
        """Keeps states on their way; whether this site has got on. `may_pack`: whether the model lacks no outcome,
        which a site that joins would not keep. `waits`: first waits for a piece. Raises the errors of messages."""
        if may_pack:
            self._transfers.pack()
        self._transfers.send()
        return self._joining is not None and self._joining.catch_up(waits=waits)

    def settle(self) -> None:
        """Before a sync changes the state."""
        self._transfers.finish_packing()

    def forget(self, listening: set[int]) -> None:
        """Only these members still lack the state."""
        self._transfers.forget(listening)

    def report(self) -> dict[str, Any]:
        """For a `Report`."""
        return self._transfers.report()

    def match(self, living: Living, reports: Mapping[int, Report]) -> None:
        """All sites of a new group call, with the reports of all, by member: each that lacks the state gets it from
        one that trains, and whose loop is not away."""
        lacking = {member for member, each in reports.items() if each.lacks}
        self._transfers.forget(lacking)
        if not lacking:
            return
        training, sent = living.training, {member: each.transfers for member, each in reports.items()}
        givers = [member for member in training if not reports[member].is_away] or training
        is_new = self._transfers.match(living.party, living.everyone, givers, lacking, sent)
        if is_new and self._joining is not None:
            self._joining.begin()

    def _pack(self) -> Packing:
        return Packing({**self._shared.state(), "syncs": self._shared.syncs, "told": self._tell()})

    def _load(self, packed: Tensor) -> None:
        found = unpack(packed)
        self._shared.restore(found, found["syncs"])
        self.told = found["told"]
