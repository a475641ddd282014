"""One collective of a layout, and the ranks that take part in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
When = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Axis:
    """Groups of `size` ranks whose numbers are `stride` apart."""

    size: int
    stride: int = 1

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank`, in their order."""
        first = rank - rank // self.stride % self.size * self.stride
        return tuple(first + place * self.stride for place in range(self.size))


@dataclass(frozen=True)
class Exchange:
    """A collective of one layer: with every micro-batch in `forward` or `backward`, or once a `step`."""

    kind: Kind
    axis: Axis
    size_bytes: int
    """The whole tensor: what a rank has after an all-gather and before a reduce-scatter or an all-to-all."""
    when: When
    is_parameters: bool = False
    """Whether parameters or their gradients travel, which computation need not wait for; else activations do."""

    @property
    def received_bytes(self) -> int:
        """Bytes that each rank receives, and sends: the least possible (doi 10.1016/j.jpdc.2008.09.002)."""
        if self.kind == "send":
            return self.size_bytes
        return self.rounds * (self.size_bytes - self.size_bytes // self.axis.size)

    @property
    def messages(self) -> int:
        """Messages that each rank sends, one to each other rank in each round."""
        return 1 if self.kind == "send" else self.rounds * (self.axis.size - 1)

    @property
    def rounds(self) -> int:
        """Steps after one another: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.kind == "all_reduce" else 1
