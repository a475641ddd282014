"""Warns of a hang long before the timeout: which ranks have not called a collective, and where they are instead.

The ranks tell each other through the Store, and only when a collective has waited. After half of COMMLAYER_STALL_S a
rank says that it has called the collective. After all of that time the ranks that have not said so are the late ones.
The lowest waiting rank of each host warns of them, and leaves a note for each. A late rank finds its note when it has
called nothing for as long, and logs where its main thread is. `counterpart` warns of sends and receives.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

from .base import Store
from .call import Call, Calls
from .counterpart import Counterparts, Questions, fields_of, name_of
from .inquiry import name_ranks
from .log import log
from .places import place_of, where

LOOKS = 6
"""Looks of the thread within COMMLAYER_STALL_S."""
LOOK_MAX_S = 5.0
ANSWER_LOOK_S = 0.5
"""The longest pause between looks while an answer of another rank is awaited."""
DOUBLINGS_MAX = 6
"""How often the pause between looks at most doubles while a Store does not answer."""
PATIENCE_LOOKS = 3
"""Looks of another rank within which it must have answered."""
CLOSE_S = 2.0
"""The longest wait for the thread at the end of the process."""
ENDED_MAX = 64
"""Collectives that have ended, behind which no older one is looked for."""
TOLD_MAX = 8
"""Late ranks that a warning names, and that get notes."""


_guard = threading.Lock()
_watch: StallWatch | None = None


@dataclasses.dataclass(eq=False)
class Waits:
    """The operations of one group on this rank that wait. `descriptions`: of all ranks' engines."""

    who: Callable[[], str]
    """Returns this rank and the group, for texts."""
    name: str
    """The name of the group."""
    rank: int
    hosts: Sequence[Sequence[int]]
    descriptions: Sequence[dict[str, Any]]
    calls: Calls
    store: Store
    """The Store of this life of the group."""
    notes: Store
    """The Store shared by all groups of the job."""
    awaited: Callable[[], list[int]]
    """Returns the ranks that the collectives in flight wait for, as the engine sees it."""
    messages: Counterparts = dataclasses.field(init=False)
    _told: int = 0
    _looked: int = 0
    _warned: Call | None = None

    def __post_init__(self) -> None:
        self.messages = Counterparts(self.who, self.name, self.rank, self.descriptions, self.calls, self.notes)

    @property
    def life(self) -> str:
        """The life of this rank's engine."""
        return str(self.descriptions[self.rank]["life"])

    @property
    def own_name(self) -> str:
        """This rank of the job and its host, for texts."""
        return name_of(self.descriptions[self.rank])

    def oldest(self) -> Call | None:
        """The oldest collective in flight."""
        found, ended = None, 0
        for call in reversed(list(self.calls.collectives)):
            if call.is_running() and call.submitted_s:
                found, ended = call, 0
            else:
                ended += 1
            if ended > ENDED_MAX:
                break
        return found

    def follow(self, call: Call | None, stall_s: float) -> None:
        """Tells the other ranks, and warns, of `call`, the oldest collective in flight."""
        warned = self._warned
        if warned is not None and not warned.is_running():
            self._warned = None
            if not warned.has_failed():
                log.warning("%s: %s went on after %.0f s", self.who(), warned.title(), warned.elapsed_s())
        if call is None:
            return
        waited_s = call.elapsed_s()
        if waited_s >= stall_s / 2 and self._told < call.sequence:
            self._told = call.sequence
            self.store.set(self._key(call, self.rank), "")
        if waited_s >= stall_s and self._looked < call.sequence:
            self._looked = call.sequence
            self._warn(call, waited_s)

    def close(self) -> None:
        """The group is about to be closed: the watch of the process forgets it, and ends with the last one."""
        global _watch
        with _guard:
            watch = _watch
            if watch is None or not watch.remove(self):
                return
            _watch = None
        watch.close()

    def _key(self, call: Call, rank: int) -> str:
        return f"waits/{call.sequence}/{rank}"

    def _warn(self, call: Call, waited_s: float) -> None:
        size = len(self.descriptions)
        late = sorted(self._late(call, [rank for rank in range(size) if rank != self.rank]))
        host = next(ranks for ranks in self.hosts if self.rank in ranks)
        if self.rank != min(rank for rank in host if rank not in late):
            return
        self._warned = call
        called = f"{call.title()} {call.arguments(self._numbers())}".rstrip()
        place = place_of(call)
        log.warning(
            *("%s: %s%s has waited %.0f s: %s", self.who(), called, f", called in {place}," * bool(place)),
            *(waited_s, self._reason(late)),
        )
        for rank in late[:TOLD_MAX]:
            text = f"{self.who()} has waited {waited_s:.0f} s for this rank to call {called}"
            note = {"group": self.name, "sequence": call.sequence, "text": text}
            self.notes.set(note_key(self.descriptions[rank]["life"]), json.dumps(note))

    def _late(self, call: Call, ranks: Sequence[int]) -> Iterator[int]:
        """Those of `ranks` that have not said that they called it: few, so the Store is asked about many at once."""
        if not ranks or self.store.check([self._key(call, rank) for rank in ranks]):
            return
        if len(ranks) == 1:
            yield ranks[0]
            return
        middle = len(ranks) // 2
        yield from self._late(call, ranks[:middle])
        yield from self._late(call, ranks[middle:])

    def _reason(self, late: Sequence[int]) -> str:
        if late:
            more = f" and {len(late) - TOLD_MAX} more" if len(late) > TOLD_MAX else ""
            names = ", ".join(name_of(self.descriptions[rank]) for rank in late[:TOLD_MAX])
            return f"{names}{more} {'has' if len(late) == 1 else 'have'} not called it; see the warning there"
        waits = self.awaited()
        data = f", this rank waits for data of {name_ranks(waits, self._numbers())}" if waits else ""
        return f"all ranks have called it{data}; see the paths in print(commlayer.paths())"

    def _numbers(self) -> list[int]:
        return [int(description["peer"]) for description in self.descriptions]


class StallWatch:
    """Watches the groups of this process. Other threads may add groups."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self.pause_s = min(stall_s / LOOKS, LOOK_MAX_S)
        self._groups: list[weakref.ref[Waits]] = []
        self._questions: dict[str, Questions] = {}
        self._begun_s = time.monotonic()
        self._process = os.getpid()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-stall", daemon=True)
        self._finalizer: Finalize | None = None

    def add(self, waits: Waits) -> None:
        """Also watches this group, until it is gone."""
        self._groups = [*(group for group in self._groups if group() is not None), weakref.ref(waits)]

    def start(self) -> None:
        """Starts the thread, which ends before the interpreter does: a thread in the Store's C++ code must not meet
        its end."""
        self._thread.start()
        self._finalizer = Finalize(None, self.close, exitpriority=1)

    def remove(self, waits: Waits) -> bool:
        """Watches this group no longer; returns whether it was the last one."""
        self._groups = [group for group in self._groups if group() not in (None, waits)]
        return not self._groups

    def close(self) -> None:
        """Ends the thread, unless a Store keeps it."""
        self._ends.set()
        if self._finalizer is not None:
            self._finalizer.cancel()  # its registry would keep this object
        if self.is_of_this_process() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def is_of_this_process(self) -> bool:
        """False in a process that was forked since: it lacks the thread."""
        return self._process == os.getpid()

    def look(self) -> bool:
        """Looks once at all groups; returns whether answers of other ranks are awaited. Raises an error of the Store if
        one does not answer."""
        groups = [found for group in self._groups if (found := group()) is not None]
        running = [group.oldest() for group in groups]
        for group, call in zip(groups, running, strict=True):
            group.follow(call, self.stall_s)
        latest = [group.calls.collectives[-1].submitted_s for group in groups if group.calls.collectives]
        if not any(running) and time.monotonic() - max(latest, default=self._begun_s) >= self.stall_s / 2:
            for group in groups:
                self._read_note(group)
        self._answer(groups)
        asks = [group.messages.follow(self.stall_s, PATIENCE_LOOKS * self.pause_s) for group in groups]
        return any(asks)

    def _answer(self, groups: Sequence[Waits]) -> None:
        """Answers the questions of other ranks. Each engine has its own: those of its life."""
        lives: dict[str, list[Waits]] = {}
        for group in groups:
            lives.setdefault(group.life, []).append(group)
        self._questions = {
            life: self._questions.get(life) or Questions(of_life[0].notes, life, of_life[0].own_name)
            for life, of_life in lives.items()
        }
        for life, of_life in lives.items():
            self._questions[life].answer({group.name: group.messages for group in of_life})

    def _read_note(self, waits: Waits) -> None:
        key = note_key(waits.life)
        if not waits.notes.check([key]):
            return
        try:
            note = fields_of(waits.notes.get(key), group=str, sequence=int, text=str)
        except ValueError as error:
            waits.notes.delete_key(key)
            log.warning("%s skips a malformed note in the Store: %s", waits.own_name, error)
            return
        if note["group"] != waits.name:
            return  # it is of another group of this process
        waits.notes.delete_key(key)
        if waits.calls.collective_count < note["sequence"]:  # else it has come meanwhile
            peer = waits.descriptions[waits.rank]["peer"]
            log.warning("rank %s: %s; its main thread is in %s", peer, note["text"], where())

    def pause_after(self, *, asks: bool, failures: int) -> float:
        """Seconds until the next look. `asks`: answers are awaited. It doubles after each failure in a row, because
        torch warns of each request to a Store that is gone."""
        pause_s = min(self.pause_s, ANSWER_LOOK_S) if asks else self.pause_s
        return float(pause_s * 2 ** min(failures, DOUBLINGS_MAX))

    def _run(self) -> None:
        asks, failures = False, 0
        while not self._ends.wait(self.pause_after(asks=asks, failures=failures)):
            asks = False
            try:
                asks, failures = self.look(), 0
            except (RuntimeError, ValueError):  # the Store's process is gone
                failures += 1
                log.debug("a Store does not answer: no warnings of operations that wait", exc_info=True)


def watch(group: Any, calls: Calls, store: Store, root: Store) -> Waits | None:
    """Watches a native group as long as the returned object lives, which does not keep the group alive. None: the
    settings ask for no warnings. `store` is that of this life of the group, `root` that of the job."""
    global _watch
    stall_s = group.engine.config.stall_s
    if not stall_s:
        return None
    this = weakref.ref(group)

    def of_group(name: str) -> Any:
        found = this()
        return None if found is None else getattr(found, name)

    waits = Waits(
        who=lambda: of_group("who") or "a group that is gone",
        name=group.diagnosis.name,
        rank=group.rank,
        hosts=group.hosts,
        descriptions=group.diagnosis.descriptions,
        calls=calls,
        store=store,
        notes=root,
        awaited=lambda: (of_group("awaited") or list)(),
    )
    with _guard:
        if _watch is None or not _watch.is_of_this_process():
            _watch = StallWatch(stall_s)
            _watch.start()
        _watch.add(waits)
    return waits


def note_key(life: str) -> str:
    """The key of the note for a process, by the life of its engine."""
    return f"commlayer/awaited/{life}"
