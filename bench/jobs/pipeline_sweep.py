"""Pipelines with more micro-batches, fewer chunks, other shares of reductions: predictions, some of them measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.page import markdown
from bench.harness.picture import picture
from bench.harness.turns import is_void
from bench.jobs.pipeline_model import exposed, ideal, limit
from bench.jobs.pipelines import (
    BUCKETS,
    CONTROL,
    DEFERRED,
    FIFO,
    FSDP_INTERLEAVED,
    FSDP_LOOPED,
    SERIAL,
    SYSTEMS,
    UNDEFERRED,
    Case,
)
from commlayer.scheduler.simulate import Simulation

if TYPE_CHECKING:
    from bench.overlap_pipeline import Measured

MICROBATCHES, CHUNKS, SHARES = (8, 16, 32), (2, 4), (0.2, 0.3, 0.44, 0.6)
STOCK = (SERIAL, BUCKETS, FSDP_INTERLEAVED, FSDP_LOOPED)
MEASURED = ((8, 2, 0.2), (8, 4, 0.6), (16, 2, 0.3))
"""Micro-batches, chunks and share."""
SHOWN = (SERIAL, BUCKETS, FSDP_LOOPED, FIFO, UNDEFERRED, DEFERRED)


def cases(base: Case) -> Iterator[Case]:
    """The sweep; a rank's forward takes as long in all."""
    for chunks in CHUNKS:
        for microbatches in MICROBATCHES:
            for share in SHARES:
                yield at(base, microbatches, chunks, share)


def at(base: Case, microbatches: int, chunks: int, share: float) -> Case:
    """A point of the sweep."""
    forward_s = base.forward_s * base.chunks / chunks
    name = f"M {microbatches}, v {chunks}, {share:.0%}"
    return dataclasses.replace(
        base, name=name, microbatches=microbatches, chunks=chunks, share=share, forward_s=forward_s
    )


def best_stock(case: Case) -> list[str]:
    """Torch's schedules with their own reductions, the fastest first, as predicted on an ideal network."""
    return sorted(STOCK, key=lambda name: limit(case, name).step_s)


def selection(base: Case) -> list[tuple[Case, list[str]]]:
    """The points that are measured: the two best stock systems beside ours."""
    points = [at(base, *point) for point in MEASURED]
    return [(case, [CONTROL, *best_stock(case)[:2], FIFO, UNDEFERRED, DEFERRED]) for case in points]


def live(case: Case, name: str, result: Simulation) -> float:
    """The most micro-batches whose activations a rank keeps, of all its chunks."""
    most = max(rank.peak_activations for rank in result.ranks)
    return most if SYSTEMS[name].order == "1F1B" else most / case.chunks


def table(base: Case, measured: Sequence[Measured]) -> str:
    """The sweep as Markdown: predictions on an ideal network, and the measured points."""
    columns = ["M", "v", "share", "best stock", "stock / FIFO", "stock / undeferred", "stock / `attach`"]
    columns += ["exposed", "bubble", "live", "measured stock / `attach`"]
    rows = []
    found = {(m.case.microbatches, m.case.chunks, m.case.share): m for m in measured}
    for case in cases(base):
        costs, stock = ideal(case), best_stock(case)[0]
        steps = {name: limit(case, name) for name in (stock, FIFO, UNDEFERRED, DEFERRED, CONTROL)}
        ours = steps[DEFERRED]
        cells = [
            f"{case.microbatches}",
            f"{case.chunks}",
            f"{case.share:.0%}",
            stock,
            *(f"{steps[stock].step_s / steps[name].step_s:.2f}" for name in (FIFO, UNDEFERRED, DEFERRED)),
            f"{exposed(case, ours.step_s, steps[CONTROL].step_s, costs):.0%}",
            f"{ours.bubble_s / ours.step_s:.0%}",
            f"{live(case, DEFERRED, ours):g} ({live(case, stock, steps[stock]):g})",
            _measured(found.get((case.microbatches, case.chunks, case.share))),
        ]
        rows.append(cells)
    note = (
        f"p = {base.ranks} ranks x {base.replicas} replicas, on an ideal network; stock: the fastest of 1F1B (serial, "
        "or with buckets) and Interleaved1F1B and LoopedBFS with FSDP2. Exposed: share of the reductions that makes "
        "`attach`'s step longer. Bubble: its share of the step. Live: micro-batches whose activations a rank keeps "
        "(stock)."
    )
    return f"{markdown(columns, rows)}\n\n{note}"


def _measured(point: Measured | None) -> str:
    """The ratio to the best stock system that was measured, its range, and whether ours was slower in all rounds."""
    if point is None:
        return ""
    best = point.best_of([name for name in STOCK if name in point.logs])
    ratios = point.ratios(best, DEFERRED)
    low, high = min(ratios), max(ratios)
    if is_void(point.logs[best], point.logs[DEFERRED]):
        return "void"
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})" + " (**slower**)" * (high < 1)


def plot(base: Case, path: Path) -> None:
    """Writes a picture: exposed share, bubble and live activations by share of the reductions and by micro-batches."""
    with picture(path, len(CHUNKS), 3, (12, 7)) as rows:
        for chunks, axes in zip(CHUNKS, rows, strict=True):
            by_share = [at(base, 16, chunks, share) for share in SHARES]
            by_count = [at(base, microbatches, chunks, 0.44) for microbatches in MICROBATCHES]
            for name in SHOWN:
                style = "-" if SYSTEMS[name].is_ours else "--"
                shares = [limit(case, name) for case in by_share]
                counts = [limit(case, name) for case in by_count]
                axes[0].plot(
                    [100 * s for s in SHARES], [100 * r.exposed_s / r.step_s for r in shares], style, label=name
                )
                axes[1].plot(MICROBATCHES, [100 * r.bubble_s / r.step_s for r in counts], style, label=name)
                kept = [live(case, name, result) for case, result in zip(by_count, counts, strict=True)]
                axes[2].plot(MICROBATCHES, kept, style, label=name)
            titles = ("exposed reductions (% of the step)", "bubble (% of the step)", "live micro-batches of a rank")
            labels = ("reductions (% of serial 1F1B's step), M = 16", "micro-batches M, 44 %", "micro-batches M")
            for axis, title, label in zip(axes, titles, labels, strict=True):
                axis.set(xlabel=label, title=f"v = {chunks}: {title}", ylim=(0, None))
        rows[0][0].legend(fontsize="small")
