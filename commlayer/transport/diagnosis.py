"""`Diagnosis`: the exceptions of one group's operations: the call, the culprit with its host, and the remedy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CommError
from .call import Call
from .inquiry import ALL_CALLED, Inquiry
from .native import Engine
from .paths import pair_paths
from .stall import Waits
from .status import ERRORS, ffi, lib

LEAST_S = 0.001
"""Texts show no shorter time."""

_SIGNALED = 0x400
"""The kernel's flag of a process that a signal ends, as in native/os/process.c."""

HOW = "destroy_process_group, or the end of its script"
EVEN = "do all ranks make equally many steps, and the same calls? (DDP with uneven data: `with model.join():`)"
"""The remedy where a rank has left."""

SAME_MESSAGE = "send and receive tensors of the same size, in the same order on both ranks, or with different tags"
"""The remedy where the two ends of a message differ."""

SLOW = "their data did not come in time: look at print(commlayer.paths()), or raise the timeout of the group"
"""The remedy where all ranks have called an operation that timed out."""

NAMELESS = ("", "undefined")
"""Descriptions that torch gives a group without one."""


@dataclasses.dataclass
class Diagnosis:
    """Words the errors of one group on this rank. `descriptions`: of all ranks' engines, see `Engine.describe`."""

    engine: Engine
    name: str
    rank: int
    descriptions: Sequence[dict[str, Any]]
    describe: Callable[[], str] = str
    """Returns the group's description in torch."""
    inquiry: Inquiry | None = None
    """Asks the other ranks for their calls; None: cannot."""
    waits: Waits | None = None
    """Warns of collectives that wait; None: does not."""
    is_aborted_here: bool = False
    """Whether this rank aborted the group."""

    @property
    def who(self) -> str:
        """This rank and the group: the beginning of each text."""
        description = self.describe()
        shown = "" if description in NAMELESS else f" ({description})"
        return f"rank {self.number(self.rank)} of group {self.name!r}{shown}"

    def number(self, rank: int) -> int:
        """The number in the job of a rank of the group."""
        return int(self.descriptions[rank]["peer"])

    def error(
        self,
        status: int,
        culprit: int | None,
        detail: str,
        call: Call | None,
        farewell: Callable[[], str] = str,
        *,
        left: bool = False,
    ) -> CommError:
        """The exception for a status of the engine. `culprit`: a rank of the group, or None; `detail` goes after it.
        `farewell`: see `base.Group`. `left`: the culprit has closed the group."""
        kind, remedy = ERRORS.get(status, (CommError, "unknown status"))
        elapsed = "" if call is None else f" after {_seconds(call.elapsed_s())}"
        operation = "" if call is None else f"{call.title()} {call.arguments(self._numbers())}".rstrip() + ": "
        text = ffi.string(lib.cl_error_text(status)).decode()
        left = left and culprit is not None and status == lib.CL_EPEERLOST
        if left and culprit is not None:
            text, elapsed, remedy = f"rank {self.number(culprit)} has left the group ({HOW})", "", EVEN
        if status == lib.CL_EMISMATCH and call is not None and call.is_message:
            remedy = SAME_MESSAGE
        culprit, told = self._inquire(status, culprit, call, f"{operation}{text}{elapsed}")
        if status == lib.CL_ETIMEDOUT and told.endswith(ALL_CALLED):
            remedy = SLOW
        if status == lib.CL_EABORTED and self.is_aborted_here and culprit in (None, self.rank):
            text, told, remedy = f"{text} by this rank", "", "make a new group: abort() ends every operation"
        failure = f"{operation}{text}{elapsed}"
        parts = [self._place(culprit), self._last_heard(culprit) if status == lib.CL_EPEERLOST and not left else ""]
        about = f" ({'; '.join(filter(None, parts))})" if culprit is not None else ""
        if status in (lib.CL_EPEERLOST, lib.CL_EABORTED) and (excluded := farewell()):
            told, remedy = excluded, "end this process, or let it join another job"
        error = kind(f"{self.who}: {failure}{about}{detail}{'; ' * bool(told)}{told}; {remedy}")
        error.rank, error.group = self.number(self.rank), self.name
        if culprit is not None:
            error.culprit, error.host = self.number(culprit), self.descriptions[culprit].get("hostname")
        if call is not None:
            error.operation, error.sequence = call.name, call.sequence
        return error

    def _numbers(self) -> list[int]:
        return [int(description["peer"]) for description in self.descriptions]

    def _inquire(self, status: int, culprit: int | None, call: Call | None, failure: str) -> tuple[int | None, str]:
        """The culprit on which the ranks agree, and what their calls tell."""
        if self.inquiry is None:
            return culprit, ""
        if status == lib.CL_EMISMATCH:
            verdict = self.inquiry.mismatch(call, culprit)
        elif status == lib.CL_ETIMEDOUT:
            verdict = self.inquiry.timeout(call, culprit, f"{self.who}: {failure}")
        elif status == lib.CL_EABORTED:
            verdict = self.inquiry.held if self.is_aborted_here else self.inquiry.aborted()
        else:
            return culprit, ""
        if verdict is None:
            return culprit, ""
        return verdict.culprit, verdict.text.removeprefix(f"{self.who}: {failure}").removeprefix("; ")

    def _place(self, culprit: int | None) -> str:
        if culprit is None:
            return ""
        if culprit == self.rank:
            return f"culprit: rank {self.number(culprit)}, this one"
        host = self.descriptions[culprit].get("hostname")
        return f"culprit: rank {self.number(culprit)}{f' on {host}' * bool(host)}"

    def _last_heard(self, culprit: int | None) -> str:
        """The last sign of life of a lost peer, and the path by which it came."""
        if culprit is None or culprit == self.rank:
            return ""
        own, peer = self.descriptions[self.rank], self.descriptions[culprit]
        if own["host"] == peer["host"] and own["shm"] and peer["shm"]:
            return f"its process {peer['pid']} on this host {_state_of(peer['pid'])}"
        try:
            paths = self.engine.routes.paths(peer["peer"])
        except CommError:
            return ""  # the engine is closed
        ends = pair_paths(own, peer)
        heard = max(range(len(paths)), key=lambda index: paths[index]["heard_us"], default=None)
        if heard is None:
            return ""
        if paths[heard]["heard_us"] == 0:
            tried = ", ".join(
                f"{own['ports'][path.local]['ifname']} to {_endpoint(path.address, path.port)}" for path in ends
            )
            return f"no packet of it ever came; paths: {tried}: a firewall, or the wrong interface? (COMMLAYER_IFNAME)"
        ago_s = time.monotonic() - paths[heard]["heard_us"] / 1e6
        end = ends[heard]
        interface = own["ports"][end.local]["ifname"]
        return f"its last packet came {ago_s:.1f} s ago over {interface} from {_endpoint(end.address, end.port)}"


def _seconds(elapsed_s: float) -> str:
    """A time for readers: nobody needs microseconds here."""
    return f"{elapsed_s:.3g} s" if elapsed_s >= LEAST_S else f"less than {LEAST_S:g} s"


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _state_of(pid: int) -> str:
    """The state of a process of this host that is taken for lost, for texts. Its parent may not know yet (state Z)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "has ended"
    state, flags = (stat.rpartition(")")[2].split()[field] for field in (0, 6))
    if state in ("Z", "X"):
        return "has ended"
    if int(flags) & _SIGNALED:
        return "was ended by a signal (the kernel is still writing its core, or freeing its memory)"
    return "is there, but does not answer"
