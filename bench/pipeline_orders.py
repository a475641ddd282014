"""Orders of a pipeline whose ranks repeat their forwards, in the model alone. Writes the table of docs/planner.md.

    python -m bench.pipeline_orders       in a second

A forward takes 1, a backward 2 (its weight half 1), a send nothing. Nothing is measured.
"""

from __future__ import annotations

from pathlib import Path

from bench.harness.options import options
from bench.harness.page import write_between
from commlayer.scheduler.actions import Action, Order, peak_activations
from commlayer.scheduler.pipelines import one_f_one_b, recomputed
from commlayer.scheduler.simulate import StageCosts, simulate

PAGE = Path(__file__).parents[1] / "docs/planner.md"
SHAPES = ((2, 8), (4, 8), (8, 16))
"""Ranks and micro-batches."""

COSTS = StageCosts(1, 2)
REPEATING = StageCosts(1, 3)
"""A backward that repeats its forward when its gradient has come."""

Row = tuple[Order, list[StageCosts]]


def zero_bubble(ranks: int, microbatches: int) -> list[list[Action]]:
    """ZB-H1 (Zero Bubble Pipeline Parallelism, arXiv 2401.10241), as torch's `ScheduleInterleavedZeroBubble` has it for
    one chunk: 1F1B, where the weight half of a backward fills a gap later.

    Bubble (p - 1)(F + B - 2 W). Rank r keeps p micro-batches.
    """
    order = []
    for rank, actions in enumerate(one_f_one_b(ranks, microbatches)):
        weights = [Action("W", rank, microbatch) for microbatch in range(microbatches)]
        found: list[Action] = []
        for action in actions:
            found.append(action if action.kind == "F" else action._replace(kind="I"))
            if action.kind == "B" and action.microbatch >= rank:
                found.append(weights[action.microbatch - rank])
        order.append(found + weights[max(microbatches - rank, 0) :])
    return order


def shifted(ranks: int, microbatches: int) -> list[list[Action]]:
    """Merak's shifted critical path (arXiv 2206.04959): 1F1B with recomputation, for the model alone.

    All ranks but the last repeat each forward (R) before its backward, while its gradient is still on the way. The last
    has no time to wait, and keeps its only micro-batch. The last but one makes its third forward before its first
    backward, in the time until that gradient comes, so it keeps a micro-batch more.
    """
    order = one_f_one_b(ranks, microbatches)
    if ranks > 1 and microbatches > 2:
        order[-2][2:4] = order[-2][3:1:-1]
    return recomputed(order, range(ranks - 1))


def rows(ranks: int, microbatches: int) -> dict[str, Row]:
    """The orders by their names, with the costs of their stages."""
    plain, zero, first = one_f_one_b(ranks, microbatches), zero_bubble(ranks, microbatches), range(ranks - 1)
    usual = [COSTS] * ranks
    return {
        "1F1B, all repeat": (plain, [REPEATING] * ranks),
        "1F1B, all but the last repeat": (plain, [*[REPEATING] * (ranks - 1), COSTS]),
        "the same, before the gradient comes": (recomputed(plain, first), usual),
        "shifted (Merak)": (shifted(ranks, microbatches), usual),
        "zero bubble, all but the last repeat": (recomputed(zero, first), usual),
        "1F1B, nobody repeats": (plain, usual),
        "zero bubble, nobody repeats": (zero, usual),
    }


def table() -> str:
    """Steps, in forwards, and the micro-batches that the rank that keeps most keeps."""
    shapes = [f"{ranks} ranks, {microbatches} micro-batches" for ranks, microbatches in SHAPES]
    lines = [f"| order | {' | '.join(shapes)} |", f"|---|{'---|' * len(SHAPES)}"]
    found = [rows(*shape) for shape in SHAPES]
    for name in found[0]:
        cells = []
        for orders in found:
            order, costs = orders[name]
            kept = max(map(peak_activations, order))
            cells.append(f"{simulate(order, costs).step_s:g} (keeps {kept:g})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    options(__doc__).parse_args()
    write_between(PAGE, orders=table())
