"""`Restored`: what a checkpoint tells of the job that saved a HookState, until the first step has compared it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...loss.tolerance import Tolerance

log = logging.getLogger("commlayer")


@dataclasses.dataclass
class Restored:
    """What a checkpoint told; a new state was told nothing."""

    world_size: int = 0
    """Ranks of the job, or of this one, once it has made a step; 0: none was made."""
    fine: list[int] | None = None
    """Numbers of the parameters that a codec left in 16 bits; None: not known, or compared."""
    weighted: bool = False
    """Whether it had `samples`."""
    tolerance: dict[str, Any] | None = None
    """The state of its tolerance; None: it had none, or the tolerance has taken the state over."""
    choice: dict[str, Any] = dataclasses.field(default_factory=lambda: {"values": [], "codecs": []})
    """The codecs that `auto` had chosen."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Restored:
        """That of a `HookState.state_dict()`, of a former version, too."""
        new = cls()
        return cls(
            world_size=state.get("world_size", 0),
            fine=state.get("fine") or None,
            weighted=bool(state.get("weighted")),
            tolerance=state.get("tolerance"),
            choice=state.get("choice", new.choice),
        )

    def meet_ranks(self, size: int, who: str, *, warns: bool) -> None:
        """Notes the number of ranks of this job; warns of another one, as residuals are those of a rank."""
        saved, self.world_size = self.world_size, size
        if warns and saved not in (0, size):
            log.warning(
                "%s: the restored HookState is of a job with %d ranks, and this one has %d: residuals of other ranks "
                "are lost, and this one has the wrong weight; restore commlayer.reshard(states, %d)[rank]",
                who,
                saved,
                size,
                size,
            )

    def check_weighted(self) -> None:
        """Raises ConfigError for a state without `samples`, if the saved one had them."""
        if self.weighted:
            raise ConfigError(
                "this HookState was saved with samples=...: set its `samples` again, or all ranks would have the same "
                "weight"
            )

    def meet_fine(self, fine: list[int], who: str, *, warns: bool) -> None:
        """Warns, once, if the parameters that a codec leaves in 16 bits are others."""
        saved, self.fine = self.fine, None
        if warns and saved not in (None, fine):
            log.warning(
                "%s: Fine selects %d parameters, and %d when this HookState was saved: set `fine` again after a "
                "restore, HookState.fine = commlayer.Fine(model)",
                who,
                len(fine),
                len(saved or ()),
            )

    def give_to(self, tolerance: Tolerance | None) -> None:
        """Hands the saved state to the tolerance, once. Raises ConfigError if there is none to take it."""
        if self.tolerance is None:
            return
        if tolerance is None:
            raise ConfigError("this HookState was saved with a tolerance: set its `tolerance` to an equal one")
        tolerance.load_state_dict(self.tolerance)
        self.tolerance = None
