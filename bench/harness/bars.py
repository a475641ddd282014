"""Pictures of measured steps: a bar per system, with its interval, beside the model and a limit."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.picture import picture
from bench.harness.turns import interval


@dataclasses.dataclass(frozen=True)
class Bar:
    """The steps of one system, in seconds."""

    name: str
    median_s: float
    low_s: float
    high_s: float
    model_s: float | None = None
    limit_s: float | None = None
    is_ours: bool = False

    @staticmethod
    def of(
        name: str,
        steps: Sequence[float],
        model_s: float | None = None,
        limit_s: float | None = None,
        *,
        is_ours: bool = False,
    ) -> Bar:
        """The bar of the steps of all rounds."""
        return Bar(name, statistics.median(steps), *interval(steps), model_s, limit_s, is_ours)


def draw(cases: Mapping[str, Sequence[Bar]], path: Path, limit: str = "ideal network") -> None:
    """Writes a picture with a chart for each case. `limit` says what the limits are."""
    heights = [1.2 + 0.35 * len(bars) for bars in cases.values()]
    with picture(path, len(cases), 1, (9, sum(heights)), height_ratios=heights) as charts:
        for (title, bars), chart in zip(cases.items(), charts[:, 0], strict=True):
            _draw_chart(chart, title, bars, limit)


def _draw_chart(chart: Any, title: str, bars: Sequence[Bar], limit: str) -> None:
    rows = range(len(bars))[::-1]  # the first one on top
    errors = [[b.median_s - b.low_s for b in bars], [b.high_s - b.median_s for b in bars]]
    colors = ["tab:blue" if bar.is_ours else "lightgray" for bar in bars]
    chart.barh(rows, [bar.median_s for bar in bars], xerr=errors, color=colors, ecolor="black", capsize=2)
    for attribute, marker, label in (("model_s", "D", "model"), ("limit_s", "|", limit)):
        points = [(getattr(bar, attribute), row) for bar, row in zip(bars, rows, strict=True)]
        shown = [point for point in points if point[0] is not None]
        if shown:
            chart.scatter(*zip(*shown, strict=True), marker=marker, color="tab:red", zorder=3, label=label)
            chart.legend(fontsize="small", loc="lower right")
    chart.set(title=title, xlabel="step (s)", xlim=(0, None))
    chart.set_yticks(list(rows), [bar.name for bar in bars])
