"""`InFlight`: the reductions of a model's buckets on a device, by step. The host runs ahead of them.

At the first bucket of a step the hook waits until the step before is over: then its residuals, counters and errors are
known. The device has the next forward pass to do meanwhile, which the host has given to it already.
"""

from __future__ import annotations

import dataclasses

from ..work.work import CommWork
from .pinned import PinnedCopies
from .pinned_handle import PinnedHandle


@dataclasses.dataclass
class Step:
    """The reductions of one backward pass."""

    handles: list[PinnedHandle] = dataclasses.field(default_factory=list)
    is_whole: bool = False
    """Whether it has come to its last bucket."""


class InFlight:
    """The steps whose reductions may be in flight."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def begin(self, pinned: PinnedCopies, running: int) -> None:
        """The hook of a step's first bucket begins: see `drain`. A step that did not reach its last bucket is dropped.

        The state may be changed then: all reductions of that step have started.
        """
        if self._steps and not self._steps[-1].is_whole:
            for handle in self._steps.pop().handles:
                handle.disown()
            pinned.run(lambda *_: CommWork(None, []), [], []).wait()
        self.drain(running)
        self._steps.append(Step())

    def add(self, work: CommWork, *, is_last: bool) -> None:
        """Notes the reduction of the next bucket."""
        assert isinstance(work.handle, PinnedHandle)  # noqa: S101  # of PinnedCopies
        self._steps[-1].handles.append(work.handle)
        self._steps[-1].is_whole = is_last

    def drain(self, running: int = 0) -> None:
        """Blocks until all steps but the last `running` ones are over. Raises the error of the first that failed."""
        ended = self._steps[: max(0, len(self._steps) - running)]
        del self._steps[: len(ended)]
        errors = [error for step in ended for handle in step.handles if (error := handle.outcome()) is not None]
        if errors:
            raise errors[0]
