"""`Watch`: counts and measures the optimizer steps of a rank, and ends the job after the last one of the trial.

`commlayer_autoload` calls `after_step` in processes that the starter of a trial gave COMMLAYER_TRIAL. Nothing else of
the job changes. At the end, the ranks exchange their records through the Store of the default group, so that the
starter on every host gets those of all ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, NoReturn

import torch
import torch.distributed as dist

from ...errors import ClosedError
from ...frontend.overlap import unchanged
from ...scheduler.deferred import is_in_parts
from ...transport.call import Call
from ...transport.flight import recorder
from ...transport.lags import Lag
from ...transport.stats import paths, stats
from ...transport.whole_file import whole_file
from . import record
from .left_out import LeftOut
from .places import rank_of, tcp_counts
from .record import Record, Step, union_s
from .spec import Spec

_PREFIX = "commlayer/trial"
_LEAVE_S = 10.0
_POLL_S = 0.02

_watch: Watch | None = None


def after_step(folder: str, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer of this process has made a step. The first one to do so counts."""
    global _watch
    if is_in_parts(optimizer):  # `overlap` makes a step for some parameters at a time, after the caller's `step()`
        return
    if _watch is None:
        _watch = Watch(Path(folder), optimizer)
    _watch.after_step(optimizer)


class Watch:
    """The steps of one optimizer of this process."""

    def __init__(self, folder: Path, optimizer: object) -> None:
        self._spec = Spec.read(folder)
        self._folder = folder
        self._optimizer = weakref.ref(optimizer)
        self._done = 0
        self._steps: list[Step] = []
        self._file: IO[str] | None = None
        self._began_s = 0.0
        self._before = _Counts()
        self._start = _Counts()
        self._left_out: LeftOut | None = None
        self._in_flight: list[Call] = []

    def after_step(self, optimizer: object) -> None:
        """Measures the step that ends now, and ends the job after the last one."""
        if optimizer is not self._optimizer():
            return
        ended_s = _now_s()
        self._done += 1
        if self._done > self._spec.warmup:
            self._add(ended_s)
        else:
            self._start = _Counts.now()
            self._before = self._start
        if self._done == self._spec.steps:
            self._end()
        if self._left_out is None and not self._spec.is_real and not recorder.has_groups():
            self._left_out = LeftOut()
            self._left_out.install()
        if self._left_out is not None:
            self._left_out.phase = self._spec.phase(self._done)
        self._began_s = _now_s()

    def _add(self, ended_s: float) -> None:
        counts = _Counts.now()
        calls = recorder.collectives(self._began_s)
        count, nbytes = len(calls), sum(call.nbytes for call in calls)
        if self._left_out is not None:
            count, nbytes = self._left_out.take_counts()
        step = Step(
            phase="real" if self._left_out is None else self._left_out.phase,
            seconds=ended_s - self._began_s,
            collectives=count,
            nbytes=nbytes,
            in_flight_s=self._in_flight_s(calls, ended_s),
            waited_s=(counts.stats.get("waited_us", 0) - self._before.stats.get("waited_us", 0)) / 1e6,
        )
        self._before = counts
        self._steps.append(step)
        if self._file is None:
            self._file = record.path(self._folder, rank_of(os.environ)).open("w", encoding="utf-8", buffering=1)
        self._file.write(record.line(step) + "\n")

    def _in_flight_s(self, calls: Sequence[Call], ended_s: float) -> float:
        """The time of this step with an operation in flight, of this step or of those before it."""
        calls = [*self._in_flight, *calls]
        ends = [call.times() for call in calls]
        self._in_flight = [call for call, end in zip(calls, ends, strict=True) if end is None]
        return union_s(
            (max(call.submitted_s, self._began_s), ended_s if end is None else min(ended_s, end.ended_s))
            for call, end in zip(calls, ends, strict=True)
        )

    def _end(self) -> None:
        counts, start = _Counts.now(), self._start
        is_group = dist.is_initialized()
        found = Record(
            rank=rank_of(os.environ),
            steps=tuple(self._steps),
            world=dist.get_world_size() if is_group else 1,
            host=os.uname().nodename,
            backend=dist.get_backend() if is_group else "",
            uses_engine=recorder.has_groups(),
            takes_hook=unchanged.is_reached(),
            counters={name: value - start.stats.get(name, 0) for name, value in counts.stats.items()},
            lags_s={
                rank: (lag.waited_us - start.lags.get(rank, Lag(0, 0)).waited_us) / 1e6
                for rank, lag in counts.lags.items()
            },
            paths=tuple(paths()) if counts.stats else (),
            tcp={name: value - start.tcp.get(name, 0) for name, value in counts.tcp.items()},
            is_complete=True,
        )
        lines = [*map(record.line, found.steps), found.end_line()]
        if self._file is not None:
            self._file.write(lines[-1] + "\n")
            self._file.close()
        end(self._folder, found.rank, "".join(f"{line}\n" for line in lines), self._spec.timeout_s)


class _Counts:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.stats: Mapping[str, int] = {}
        self.lags: Mapping[int, Lag] = {}
        self.tcp: Mapping[str, int] = {}

    @classmethod
    def now(cls) -> _Counts:
        found = cls()
        found.tcp = tcp_counts()
        try:
            counted = stats()
        except ClosedError:  # the job does not use commlayer
            return found
        found.stats, found.lags = counted, counted.lags
        return found


def _now_s() -> float:
    """The time, once a device has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def end(folder: Path, rank: int, text: str, timeout_s: float) -> NoReturn:
    """Ends this process with status 0, without a traceback, once all ranks have come here and the records are in the
    folder. Neither handlers of `atexit` nor destructors of groups run, which would wait for other ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        exchange(store, folder, rank, dist.get_world_size(), text, timeout_s)
    for child in multiprocessing.active_children():  # workers of data loaders
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def exchange(store: dist.Store, folder: Path, rank: int, world: int, text: str, timeout_s: float) -> None:
    """Tells the other ranks this rank's record, and writes theirs, unless their own process did so."""
    others = [other for other in range(world) if other != rank]
    store.set(f"record/{rank}", text)
    store.wait([f"record/{other}" for other in others], timedelta(seconds=timeout_s))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for other in others:
            path = record.path(folder, other)
            if not path.exists():
                with whole_file(path) as file:
                    file.write(store.get(f"record/{other}"))
    store.add("done", 1)
    deadline_s = time.monotonic() + _LEAVE_S
    if rank != 0:  # which often holds the Store, and leaves last
        return
    while store.add("done", 0) < world and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
