"""Whether codecs leave the validation loss of a training as it is: equivalence, not "no difference found".

    python -m bench.fidelity                  all seeds that the results lack (about an hour of one core)
    python -m bench.fidelity --seeds 3        at most this many seeds of each model
    python -m bench.fidelity --quick          one seed, few steps; prints, and keeps nothing
    python -m bench.fidelity --table          only the table of the kept results

Fixed before the first run:

- Claim, for each model, codec and loss: the mean difference of the validation loss to training with float32 sums is
  within 0.005 nats (0.2 %). Two one-sided t-tests at 5 % each (bench/harness/equivalence.py), paired by seed, 12 seeds.
- The validation loss is that after the last of 1,500 steps, on 65,536 bytes of held-out text, the same in all runs. The
  losses after 100 and 500 steps are shown, and not tested.
- A seed gives all systems the same initial weights and the same batches. AdamW, gradients clipped to a norm of 1.0
  after the average, learning rate with a rise of 5 % and a cosine to 0. Its highest value, 0.01, suits f32: with seed
  100, which is not used otherwise, 0.02 gave f32 the same loss (GPT) or a higher one, and 0.003 a higher one (GPT).
- 4 ranks, virtual (bench/jobs/virtual_ranks.py). Fine parameters are those of `Fine(model)`. Loss: 1 % of the packets
  of contributions, each by itself, treatment `feedback`.
- `f32, other order` adds the ranks up in reverse: differences of this size are chance. `sign` with AdamW, which the
  hook refuses, must not pass: a control that the test can fail. `int4, no feedback` drops rounding errors.

All systems of a seed are trained together, as one batch of models. Writes bench/results/fidelity.json after each seed
and model, and the table of docs/fidelity.md.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness.driver import Benchmark, Content
from bench.harness.equivalence import Equivalence
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.jobs.training import ROOT, hold_out, learning_rate_share
from bench.jobs.virtual_ranks import VirtualHook, mean_into
from commlayer import Fine, Policy
from commlayer.tools.bench import machine
from examples.train_gpt import BYTES, Gpt, draw_batch, standard_library_text

RESULTS = ROOT / "bench/results/fidelity.json"
PAGE = ROOT / "docs/fidelity.md"

MARGIN = 0.005
"""The margin in nats."""
SEEDS = tuple(range(1, 13))
RANKS = 4
STEPS = 1500
VALIDATE_AT = (100, 500, STEPS)
CONTEXT, BATCH = 32, 4
VALIDATION_WINDOWS = 2048
CHUNK = 128
"""Windows of one forward pass of the validation."""
LEARNING_RATE, CLIP = 1e-2, 1.0
LOSS = 0.01

Log = dict[str, Any]
"""The log of a run: `model`, `seed`, `system`, `losses` by step, `uncounted_share`."""


class System(NamedTuple):
    """A way to average the gradients."""

    name: str
    codec: str | None = None
    """None: float32, without a hook."""
    loss: float = 0.0
    feedback: bool = True


BASELINE, REVERSED = System("f32"), System("f32, other order")
WITHOUT = System("int4, no feedback", "int4", feedback=False)
CONTROL = System("sign, AdamW", "sign")
CODECS = ("int8", "int4-int8", "int4")
TESTED = tuple(System(f"{name}, {loss:.0%} loss", name, loss) for name in CODECS for loss in (0.0, LOSS))
SYSTEMS = (BASELINE, REVERSED, *TESTED, WITHOUT, CONTROL)


class Convolution(nn.Module):
    """A causal convolution of `kernel` inputs, `dilation` apart, as one product with the shifted inputs."""

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.shifts = [i * dilation for i in range(kernel)]
        self.norm = nn.LayerNorm(width)
        self.convolve = nn.Linear(kernel * width, width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed, length = self.norm(x), x.shape[-2]
        shifted = torch.cat([functional.pad(normed, (0, 0, shift, 0))[..., :length, :] for shift in self.shifts], -1)
        return x + torch.as_tensor(self.project(functional.gelu(self.convolve(shifted))))


class ConvolutionalNet(nn.Module):
    """Predicts each next byte from dilated convolutions, as WaveNet does."""

    def __init__(self, width: int, layers: int, kernel: int) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Convolution(width, kernel, 2**i) for i in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, text: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.blocks(self.embed_byte(text))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "byte GPT": partial(Gpt, CONTEXT, width=48, layers=2, heads=4),
    "convolutions": partial(ConvolutionalNet, width=48, layers=5, kernel=4),
}


class Replicas:
    """One model with the weights of several systems: rows of one flat parameter."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = [parameter.shape for parameter in model.parameters()]
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        self.weights = nn.Parameter(flat.expand(count, -1).clone())
        per_rank = vmap(grad(self._loss), in_dims=(None, 0, 0))
        self.gradients = vmap(per_rank, in_dims=(0, None, None))
        """The gradients by system and rank, from weights, inputs [rank, ...] and targets."""
        self.gradients_of_rows = vmap(grad(self._loss), in_dims=(0, 0, 0))
        """The gradients by row, each with inputs of its own, from weights, inputs [row, ...] and targets."""
        self.losses = vmap(self._loss, in_dims=(0, None, None))
        """The losses by system, from weights, inputs and targets."""

    def _loss(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in self.shapes])
        named = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # the others are not batched by vmap
            logits = functional_call(self.model, named, (inputs,))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def validate(self, inputs: Tensor, targets: Tensor, every: int = 1) -> list[float]:
        """The mean loss of each system, which has `every` rows, of which the first counts."""
        with torch.no_grad():
            pairs = zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True)
            chunks = [self.losses(self.weights[::every], *pair).double() for pair in pairs]
        return [float(value) for value in torch.stack(chunks).mean(0)]


def hook_of(model: nn.Module, system: System, seed: Sequence[int]) -> VirtualHook | None:
    """The hook of a system; None: float32."""
    if system.codec is None:
        return None
    policy = Policy(codec=system.codec)
    hook = VirtualHook(list(model.parameters()), Fine(model), policy, RANKS, system.loss, seed)
    hook.feedback = system.feedback
    return hook


def average(gradients: Tensor, system: System, hook: VirtualHook | None, step: int) -> Tensor:
    """The average over the ranks, which are the rows of `gradients`."""
    if hook is not None:
        return torch.from_numpy(hook.average(gradients.numpy(), step))
    mean = torch.empty_like(gradients[0])
    mean_into(gradients.numpy()[:: -1 if system is REVERSED else 1], mean.numpy())
    return mean


def train(name: str, seed: int, steps: int = STEPS, systems: Sequence[System] = SYSTEMS) -> list[Log]:
    """Trains the model of this name with all systems."""
    text, held_out = hold_out(standard_library_text())
    windows = draw_batch(held_out, CONTEXT, VALIDATION_WINDOWS if steps == STEPS else CHUNK, 1_000_000)
    torch.manual_seed(seed)
    model = MODELS[name]()
    replicas = Replicas(model, len(systems))
    hooks = [hook_of(model, system, (seed, list(MODELS).index(name), i)) for i, system in enumerate(systems)]
    optimizer = torch.optim.AdamW([replicas.weights], lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    losses: dict[int, list[float]] = {}
    for step in range(steps):
        draws = [draw_batch(text, CONTEXT, BATCH, (seed * 100_000 + step) * RANKS + rank) for rank in range(RANKS)]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*draws, strict=True))
        gradients = replicas.gradients(replicas.weights.detach(), inputs, targets)
        triples = zip(gradients, systems, hooks, strict=True)
        averages = torch.stack([average(rows, system, hook, step) for rows, system, hook in triples])
        norms = torch.linalg.vector_norm(averages, dim=1, keepdim=True)
        replicas.weights.grad = averages * (CLIP / (norms + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_
        optimizer.step()
        schedule.step()
        if step + 1 in (*VALIDATE_AT, steps):
            losses[step + 1] = replicas.validate(*windows)
    return [
        {
            "model": name,
            "seed": seed,
            "system": system.name,
            "losses": {str(at): values[i] for at, values in losses.items()},
            "uncounted_share": hook.lost_values / hook.sent_values if hook else 0.0,
        }
        for i, (system, hook) in enumerate(zip(systems, hooks, strict=True))
    ]


def sizes(name: str) -> dict[str, int]:
    """Parameters of a model, and those that the codecs encode."""
    model = MODELS[name]()
    fine, parameters = Fine(model), list(model.parameters())
    coarse = sum(parameter.numel() for parameter in parameters if parameter not in fine)
    return {"parameters": sum(parameter.numel() for parameter in parameters), "coarse": coarse}


def whole_seeds(runs: Sequence[Log], name: str) -> dict[int, dict[str, Log]]:
    """The runs of a model by seed and system, for the seeds that have all systems."""
    by_seed: dict[int, dict[str, Log]] = {}
    for log in runs:
        if log["model"] == name:
            by_seed.setdefault(log["seed"], {})[log["system"]] = log
    return {seed: logs for seed, logs in sorted(by_seed.items()) if len(logs) == len(SYSTEMS)}


def verdict(system: System, found: Equivalence) -> str:
    """What the test says."""
    if found.shown:
        return "**equivalent: the test has no force**" if system is CONTROL else "equivalent"
    return "differs" if found.differs(MARGIN) else "not shown"


def table(content: dict[str, Any]) -> str:
    """The page's tables, as Markdown."""
    if not content.get("runs"):
        return "Not measured yet."
    lines = []
    for name in MODELS:
        seeds = whole_seeds(content["runs"], name)
        lines += [f"### {name}", ""]
        if len(seeds) < 2:
            lines += [f"{len(seeds)} of {len(SEEDS)} seeds so far.", ""]
            continue
        lines.append(_rows(list(seeds.values())))
        last = [logs[BASELINE.name]["losses"][str(STEPS)] for logs in seeds.values()]
        size = content["models"][name]
        count = f"{len(seeds)} seeds" + ("" if len(seeds) >= len(SEEDS) else f" of {len(SEEDS)}, **so far**")
        sentence = (
            f"{count}. {size['parameters']:,} parameters, of which {size['coarse'] / size['parameters']:.0%} take the "
            f"codec and the rest bf16. Loss with f32: {min(last):.3f} to {max(last):.3f} nats per byte."
        )
        lines += ["", sentence, ""]
    lines.append(measured_on(content, "fidelity"))
    return "\n".join(lines)


def _rows(seeds: Sequence[dict[str, Log]]) -> str:
    columns = ["system", "not counted", *(f"after {at} steps" for at in VALIDATE_AT)]
    columns += ["standard error", "90 % interval", "p", "within ±0.005 nats"]
    rows = []
    for system in SYSTEMS[1:]:
        runs = [(logs[system.name], logs[BASELINE.name]) for logs in seeds]
        by_step = [
            Equivalence.of([ours["losses"][str(at)] - exact["losses"][str(at)] for ours, exact in runs], MARGIN)
            for at in VALIDATE_AT
        ]
        last = by_step[-1]
        cells = [
            system.name,
            f"{sum(ours['uncounted_share'] for ours, _ in runs) / len(runs):.2%}" if system.loss else "",
            *(f"{change.mean:+.4f}" for change in by_step),
            f"{last.error:.4f}",
            f"{last.low:+.4f} to {last.high:+.4f}",
            f"{last.p:.1g}",
            verdict(system, last) if len(seeds) >= len(SEEDS) else "open",
        ]
        rows.append(cells)
    return markdown(columns, rows)


facts = functools.cache(machine.facts)
"""Taken before the results, a tracked file, change."""


def measure(content: Content, case: tuple[int, str]) -> None:
    """Trains a model with a seed in all systems, if the results lack it."""
    seed, name = case
    runs = content.setdefault("runs", [])
    if seed in whole_seeds(runs, name):
        return
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    about = facts()
    runs += train(name, seed)
    content |= {"machine": about, "models": {model: sizes(model) for model in MODELS}, "measured": today()}
    took = f"{time.perf_counter() - start_s:.0f} s, {time.process_time() - start_cpu_s:.0f} s of CPU"
    print(f"seed {seed}, {name}: {took}", flush=True)


def is_equivalent(content: Content) -> bool:
    """Whether every test shows equivalence."""
    tested = {system.name for system in TESTED}
    lines = [line for line in table(content).splitlines() if line.split(" | ")[0].removeprefix("| ") in tested]
    return bool(lines) and all(line.endswith("| equivalent |") for line in lines)


def print_quick() -> None:
    """A few steps of one seed."""
    for name in MODELS:
        start_s = time.perf_counter()
        logs = train(name, SEEDS[0], 20)
        print(f"{name}, {sizes(name)}: {(time.perf_counter() - start_s) / 20 / len(SYSTEMS) * 1e3:.1f} ms per step")
        print(*(f"{log['system']}: {log['losses']['20']:.4f}" for log in logs), sep="\n")


BENCHMARK = Benchmark(RESULTS, PAGE, lambda content: {"results": table(content)}, is_good=is_equivalent)


def main() -> int:
    """0, or 1 unless every test shows equivalence."""
    asked = options(__doc__, seeds=len(SEEDS), quick="one seed, few steps", table=True).parse_args()
    torch.set_num_threads(1)
    if asked.quick:
        print_quick()
        return 0
    return BENCHMARK.main(asked, itertools.product(SEEDS[: asked.seeds], MODELS), measure)


if __name__ == "__main__":
    sys.exit(main())
