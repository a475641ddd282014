"""`commlayer top --tensorboard`: the figures of a job as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .summary import CURVES

JOB = (*CURVES, "uncounted_bytes")
"""The sums of `summary.summarize` that are written."""

RANKS_MAX = 64
"""Ranks, from 0 on, that have scalars of their own: the pages of TensorBoard show no more."""


class Scalars:
    """Writes into a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the package tensorboard is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard needs the package tensorboard ({error}): pip install tensorboard"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, found: dict[str, Any]) -> None:
        """Writes a view of the job (`summary.summarize`), at its step. Before the first step there is nothing."""
        job = found["job"]
        if job["step"] is None:
            return
        values = {f"job/{name}": job[name] for name in JOB}
        for row in found["ranks"]:
            if row["state"] == "live" and row["rank"] < RANKS_MAX:
                rank = f"rank {row['rank']:02}"
                values[f"exposed_step_s/{rank}"] = row["exposed_step_s"]
                values[f"sent_bytes_s/{rank}"] = row["sent_bytes_s"]
                values[f"loss/{rank}"] = row["lost"] / max(row["packets"], 1)
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, job["step"], walltime=job["time"])
        self._writer.flush()
