"""What local steps leave behind: their models are trained on exactly, on other text, beside models of exact training.

    python -m bench.local_after --seeds 2     two seeds, an hour of one core each
    python -m bench.local_after --quick       one seed, few steps; prints, and keeps nothing
    python -m bench.local_after --table       only the table of the kept results

A model of local steps may be worse than its loss tells: arXiv 2511.13761 found models of DiLoCo that learned less
later than models of exact training of the same loss. Fixed before the first run:

- The first training is that of bench/local_loss.py: byte GPT, AdamW, 1,500 steps, the first 100 exact, H = 8, 16 and 32
  in the fragments that `LocalSteps` chooses, float32 and `int4-int8`. Beside it, exact trainings of the same `LENGTHS`.
- The second one is exact for all: 500 steps of a new AdamW with a whole cosine, on C++ (the headers of torch) instead
  of Python. Batches and learning rate are those of the first.
- The gap at the same loss is the loss after the second training, less that of an exact model whose loss after the
  first one was the same: by linear interpolation between two exact trainings. A loss outside of theirs has no gap.

Writes bench/results/local_after.json after each seed, and the table of docs/local_bench.md.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.fidelity import BATCH, CONTEXT, LEARNING_RATE, MODELS, RANKS, SEEDS, STEPS, Replicas
from bench.harness.driver import Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown
from bench.harness.results import today
from bench.jobs.training import ROOT, hold_out, learning_rate_share
from bench.jobs.virtual_ranks import mean_into
from bench.local_loss import EXACT, LENGTHS, Log, System, clip, system_of, systems_of, trained, windows_of
from commlayer.tools.bench.machine import facts
from examples.train_gpt import draw_batch, standard_library_text

MODEL, OPTIMIZER = "byte GPT", "AdamW"
EVERY, START = (8, 16, 32), 100
AFTER_STEPS = 500
HEADER_BYTES = 4 << 20
FIRST_DRAW = 50_000_000
"""Of the batches of the second training: far from those of the first."""


def header_text() -> Tensor:
    """The bytes of torch's headers: C++ that every machine with this torch has."""
    text = bytearray()
    for path in sorted((Path(torch.__file__).parent / "include").rglob("*.h")):
        text += path.read_bytes()
        if len(text) >= HEADER_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def train_on(weights: Tensor, text: Tensor, seed: int, steps: int) -> Replicas:
    """Trains models on exactly, whose weights are the rows of `weights`."""
    torch.manual_seed(seed)
    replicas = Replicas(MODELS[MODEL](), len(weights))
    replicas.weights.data.copy_(weights)
    optimizer = torch.optim.AdamW([replicas.weights], lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    means = torch.empty_like(weights)
    for step in range(steps):
        numbers = (FIRST_DRAW + (seed * 100_000 + step) * RANKS + rank for rank in range(RANKS))
        draws = [draw_batch(text, CONTEXT, BATCH, number) for number in numbers]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*draws, strict=True))
        for mean, gradients in zip(means, replicas.gradients(replicas.weights.detach(), inputs, targets), strict=True):
            mean_into(gradients.numpy(), mean.numpy())
        clip(means)
        replicas.weights.grad = means
        optimizer.step()
        schedule.step()
    return replicas


def measure_seed(seed: int, systems: Sequence[System], lengths: Sequence[int], after_steps: int) -> list[Log]:
    """The losses of all systems before and after the second training. The last of `lengths` is that of the systems."""
    text, held_out = hold_out(standard_library_text())
    other, held_other = hold_out(header_text())
    logs, weights = list[Log](), list[Tensor]()
    for steps in lengths:
        now = [EXACT, *systems] if steps == lengths[-1] else [EXACT]
        found = trained(text, MODEL, OPTIMIZER, seed, now, steps)
        losses = found.validate(*windows_of(held_out, steps), every=RANKS)
        weights.append(found.weights.detach()[::RANKS])
        logs += [
            {"seed": seed, "steps": steps, **system._asdict(), "loss": loss}
            for system, loss in zip(now, losses, strict=True)
        ]
    after = train_on(torch.cat(weights), other, seed, after_steps).validate(*windows_of(held_other, after_steps))
    return [{**log, "after": loss} for log, loss in zip(logs, after, strict=True)]


def measure(content: Content, seed: int) -> None:
    """Adds the runs of a seed, unless they are there."""
    runs = content["runs"]
    if any(log["seed"] == seed for log in runs):
        return
    start_s, about = time.perf_counter(), facts()
    runs += measure_seed(seed, SYSTEMS, LENGTHS, AFTER_STEPS)
    content |= {"machine": about, "measured": today()}
    print(f"seed {seed}: {time.perf_counter() - start_s:.0f} s", flush=True)


def exact_after(loss: float, exact: Sequence[Log]) -> float | None:
    """The loss after the second training of an exact model with this `loss` before it; None outside of theirs."""
    for worse, better in pairwise(sorted(exact, key=lambda log: -log["loss"])):
        if worse["loss"] >= loss >= better["loss"]:
            share = (worse["loss"] - loss) / (worse["loss"] - better["loss"])
            return float(worse["after"] + share * (better["after"] - worse["after"]))
    return None


def cells_of(system: System, runs: Sequence[Log]) -> list[str]:
    """The row of a system: means over the seeds, and the gap of each seed."""
    own = [log for log in runs if system_of(log) == system and log["steps"] == STEPS]
    gaps, differences = list[float | None](), list[float]()
    for log in own:
        exact = [other for other in runs if other["seed"] == log["seed"] and system_of(other) == EXACT]
        (longest,) = (other for other in exact if other["steps"] == STEPS)
        differences.append(log["after"] - longest["after"])
        found = exact_after(log["loss"], exact)
        gaps.append(None if found is None else log["after"] - found)
    name = ["exact", ""] if system == EXACT else [str(system.every), system.codec]
    before, after = (statistics.fmean(log[key] for log in own) for key in ("loss", "after"))
    told = ", ".join("outside" if gap is None else f"{gap:+.4f}" for gap in gaps)
    return [*name, f"{before:.4f}", f"{after:.4f}", f"{statistics.fmean(differences):+.4f}", told]


def table(content: Mapping[str, Any]) -> str:
    """The table of the page, as Markdown: only from the results."""
    runs = content["runs"]
    if not runs:
        return "Not measured."
    columns = [
        "H",
        "codec",
        "loss before",
        "loss after",
        "less that of exact training",
        "gap at the same loss, by seed",
    ]
    rows = [cells_of(system, runs) for system in (EXACT, *SYSTEMS) if any(system_of(log) == system for log in runs)]
    seeds, about = len({log["seed"] for log in runs}), content["machine"]
    return (
        f"{markdown(columns, rows)}\n\n{seeds} of {len(SEEDS)} seeds; losses are means over them. Measured "
        f"{content['measured']} on {about['cpu']}, torch {about['torch']}, commit {about['git_commit']}. Generated by "
        f"`bench/local_after.py` from `bench/results/local_after.json`."
    )


SYSTEMS = tuple(systems_of(EVERY, (START,), (1.0,), is_usual=True))
BENCHMARK = Benchmark(
    ROOT / "bench/results/local_after.json",
    ROOT / "docs/local_bench.md",
    lambda content: {"after": table(content)},
    {"runs": []},
)


def main() -> int:
    """0."""
    asked = options(__doc__, seeds=len(SEEDS), quick="one seed, few steps", table=True).parse_args()
    torch.set_num_threads(1)
    if asked.quick:
        systems = systems_of((2,), (5,), (1.0,), is_usual=True)
        for log in measure_seed(SEEDS[0], systems, (10, 20), 10):
            print(f"{system_of(log)}, {log['steps']} steps: {log['loss']:.4f}, then {log['after']:.4f}")
        return 0
    return BENCHMARK.main(asked, itertools.islice(SEEDS, asked.seeds), measure)


if __name__ == "__main__":
    sys.exit(main())
