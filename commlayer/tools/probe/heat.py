"""The rates and losses of all paths as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .meeting import Host
from .sample import Sample


def check() -> None:
    """Raises ConfigError, with the remedy, unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--png: {error}; install matplotlib: pip install matplotlib") from error


def draw(hosts: Sequence[Host], samples: Sequence[Sample], path: Path) -> None:
    """Writes a PNG: for each network a map of rates and one of losses, from the row's host to the column's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    networks = list(dict.fromkeys(sample.network for sample in samples))
    side = min(16.0, 3.0 + 0.35 * len(hosts))
    figure = Figure(figsize=(2 * side, side * len(networks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(networks), 2, squeeze=False)
    for network, (left, right) in zip(networks, panels, strict=True):
        group = [sample for sample in samples if sample.network == network]
        rates = cells(len(hosts), group, lambda path: path.rate_bps / 1e6, min)
        _panel(left, hosts, rates, f"Mbit/s, {network}", "viridis")
        losses = cells(len(hosts), group, lambda path: 100 * path.loss, max)
        _panel(right, hosts, losses, f"loss in %, {network}", "Reds")
    figure.savefig(path, dpi=100, format="png")


def cells(
    hosts: int,
    samples: Sequence[Sample],
    value: Callable[[Sample], float],
    worse: Callable[[float, float], float],
) -> list[list[float]]:
    """The values from the row's host to the column's, of several paths the worst; NaN: not measured, or no answer."""
    found = [[math.nan] * hosts for _ in range(hosts)]
    for sample in samples:
        if sample.is_reached:
            row, column, number = found[sample.way.source], sample.way.target, value(sample)
            row[column] = number if math.isnan(row[column]) else worse(row[column], number)
    return found


def _panel(axes: Any, hosts: Sequence[Host], values: Sequence[Sequence[float]], title: str, colors: str) -> None:
    image = axes.imshow(values, cmap=colors, vmin=0)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    names = [host.name for host in hosts]
    axes.set_xticks(range(len(hosts)), names, rotation=90)
    axes.set_yticks(range(len(hosts)), names)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    axes.set_title(title)
    if len(hosts) <= 12:
        for row, line in enumerate(values):
            for column, number in enumerate(line):
                if not math.isnan(number):
                    axes.text(
                        column,
                        row,
                        f"{number:.3g}",
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="black",
                        backgroundcolor="white",
                    )
