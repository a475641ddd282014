"""The stage of the fault tests: sites with ranks, witnesses of a fault, and notes of their findings."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import commlayer
from commlayer.tools.emulate.network import Network
from tests import ROOT, ranks

NOTES = ROOT / "out" / "faults.json"
"""One JSON object per line and case."""

SLACK_S = 20.0
"""The delay that a busy test machine may add to a documented time; the timeout of an operation is longer."""

PEER_TIMEOUT_S = 3.0
"""The default of COMMLAYER_PEER_TIMEOUT_S."""

_FAULT = "fault at"


@dataclasses.dataclass
class Site:
    """The places of the ranks: `hosts[rank]` is the number of the host."""

    name: str
    hosts: tuple[int, ...]
    network: Network | None = None
    environ: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    def shares_memory(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one host."""
        return self.hosts[rank] == self.hosts[other]

    def outcomes(self, function: Callable[..., Any], *args: Any, **environ: str) -> list[ranks.Outcome]:
        """The same as `ranks.outcomes`, on this site."""
        places = None if self.network is None else [self.network.name(host) for host in self.hosts]
        return ranks.outcomes(function, self.size, *args, environ={**self.environ, **environ}, places=places)


@dataclasses.dataclass
class Seen:
    """One rank's view of a fault."""

    error: str | None
    """The type's name; None when all went well."""
    text: str
    seconds: float
    """The time from the fault to the error; without one, the slowest operation's time beyond the usual one."""


def begin(rank: int, size: int, **options: Any) -> None:
    """Joins the job, and makes sure that everything works before it is broken."""
    meeting()
    ranks.init(rank, size, **options)
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    time.sleep(0.1)  # a rank killed before its last acknowledgement has left would keep the others in the barrier


@functools.cache
def meeting() -> dist.Store:
    """This process's connection to the Store: made once, since torch may take 5 s for one, and that is not our time."""
    return ranks.store()


def mark() -> None:
    """The fault happens now. The clock is the machine's: the ranks are processes of one."""
    meeting().set(_FAULT, str(time.monotonic()))


def witness(operation: Callable[[], Any]) -> Seen:
    """Runs an operation that is to fail."""
    try:
        operation()
    except commlayer.CommError as error:
        return Seen(type(error).__name__, str(error), time.monotonic() - float(meeting().get(_FAULT)))
    return Seen(None, "", 0.0)


def culprit_of(seen: Seen) -> int:
    """The rank that the error names."""
    named = re.search(r"culprit: rank (\d+)", seen.text)
    assert named is not None, seen
    return int(named[1])


def watch(operation: Callable[[], Any], seconds: float) -> Seen:
    """Runs an operation that is not to fail, again and again; the ranks end with the same one."""
    times: list[float] = []
    go_on = torch.ones(1)
    start = time.monotonic()
    while go_on.item():
        before = time.monotonic()
        operation()
        times.append(time.monotonic() - before)
        go_on.fill_(float(before - start < seconds) if dist.get_rank() == 0 else 0.0)
        dist.all_reduce(go_on)
    return Seen(None, f"{len(times)} operations", max(times) - sorted(times)[len(times) // 2])


def freeze_myself(seconds: float) -> None:
    """SIGSTOP, and SIGCONT after a while from a helper."""
    me = os.getpid()
    mark()
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {me}"]):
        os.kill(me, signal.SIGSTOP)


def die() -> None:
    """kill -9."""
    mark()
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def later(seconds: float, action: Callable[[], Any]) -> Iterator[None]:
    """Does something while the body runs."""
    timer = threading.Timer(seconds, action)
    timer.start()
    yield
    timer.join()


def survived(outcomes: list[ranks.Outcome], victim: int | None = None) -> dict[int, Seen]:
    """The views of the survivors, by rank; none of them crashed, hung or raised an unexpected error."""
    seen = {}
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        assert outcome.exit_code == 0, rank
        seen[rank] = outcome.result
    return seen


def note(fault: str, site: str, seen: dict[int, Seen], limit_s: float | None = None) -> None:
    """Writes a case down, with the longest time any rank took to notice; None: there is no documented one."""
    NOTES.parent.mkdir(exist_ok=True)
    errors = sorted({outcome.error or "none" for outcome in seen.values()})
    line = {
        "fault": fault,
        "site": site,
        "errors": errors,
        "seconds": max(outcome.seconds for outcome in seen.values()),
    }
    with NOTES.open("a") as file:
        file.write(json.dumps({**line, "limit_s": limit_s}) + "\n")
