"""Pictures of trainings: validation loss against seconds of training and against bytes sent."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.picture import picture
from bench.jobs.training import Log


def curve(logs: Sequence[Log]) -> tuple[list[float], list[float], list[float]]:
    """Seconds, megabytes sent by rank 0, and loss at each validation: medians over runs with equal steps."""
    points: list[tuple[list[float], list[float], list[float]]] = []
    for log in logs:
        sent = [0, *itertools.accumulate(log["sent_bytes"])]
        steps, seconds, losses = map(list, zip(*log["validations"], strict=True))
        points.append((seconds, [sent[int(step)] / 1e6 for step in steps], losses))
    seconds, megabytes, losses = (
        [statistics.median(values) for values in zip(*column, strict=True)] for column in zip(*points, strict=True)
    )
    return seconds, megabytes, losses


def plot(networks: Mapping[str, Mapping[str, Sequence[Log]]], target: float, path: Path) -> None:
    """Writes a picture with a row for each network. `networks`: logs by network and system; `target`: a marked loss."""
    with picture(path, len(networks), 2, (11, 4 * len(networks))) as rows:
        for (name, systems), (by_time, by_bytes) in zip(networks.items(), rows, strict=True):
            for system, logs in systems.items():
                seconds, megabytes, losses = curve(logs)
                style = "--" if system.startswith("gloo") else "-"
                by_time.plot(seconds, losses, style, label=system)
                by_bytes.plot(megabytes, losses, style, label=system)
            for axes, label in ((by_time, "seconds of training"), (by_bytes, "megabytes sent by a rank")):
                axes.axhline(target, color="black", lw=0.5)
                axes.set(xscale="log", xlabel=label, ylabel="validation loss (nats per byte)", title=name)
            by_bytes.legend(fontsize="small")
