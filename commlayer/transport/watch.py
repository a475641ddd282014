"""Automatic dumps of the flight record: when a group fails, on a signal, and at the end of the process.

With COMMLAYER_FLIGHT_DIR each process writes `flight_<rank>.json`, the record, and `stacks_<rank>.txt`, the Python
stacks of its threads, into that folder.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path

from ..config import Config
from .flight import Recorder, recorder
from .fork import disowned_in_children
from .whole_file import whole_file

log = logging.getLogger("commlayer")

LOOK_S = 0.2
"""How often a thread looks for groups that failed: a rank that waits for nothing learns of it in no other way."""

DRAIN_S = 0.2
"""How long a signal's text may take to come."""

_PIPE_BYTES = 1 << 16

_guard = threading.Lock()
_watch: Watch | None = None


def arm(config: Config) -> None:
    """Starts the watch of this process, if the settings ask for one."""
    global _watch
    with _guard:
        if _watch is None and (config.flight_dir or config.flight_signal):
            _watch = Watch(recorder, Path(config.flight_dir or "."), bool(config.flight_dir), config.flight_signal)


def failed(group: int) -> None:
    """The group with this number has failed: called before the error is raised, which may end the process."""
    watch = _watch
    if watch is not None:
        watch.failed(group)


class Watch:
    """Writes the records of one process into a folder."""

    def __init__(self, recorder: Recorder, folder: Path, by_itself: bool, signal_name: str) -> None:
        """`by_itself`: also when a group fails and at the end of the process."""
        self._recorder = recorder
        self._folder = folder
        self._by_itself = by_itself
        self._lock = threading.Lock()
        self._told: set[int] = set()
        if by_itself:
            threading.Thread(target=self._look, name="commlayer-flight", daemon=True).start()
            Finalize(None, self._end, exitpriority=1)  # processes that multiprocessing made do not run atexit
        self._signal: int | None = None
        disowned_in_children(self)
        if signal_name:
            self._listen(getattr(signal, f"SIG{signal_name.upper()}"))

    def disown(self) -> None:
        """See `fork.Owned`. The child writes no record, nor its stacks into the pipe of the parent."""
        global _guard, _watch
        _guard, _watch = threading.Lock(), None
        if self._signal is not None:
            with open(os.devnull, "wb") as nothing:
                faulthandler.register(self._signal, file=os.dup(nothing.fileno()), all_threads=False)

    def failed(self, group: int) -> None:
        """Writes the record, once for each group."""
        with self._lock:
            if not self._by_itself or group in self._told:
                return
            self._told.add(group)
            self.write("a group failed")

    def write(self, reason: str) -> None:
        """Writes the record and the stacks of now. Never raises."""
        rank = self._recorder.rank
        path = self._folder / f"flight_{rank}.json"
        try:
            self._recorder.write(path, reason)
            with whole_file(self._folder / f"stacks_{rank}.txt") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            log.warning("rank %s: cannot write the flight record into %s: %s", rank, self._folder, error)
        else:
            log.warning("rank %s: wrote the flight record to %s (%s)", rank, path, reason)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            for group in self._recorder.failures():
                self.failed(group)

    def _end(self) -> None:
        with self._lock:
            if not self._told:
                self.write("the process ends")

    def _listen(self, number: int) -> None:
        """Dumps on a signal, also while the main thread waits in C, where no handler in Python would run: faulthandler
        writes into a pipe, and a thread that reads it dumps.

        faulthandler writes the stack of the main thread alone, which is not read: other threads run on while a signal
        is handled, and to look at their stacks without Python's lock can crash the process.
        """
        if not has_default_action(number):
            log.warning(
                "COMMLAYER_FLIGHT_SIGNAL: this process already has a handler for %s, which stays; use another signal",
                signal.Signals(number).name,
            )
            return
        read, write = os.pipe()
        os.set_blocking(write, False)  # a full pipe must not block the thread that got the signal
        faulthandler.register(number, file=write, all_threads=False)
        self._signal = number
        threading.Thread(target=self._read, args=(read,), name="commlayer-flight-signal", daemon=True).start()

    def _read(self, pipe: int) -> None:
        while select.select([pipe], [], [])[0]:
            time.sleep(DRAIN_S)
            os.read(pipe, _PIPE_BYTES)
            with self._lock:
                self.write("signal")


def has_default_action(number: int) -> bool:
    """Whether nothing in this process handles or ignores the signal, in Python or in C."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (number - 1) & 1:
            return False
    return True
