"""`Accord`: processes that all must propose the same agree, through the Store, that they have, or get one error.

The first one to come proposes, and each other one compares its own proposal with that. Whoever finds out first how the
agreement ends, well or not, says so in one key that is written once, the verdict. All obey that, so no one goes on
alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from ..errors import CommError, MismatchError, OperationTimeoutError, PeerLostError
from .base import Store

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02
"""Pauses between looks at the Store. A call that waits there would keep other threads from it."""

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (MismatchError, OperationTimeoutError, PeerLostError)
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How an agreement has ended."""

    agreed: str = ""
    """The proposal of all; empty: they do not agree."""
    error: str = ""
    """The name of the error that all raise; empty: they agree."""
    text: str = ""
    culprit: int | None = None
    """The rank to look at."""

    @classmethod
    def against(cls, kind: type[CommError], text: str, culprit: int | None) -> Verdict:
        """One that all raise as an error of this kind: MismatchError, OperationTimeoutError or PeerLostError."""
        return cls(error=kind.__name__, text=text, culprit=culprit)

    @property
    def kind(self) -> type[CommError] | None:
        """The type of the error; None: they agree."""
        return _KINDS[self.error] if self.error else None


class Accord:
    """One agreement, under the keys of a Store that begin with `prefix`, which no other one has used.

    `rank` is this process's, and `awaited` are the ranks of all that must agree, this one included.
    """

    def __init__(self, store: Store, prefix: str, rank: int, awaited: Collection[int]) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._awaited = awaited

    def settle(
        self,
        proposal: str,
        differ: Callable[[int, str], str],
        obstacle: Callable[[], Verdict | None],
        late: Callable[[Sequence[int]], str],
        timeout_s: float,
    ) -> Verdict:
        """The verdict, which this process helps to find. One of others' may be on another proposal than this one's.

        `differ` words that this proposal is not the one of another rank. `obstacle` is asked again and again, and
        returns a verdict once it knows that they cannot agree. `late` words that some have not come within `timeout_s`.
        Raises RuntimeError without a Store.
        """
        self._store.set(self._key(str(self._rank)), "")
        told = self._store.compare_set(self._key("proposal"), "", f"{self._rank} {proposal}").decode()
        first, _, proposed = told.partition(" ")
        if proposed != proposal:
            self.end(Verdict.against(MismatchError, differ(int(first), proposed), self._rank))
        elif self._store.add(self._key("count"), 1) == len(self._awaited):
            self.end(Verdict(proposal))
        end, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while (verdict := self.verdict()) is None:
            against = obstacle()
            if against is None and time.monotonic() >= end:
                absent = [rank for rank in self._awaited if not self.has_come(rank)]
                culprit = absent[0] if absent else None
                against = Verdict.against(OperationTimeoutError, late(absent), culprit)
            if against is not None:
                self.end(against)
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return verdict

    def verdict(self) -> Verdict | None:
        """None: there is none yet."""
        key = self._key("verdict")
        return Verdict(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def proposal(self) -> str:
        """The one of the first to come; empty: nobody has come."""
        key = self._key("proposal")
        told = self._store.get(key).decode() if self._store.check([key]) else ""
        return told.partition(" ")[2]

    def has_come(self, rank: int) -> bool:
        """Whether this rank has proposed."""
        return self._store.check([self._key(str(rank))])

    def end(self, verdict: Verdict) -> None:
        """Makes this the verdict, unless there is one."""
        self._store.compare_set(self._key("verdict"), "", json.dumps(dataclasses.asdict(verdict)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"


@contextlib.contextmanager
def store_errors(error_of: Callable[[str], CommError]) -> Iterator[None]:
    """A context in which `error_of(text)` is raised where the Store does not answer."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise error_of(
            f"the job's Store does not answer: the process that serves it (rank 0, or torchrun's agent) is gone, or "
            f"the network to its host; look at its log, and restart the job. ({error})"
        ) from error
