"""A process group for torchft, which lets a training go on when replicas die, and takes them back.

    from commlayer.torchft import ProcessGroupCommlayer

    group = ProcessGroupCommlayer(timeout=timedelta(seconds=30))  # torchft.Manager takes it as `pg`

torchft makes a new group whenever replicas come or go. Each is a job of its own, on an engine of its own, so WORLD and
its groups, of commlayer or not, are left alone.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from .config import Policy
from .frontend.group.backend import CommProcessGroup


class ProcessGroupCommlayer(ProcessGroupWrapper):  # type: ignore[misc]  # mypy does not see torchft
    """A reconfigurable group of commlayer, as torchft's own `ProcessGroupGloo` is one of gloo.

    `timeout` holds for making a group and for its operations. `policy`: that of all operations.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), policy: Policy | None = None) -> None:
        super().__init__(timeout)
        self._policy = policy

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> CommProcessGroup:
        return CommProcessGroup(store, rank, world_size, self._timeout, "torchft", policy=self._policy, own_job=True)

    def shutdown(self) -> None:
        """Leaves the group, too; torchft's wrapper only forgets it."""
        group = self._pg
        super().shutdown()
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:  # noqa: N802  # torchft's name
        return "torchft-commlayer"
