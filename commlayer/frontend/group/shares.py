"""`Shares`: the hosts' shares of a group's all-reduces, by the rates of their links.

Every few all-reduces the ranks exchange the rates that they have measured (an all-gather of 16 bytes for each rank).
Some all-reduces later each of them derives the same weights from these rates. A rank that still lacks rates after
LATE_S cannot wait longer, because the late rank may wait for it in another group: it writes the present weights into
the Store. A rank that would change the weights writes its own. The Store keeps the first entry, and both take it; a
rank whose weights stay need not ask.

Rates that are measured under unequal shares can keep wrong shares alive: if no link is full, because the processors are
the limit or another job's traffic has ended, a host that owns less carries less, and looks slower. So after some time
with unequal shares the ranks return to equal ones, with which all links carry the same, and measure again.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import CommError
from ...plans.codec import VALUE_BYTES
from ...plans.encoded import bytes_per_value
from ...plans.select import plan_for, segment_count
from ...plans.settings import Settings
from ...plans.weights import EQUAL, Rates, Weights, weights_for
from ...transport.base import DType, Group, Handle, Op, Request
from ...transport.log import log

LEAST_BYTES = 256 << 10
"""Shorter all-reduces have equal shards."""

EVERY = 20
"""All-reduces between two changes of the weights."""

LEAD = 8
"""All-reduces from an exchange of rates to the change. The first of all follows its exchange at once."""

FIRST = 2
"""The first all-reduce, from 0, whose weights may differ: the rates are those of the first one."""

LATE_S = 0.02
"""The longest wait for the rates of a late rank."""

POLL_S = 0.0002

CLASS = 2
"""The class of the exchanges: they go before most gradients. A packet of a more urgent class would give all others
shorter queues and shorter bursts for a second (CL_CLASSES_URGENT in native/congestion/class.h)."""

TRIAL = 16
"""How much longer unequal shares last than equal ones after the last return, or one period of EVERY, before all return
to equal shares. Twice as long after each return, as links that are truly unequal pay for it."""

TRIAL_MOST = 128

SPELL_MOST = 16
"""Equal shares that last longer after a return are no trial any more."""

FRESH_S = 2.4
"""The traffic whose rates the peaks hold (native/congestion/peak.h), in seconds at full rate: after a change of the
shares they count once so much has passed. All-reduces below 50 ms with pauses between them leave older rates in."""


class Store(Protocol):
    """The part of torch's Store that the ranks agree with."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class Exchange(NamedTuple):
    """One exchange of rates. The engine uses the arrays until it has ended."""

    handle: Handle
    stood: float
    """Bytes of all-reduces from the last change of the shares to this exchange."""
    own: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]
    """Bytes per second sent and received, by rank."""


class Shares:
    """The shares of one group's hosts. Every rank asks for the weights of the same all-reduces, in the same order."""

    def __init__(self, group: Group, settings: Settings, store: Store, timeout_s: Callable[[], float]) -> None:
        self._group = group
        self._settings = settings
        self._store = store
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._count = 0
        self._present = EQUAL
        self._stood = math.inf  # bytes of all-reduces since the last change of the shares
        self._unequal = 0  # periods of EVERY since the shares were equal
        self._trial = TRIAL
        self._spell = 1  # periods for which they were equal after the last return
        self._returns = False  # whether they are equal since a return
        self._exchange: Exchange | None = None
        self._late: list[Exchange] = []
        self._asked: list[str] = []  # keys of the Store that some rank may still read

    def weights(self, length: int, settings: Settings, parts: int = 1) -> tuple[int, ...]:
        """The weights (`Settings.weights`) for the next all-reduce of `length` bytes, LEAST_BYTES or more, with these
        settings, in so many parts of equal plans.

        Raises CommError if the Store does not answer.
        """
        segments = segment_count(self._group.hosts, length // parts, settings)
        if not segments:
            return ()
        with self._lock:
            since = self._count - FIRST
            self._count += 1
            self._stood += length * _share_of(settings, len(self._group.hosts))
            if since % EVERY == 0 and since >= 0:
                self._decide(str(since))
            if since == -1 or (since % EVERY == EVERY - LEAD and since > 0):
                self._begin()
            # A codec rounds what the others send to an owner, and not what it adds itself: other owners, other bits.
            if segments < self._present.segments or (settings.deterministic and settings.codecs):
                return ()
            return self._present.weights

    def _begin(self) -> None:
        """Sends this rank's rates to all, and receives theirs."""
        group = self._group
        own, rates = np.array(group.rates(), np.float64), np.zeros((group.size, 2), np.float64)
        plan = plan_for("all_gather", rank=group.rank, hosts=group.hosts, numel=2, itemsize=8, settings=self._settings)
        request = Request(plan, own.ctypes.data, rates.ctypes.data, DType.F64, Op.SUM, self._timeout_s(), CLASS)
        self._exchange = Exchange(group.submit(request), self._stood, own, rates)

    def _decide(self, key: str) -> None:
        """All ranks have the same weights from this all-reduce on."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._unequal >= self._trial * self._spell:  # every rank knows, without the others' rates
            self._late.append(exchange)
            self._trial = min(2 * self._trial, TRIAL_MOST)
            self._spell, self._returns = 0, True
            self._take(EQUAL)
        elif not _has_ended(exchange):
            self._late.append(exchange)
            self._agree(key, self._present)
        elif not exchange.handle.failed():  # the group has failed with it, and so will the all-reduce
            self._forget()
            rates = self._of_hosts(exchange.rates)
            if not exchange.stood < FRESH_S * max(max(rate) for rate in rates):
                proposed = weights_for(rates, self._present)
                if proposed != self._present:
                    self._agree(key, proposed)
        self._unequal = self._unequal + 1 if self._present.weights else 0
        self._returns = self._returns and not self._present.weights
        self._spell = min(self._spell + self._returns, SPELL_MOST)

    def _of_hosts(self, rates: npt.NDArray[np.float64]) -> list[Rates]:
        """The rates of each host: of all its ranks together. A rank that sends nothing to other hosts has none."""
        return [Rates(*map(float, rates[list(ranks)].sum(axis=0))) for ranks in self._group.hosts]

    def _agree(self, key: str, proposed: Weights) -> None:
        try:
            answer = self._store.compare_set(key, "", json.dumps(proposed))
        except RuntimeError as error:
            raise CommError(
                f"{self._group.who}: the job's Store does not answer, and the ranks must agree on the shards of the "
                f"hosts: the process that serves it (rank 0, or torchrun's agent) is gone; look at its log ({error})"
            ) from error
        self._asked.append(key)
        weights, segments = json.loads(answer)
        self._take(Weights(tuple(weights), segments))

    def _take(self, weights: Weights) -> None:
        if weights != self._present:
            self._present = weights
            self._stood = 0.0
            log.info("%s: shares of the hosts: %s", self._group.who, weights.weights or "equal")

    def _forget(self) -> None:
        """Every rank has begun an exchange later than these keys, and asks for them no more."""
        for key in self._asked:
            with contextlib.suppress(RuntimeError):  # the Store is gone; the next one that needs it says so
                self._store.delete_key(key)
        self._asked.clear()
        self._late = [change for change in self._late if not change.handle.done()]


def _share_of(settings: Settings, hosts: int) -> float:
    """The bytes of an all-reduce on the wire, for each byte in float32."""
    return bytes_per_value(settings.codecs, hosts) / (2 * VALUE_BYTES) if settings.codecs else 1.0


def _has_ended(exchange: Exchange) -> bool:
    """Waits a moment for the exchange."""
    end_s = time.monotonic() + LATE_S
    while not exchange.handle.done():
        if time.monotonic() >= end_s:
            return False
        time.sleep(POLL_S)
    return True
