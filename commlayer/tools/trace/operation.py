"""`Operation`: one collective, send or receive as a rank's file shows it. `Record`: one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Key = tuple[str, tuple[int, ...], int | None, int]
"""Names an operation: group, its ranks, of a message this rank, number. Collectives have one name on all ranks."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the training."""

    number: int
    ended_ns: int
    """The time when the optimizer had made it."""


@dataclasses.dataclass(frozen=True)
class PathReading:
    """The counters of a path of the network at a time."""

    name: str
    time_ns: int
    counters: Mapping[str, int]
    """`transport.path_watch.NOTED`."""


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation of one rank. Times are nanoseconds since 1970 on the clock of its file; ranks are of the job."""

    rank: int
    name: str
    """The name in commlayer: all_reduce, send, receive."""
    group: str
    description: str
    """The description of the group; it may be empty."""
    ranks: tuple[int, ...]
    """The ranks of the group."""
    sequence: int
    entered_ns: int
    """The call came between this time and `submitted_ns`."""
    submitted_ns: int
    """No data of this rank left before."""
    began_ns: int | None = None
    """The first byte moved."""
    ended_ns: int | None = None
    """The operation ended well, at this time or before. None: in flight, failed, or not known."""
    failed: bool = False
    root: int | None = None
    peer: int | None = None
    """The other rank of a message; None: a collective, or any source."""
    tag: int | None = None
    """The tag of a message; None: not known."""
    ordinal: int | None = None
    """Number of a message among those with the same ranks, tag and direction; None: not known."""
    nbytes: int = 0
    inputs: int = 0
    """Elements of this rank's inputs."""
    outputs: int = 0
    label: str = ""
    """The part of the training whose data it moves: `bucket 3`; empty: not known."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the trace shows beside these fields."""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.name in ("send", "receive")

    @property
    def key(self) -> Key:
        """Its name in all files."""
        return self.group, self.ranks, self.rank if self.is_message else None, self.sequence

    @property
    def title(self) -> str:
        """Name, number and state."""
        if self.is_message:
            other = "any rank" if self.peer is None else str(self.peer)
            text = f"{self.name} {self.sequence} {'to' if self.name == 'send' else 'from'} {other}"
        else:
            text = f"{self.name} {self.sequence}"
        text += f": {self.label}" if self.label else ""
        return text + (" (failed)" if self.failed else " (in flight)" if self.ended_ns is None else "")


@dataclasses.dataclass(eq=False)
class Record:
    """One file, which has a clock of its own."""

    path: Path
    kind: str
    """flight: of the flight recorder; profile: of torch.profiler."""
    rank: int
    host: str
    """Empty: not known."""
    pid: int | None
    written_ns: int
    """The time when it was written; of a profile, the end of its last event."""
    operations: Sequence[Operation]
    events: Sequence[dict[str, Any]] = ()
    """Those of a profile, as torch writes them."""
    steps: Sequence[Step] = ()
    """The steps in their order."""
    paths: Sequence[PathReading] = ()
    """The readings in the order of their times."""
    base_ns: int = 0
    """Time at which those events have `ts` 0."""
