"""Steps to a loss with local steps, in parts of those of exact training: the price of fewer exchanges.

    python -m bench.local_loss                                    everything (days of one core: see --only)
    python -m bench.local_loss --only 8 --only 32 --seeds 2       these H, the first two seeds
    python -m bench.local_loss --model "byte GPT" --optimizer AdamW --start 100    a part of the table
    python -m bench.local_loss --usual --rate 2                   as LocalSteps itself chooses, twice the learning rate
    python -m bench.local_loss --quick                            one seed, few steps; prints, and keeps nothing
    python -m bench.local_loss --table                            only the table of the kept results

Each call trains what the results lack of its part of the table, seed by seed. Fixed before the first run:

- The *factor* of a system is its number of steps, 1,500, divided by that of an exact training which ends with the same
  validation loss. It comes from exact trainings of the `LENGTHS`, each with a whole cosine of its own, of the same
  seed, by linear interpolation between two of them. A loss above that of the shortest has no factor, only a limit.
- Claim of equivalence, for each system: the mean difference of the final loss to exact training is within 0.005 nats,
  by two one-sided t-tests at 5 % each (bench/harness/equivalence.py), paired by seed, 12 seeds. With fewer seeds the
  table says "open", whatever the figures are.
- Models, text, batches, learning rate and validation are those of bench/fidelity.py: 4 sites, 512 bytes per step.
  Exact training clips the averaged gradient, as a loop with DDP does. Local steps clip the gradient of each site, in
  their exact steps, too, as `LocalSteps` does.
- Sites are virtual (bench/jobs/virtual_sites.py): the `Rounds` of `LocalSteps`, in the bits of a network. The outer
  optimizer is that which `LocalSteps` chooses. Losses are those of the shared weights.
- The learning rate was tuned for exact training. A site's gradient is noisier than the average, which makes AdamW's
  steps shorter: so local steps are also trained with twice that rate, from the first step on, and exact training, too.
  (Added after the first seed, whose factor was 1.27 with H = 1.) Factors and differences are those to exact training
  with its own rate.
- Muon has the matrices of the layers, with `match_rms_adamw`, and AdamW the rest, embeddings and head: all with the
  learning rate of AdamW, which was not tuned for Muon.

All systems of a seed are trained together, as one batch of models. Writes bench/results/local_loss.json after each
seed, and the table of docs/local_bench.md.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.fidelity import (
    BATCH,
    CHUNK,
    CLIP,
    CONTEXT,
    LEARNING_RATE,
    MARGIN,
    MODELS,
    RANKS,
    SEEDS,
    STEPS,
    VALIDATION_WINDOWS,
    Replicas,
    facts,
)
from bench.harness.driver import Benchmark, Content
from bench.harness.equivalence import Equivalence
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today, write_results
from bench.jobs.training import ROOT, hold_out, learning_rate_share
from bench.jobs.virtual_ranks import mean_into
from bench.jobs.virtual_sites import VirtualSites
from commlayer import Fine
from commlayer.frontend.local.outer import Outer
from commlayer.frontend.local.rounds import Form
from commlayer.frontend.local.turns import Turns
from examples.train_gpt import draw_batch, standard_library_text

RESULTS = ROOT / "bench/results/local_loss.json"
PAGE = ROOT / "docs/local_bench.md"

EVERY = (1, 2, 4, 8, 16, 32, 64)
CODECS = ("none", "int4-int8")
STARTS = (0, 100)
"""Exact steps before local ones."""
OPTIMIZERS = ("AdamW", "Muon")
RATES = (1.0, 2.0)
"""Learning rates, in parts of that which suits exact training."""
LENGTHS = (500, 750, 1000, 1250, STEPS)
"""Steps of exact trainings."""

Log = dict[str, Any]
"""A run: `model`, `optimizer`, `seed`, `steps`, the fields of its `System`, and the final `loss`."""


class System(NamedTuple):
    """A way to train."""

    every: int = 0
    """H; 0: exact training."""
    fragments: int = 1
    delay: int = 0
    codec: str = "none"
    exact_steps: int = 0
    rate: float = 1.0
    """Of `RATES`."""

    @property
    def turns(self) -> Turns:
        return Turns(self.every, self.fragments, self.delay)


EXACT = System()


def systems_of(
    every: Iterable[int], starts: Iterable[int], rates: Iterable[float] = RATES, *, is_usual: bool = False
) -> list[System]:
    """The rows of the table: one fragment that is late by 0, H / 2 and H - 1, and the fragments of `LocalSteps`, each
    late by a whole turn, as it chooses: with `is_usual` these alone. Exact training at other learning rates."""
    found = dict.fromkeys(
        System(h, fragments, delay, codec, start, rate)
        for rate in rates
        for start in starts
        for h in every
        for fragments, delay in (*((1, delay) for delay in (0, h // 2, h - 1) if not is_usual), usual(h))
        for codec in CODECS
    )
    return [*(EXACT._replace(rate=rate) for rate in rates if rate != EXACT.rate), *found]


def usual(every: int) -> tuple[int, int]:
    """The fragments and the delay that `LocalSteps(every=...)` has, where it has enough steps for 4 fragments."""
    fragments = min(4, every)
    return fragments, Turns.of(every, fragments, None).delay


def placed(model: nn.Module, row: Tensor) -> nn.Module:
    """A model whose parameters lie in a row of the weights of all."""
    made, at = copy.deepcopy(model), 0
    for parameter in made.parameters():
        parameter.data = row[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    return made


def clip(gradients: Tensor) -> None:
    """Clips each row, as `clip_grad_norm_` does."""
    norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
    gradients.mul_((CLIP / (norms + 1e-6)).clamp(max=1.0))


class Trainers:
    """The optimizers of all rows."""

    def __init__(self, kind: str, replicas: Replicas, models: Sequence[nn.Module], steps: int, lr: float) -> None:
        self._weights = replicas.weights
        self._weights.grad = torch.zeros_like(replicas.weights)
        self._optimizers: list[torch.optim.Optimizer]
        if kind == "AdamW":
            self._optimizers = [torch.optim.AdamW([self._weights], lr=lr, fused=True)]
        else:
            matrices: list[nn.Parameter] = []
            others: list[nn.Parameter] = []
            for model, gradient in zip(models, self._weights.grad, strict=True):
                rows = zip(model.named_parameters(), placed(model, gradient).parameters(), strict=True)
                for (name, parameter), row in rows:
                    parameter.grad = row.detach()
                    is_inner = parameter.dim() == 2 and name.startswith("blocks")
                    (matrices if is_inner else others).append(parameter)
            self._optimizers = [
                torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(others, lr=lr, fused=True),
            ]
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
            for optimizer in self._optimizers
        ]

    def step(self, gradients: Tensor) -> None:
        """A step of all rows."""
        assert self._weights.grad is not None
        self._weights.grad.copy_(gradients)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()


def averaged(system: System, rows: Tensor, *, is_local: bool) -> None:
    """Clips the gradients of a system's sites, and replaces them by their average unless its steps are local."""
    if system.every:
        clip(rows)
    if not is_local:
        mean = torch.empty_like(rows[0])
        mean_into(rows.numpy(), mean.numpy())
        if not system.every:
            clip(mean)
        rows.copy_(mean)


def windows_of(held_out: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The windows of a text on which trainings of so many steps are validated: few for quick ones."""
    return draw_batch(held_out, CONTEXT, VALIDATION_WINDOWS if steps >= LENGTHS[0] else CHUNK, 1_000_000)


def train(name: str, optimizer: str, seed: int, systems: Sequence[System], steps: int = STEPS) -> list[Log]:
    """Trains the model of this name in all systems, which have the same learning rate."""
    text, held_out = hold_out(standard_library_text())
    losses = trained(text, name, optimizer, seed, systems, steps).validate(*windows_of(held_out, steps), every=RANKS)
    about = {"model": name, "optimizer": optimizer, "seed": seed, "steps": steps}
    return [{**about, **system._asdict(), "loss": loss} for system, loss in zip(systems, losses, strict=True)]


def trained(
    text: Tensor, name: str, optimizer: str, seed: int, systems: Sequence[System], steps: int = STEPS
) -> Replicas:
    """The models of all sites: those of a system follow each other, and are alike. `systems` have one learning rate."""
    (rate,) = {system.rate for system in systems}
    torch.manual_seed(seed)
    model = MODELS[name]()
    replicas = Replicas(model, len(systems) * RANKS)
    rows = replicas.weights.detach()
    models = [placed(model, row) for row in rows]
    trainers = Trainers(optimizer, replicas, models, steps, rate * LEARNING_RATE)
    with contextlib.ExitStack() as stack:
        sites: list[VirtualSites | None] = [None] * len(systems)
        for step in range(steps):
            for i, system in enumerate(systems):
                if system.every and step == system.exact_steps:
                    own = models[i * RANKS : (i + 1) * RANKS]
                    form = Form(system.codec, Fine(), is_weighted=False)
                    made = VirtualSites(own, system.turns, Outer.default(system.turns), form)
                    sites[i] = stack.enter_context(made)
            draws = [draw_batch(text, CONTEXT, BATCH, (seed * 100_000 + step) * RANKS + rank) for rank in range(RANKS)]
            inputs, targets = (torch.stack(tensors).repeat(len(systems), 1, 1) for tensors in zip(*draws, strict=True))
            gradients = replicas.gradients_of_rows(rows, inputs, targets)
            for system, site, own_rows in zip(systems, sites, gradients.view(len(systems), RANKS, -1), strict=True):
                averaged(system, own_rows, is_local=site is not None)
            trainers.step(gradients)
            for site in sites:
                if site is not None:
                    site.step()
        for site in sites:
            if site is not None:
                site.leave()
    return replicas


def system_of(log: Log) -> System:
    return System(**{field: log[field] for field in System._fields if field in log})


def measure(content: Content, case: tuple[int, str, str], systems: Sequence[System]) -> None:
    """Trains what the results lack of these systems: with a seed, a model and an optimizer, and exactly in all
    lengths."""
    seed, name, optimizer = case
    runs = content.setdefault("runs", [])
    for steps, rate in itertools.product(LENGTHS, RATES):
        done = {
            system_of(log)
            for log in runs
            if (log["model"], log["optimizer"], log["seed"], log["steps"]) == (name, optimizer, seed, steps)
        }
        wanted = [EXACT, *systems] if steps == STEPS else [EXACT]
        todo = [system for system in wanted if system not in done and system.rate == rate]
        if not todo:
            continue
        start_s, about = time.perf_counter(), facts()
        runs += train(name, optimizer, seed, todo, steps)
        content |= {"machine": about, "measured": today()}
        write_results(RESULTS, content)  # a case takes long
        took = f"{len(todo)} of {steps} steps in {time.perf_counter() - start_s:.0f} s"
        print(f"seed {seed}, {name}, {optimizer}, rate {rate:g}: {took}", flush=True)


def exact_steps_for(loss: float, by_steps: Mapping[int, float]) -> float | None:
    """The steps of an exact training that ends with this loss, by linear interpolation; None above all of them. A lower
    loss than that of the longest counts as its."""
    lengths = sorted(by_steps)
    if loss > by_steps[lengths[0]]:
        return None
    for shorter, longer in pairwise(lengths):
        if loss >= by_steps[longer]:
            between = (by_steps[shorter] - loss) / (by_steps[shorter] - by_steps[longer])
            return shorter + between * (longer - shorter)
    return lengths[-1]


class Row(NamedTuple):
    """What the seeds say of a system."""

    system: System
    seeds: list[int]
    differences: list[float]
    """Of the final loss to exact training, by seed."""
    factors: list[float | None]

    @staticmethod
    def of(system: System, runs: Sequence[Log]) -> Row | None:
        """From the runs of one model and optimizer; None if there is none of the system."""
        exact: dict[int, dict[int, float]] = {}
        for log in runs:
            if system_of(log) == EXACT:
                exact.setdefault(log["seed"], {})[log["steps"]] = log["loss"]
        own = {log["seed"]: log["loss"] for log in runs if system_of(log) == system and log["steps"] == STEPS}
        seeds = [seed for seed in sorted(own) if set(LENGTHS) <= set(exact.get(seed, ()))]
        steps = [exact_steps_for(own[seed], exact[seed]) for seed in seeds]
        factors = [None if step is None else STEPS / step for step in steps]
        return Row(system, seeds, [own[seed] - exact[seed][STEPS] for seed in seeds], factors) if seeds else None

    @property
    def factor(self) -> float | None:
        """The mean; None if a seed has none."""
        known = [factor for factor in self.factors if factor is not None]
        return statistics.fmean(known) if len(known) == len(self.factors) else None

    @property
    def cells(self) -> list[str]:
        system, most = self.system, STEPS / LENGTHS[0]
        shown = [most if factor is None else factor for factor in self.factors]
        spread = f" ({min(shown):.2f} to {max(shown):.2f})" if len(shown) > 1 else ""
        factors = f"above {statistics.fmean(shown):.2f}" if None in self.factors else f"{self.factor:.2f}{spread}"
        if system.every:
            outer = Outer.default(system.turns)
            cells = [str(system.every), str(system.fragments), str(system.delay), system.codec]
            cells += [str(system.exact_steps), f"{outer.lr:g}, {outer.momentum:g}"]
        else:
            cells = ["exact", "", "", "", "", ""]
        cells += [f"{system.rate:g}", str(len(self.seeds)), factors, f"{statistics.fmean(self.differences):+.4f}"]
        if len(self.seeds) < 2:
            return [*cells, "", "open"]
        found = Equivalence.of(self.differences, MARGIN)
        is_whole = len(self.seeds) >= len(SEEDS)
        verdict = "equivalent" if found.shown else "differs" if found.differs(MARGIN) else "not shown"
        return [*cells, f"{found.low:+.4f} to {found.high:+.4f}", verdict if is_whole else "open"]


def rows_of(content: Mapping[str, Any], name: str, optimizer: str) -> list[Row]:
    """The rows of a model and an optimizer that have a seed."""
    runs = [log for log in content.get("runs", ()) if (log["model"], log["optimizer"]) == (name, optimizer)]
    return [row for system in systems_of(EVERY, STARTS) if (row := Row.of(system, runs)) is not None]


def table(content: Mapping[str, Any]) -> str:
    """The table of the page, as Markdown: only from the results."""
    columns = ["H", "fragments", "delay", "codec", "exact steps first", "outer", "learning rate", "seeds", "factor"]
    columns += ["difference of loss", "90 % interval", f"within ±{MARGIN} nats"]
    parts = []
    for name in MODELS:
        for optimizer in OPTIMIZERS:
            rows = rows_of(content, name, optimizer)
            if not rows:
                parts.append(f"### {name}, {optimizer}\n\nNot measured.")
                continue
            found = max(len(row.seeds) for row in rows)
            missing = len(systems_of(EVERY, STARTS)) - len(rows)
            sentence = f"Rows have up to {found} of {len(SEEDS)} seeds. {missing} rows were not measured."
            made = markdown(columns, [row.cells for row in rows])
            parts.append(f"### {name}, {optimizer}\n\n{made}\n\n{sentence}")
    if "machine" in content:
        parts.append(measured_on(content, "local_loss"))
    return "\n\n".join(parts)


BENCHMARK = Benchmark(RESULTS, PAGE, lambda content: {"losses": table(content)})


def main() -> int:
    """0."""
    parser = options(__doc__, only=EVERY, seeds=len(SEEDS), quick="one seed, few steps", table=True)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="this model alone (may be repeated)")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="this optimizer alone")
    parser.add_argument("--rate", action="append", type=float, choices=RATES, help="times the learning rate, alone")
    parser.add_argument("--usual", action="store_true", help="fragments and delay as LocalSteps chooses them, alone")
    parser.add_argument("--start", action="append", type=int, choices=STARTS, help="this many exact steps first, alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    systems = systems_of(
        arguments.only or EVERY, arguments.start or STARTS, arguments.rate or RATES, is_usual=arguments.usual
    )
    kinds = list(itertools.product(arguments.model or MODELS, arguments.optimizer or OPTIMIZERS))
    if arguments.quick:
        for name, optimizer in kinds:
            start_s, few = time.perf_counter(), [EXACT, *systems_of(EVERY[:2], (0,), (1.0,))]
            logs = train(name, optimizer, SEEDS[0], few, 20)
            took_s = (time.perf_counter() - start_s) / 20 / len(few)
            print(f"{name}, {optimizer}: {took_s * 1e3:.1f} ms per step and system")
            print(*(f"{system_of(log)}: {log['loss']:.4f}" for log in logs), sep="\n")
        return 0
    cases = [(seed, *kind) for seed in SEEDS[: arguments.seeds] for kind in kinds]
    return BENCHMARK.main(arguments, cases, lambda content, case: measure(content, case, systems))


if __name__ == "__main__":
    sys.exit(main())
