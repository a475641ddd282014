"""Whether the codec of `commlayer.tp.overlap` leaves the validation loss of a training as it is: equivalence.

    python -m bench.fidelity_tp               all seeds that the results lack (about 20 minutes of one core)
    python -m bench.fidelity_tp --seeds 3     at most this many seeds
    python -m bench.fidelity_tp --quick       one seed, few steps; prints, and keeps nothing
    python -m bench.fidelity_tp --table       only the table of the kept results

Fixed before the first run:

- Claim: the mean difference of the validation loss to training with float32 sums is within 0.005 nats. The test, the
  12 seeds, the model ("byte GPT"), its optimizer and its data are those of bench.fidelity, without codecs of gradients.
- 4 ranks of tensor parallelism, virtual: the parts of a layer's matrices are rows of one array. The sums of outputs and
  of input gradients, four a layer, are encoded as by `codec="int8"` on 4 hosts, with the whole batch as one part.
- `f32, other order` adds the ranks up in reverse: differences of this size are chance. `int4`, which `tp.overlap` does
  not offer, is a control: the test can fail.

Writes bench/results/fidelity_tp.json after each seed, and a table of docs/fidelity.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.fidelity import (
    BATCH,
    CHUNK,
    CLIP,
    CONTEXT,
    LEARNING_RATE,
    MARGIN,
    MODELS,
    PAGE,
    RANKS,
    SEEDS,
    STEPS,
    VALIDATE_AT,
    VALIDATION_WINDOWS,
    facts,
)
from bench.harness.driver import Benchmark, Content
from bench.harness.equivalence import Equivalence
from bench.harness.options import options
from bench.harness.results import today
from bench.jobs.training import ROOT, hold_out, learning_rate_share
from bench.jobs.virtual_ranks import EncodedAverage
from commlayer.compress.codec import CodecPair
from examples.train_gpt import Block, Gpt, draw_batch, standard_library_text

RESULTS = ROOT / "bench/results/fidelity_tp.json"
SEQUENCES = RANKS * BATCH
"""Those of a step: as many as in bench.fidelity."""

Log = dict[str, Any]


class System(NamedTuple):
    """How the sums of the ranks travel."""

    name: str
    codec: str | None = None
    """None: float32."""
    is_reversed: bool = False


BASELINE, REVERSED = System("f32"), System("f32, other order", is_reversed=True)
TESTED, CONTROL = System("int8", "int8"), System("int4", "int4")
SYSTEMS = (BASELINE, REVERSED, TESTED, CONTROL)


class Sums:
    """The all-reduces of one training."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._averages: dict[int, EncodedAverage] = {}
        self._count = 0
        """Of encoded all-reduces: their keys."""

    def add_up(self, parts: Tensor) -> Tensor:
        """The sum over the ranks, which are dimension 0."""
        if self._system.codec is None:
            order = range(len(parts))[:: -1 if self._system.is_reversed else 1]
            total = parts[order[0]].clone()
            for rank in order[1:]:
                total += parts[rank]
            return total
        count = parts[0].numel()
        if count not in self._averages:
            self._averages[count] = EncodedAverage(len(parts), count, CodecPair(self._system.codec, self._system.codec))
        self._count += 1
        rows = parts.detach().reshape(len(parts), -1).contiguous().numpy()
        mean = torch.from_numpy(self._averages[count].average(rows, self._count))
        return (mean * len(parts)).view(parts.shape[1:])


class Enter(torch.autograd.Function):
    """The input of column layers on all ranks; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Sums) -> Tensor:
        ctx.sums = sums
        return x.expand(RANKS, *x.shape)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.sums.add_up(gradients), None


class Leave(torch.autograd.Function):
    """The outputs of a row layer on all ranks, added up."""

    @staticmethod
    def forward(_: Any, parts: Tensor, sums: Sums) -> Tensor:
        return sums.add_up(parts)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.expand(RANKS, *gradient.shape), None


def columns(linear: Any, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """Each rank's part of a column layer: weights (rank, inputs, outputs) and bias. `blocks`: q, k and v in one."""
    outputs, inputs = linear.weight.shape
    weight = linear.weight.view(blocks, RANKS, -1, inputs).transpose(0, 1).reshape(RANKS, -1, inputs)
    bias = linear.bias.view(blocks, RANKS, -1).transpose(0, 1).reshape(RANKS, outputs // RANKS)
    return weight.transpose(1, 2), bias


def rows(linear: Any) -> Tensor:
    """Each rank's part of a row layer's weights: (rank, inputs, outputs)."""
    outputs, inputs = linear.weight.shape
    return linear.weight.T.reshape(RANKS, inputs // RANKS, outputs)  # type: ignore[no-any-return]


def times(x: Tensor, weight: Tensor) -> Tensor:
    """The product on each rank: (rank, batch, length, inputs) and (rank, inputs, outputs)."""
    return torch.matmul(x, weight.unsqueeze(1))


def block_on_ranks(block: Block, x: Tensor, sums: Sums) -> Tensor:
    """A transformer layer as RANKS ranks compute it, each with its heads and its part of the perceptron."""
    batch, length, width = x.shape
    heads = block.heads // RANKS
    weight, bias = columns(block.query_key_value, 3)
    normed = Enter.apply(block.attention_norm(x), sums)  # type: ignore[no-untyped-call]
    qkv = times(normed, weight) + bias[:, None, None]
    query, key, value = qkv.view(RANKS, batch, length, 3, heads, -1).permute(3, 0, 1, 4, 2, 5)
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    own = seen.transpose(2, 3).reshape(RANKS, batch, length, width // RANKS)
    x = x + Leave.apply(times(own, rows(block.project)), sums) + block.project.bias  # type: ignore[no-untyped-call]
    norm, up, act, down = block.feed_forward
    weight, bias = columns(up)
    inner = act(times(Enter.apply(norm(x), sums), weight) + bias[:, None, None])  # type: ignore[no-untyped-call]
    return x + Leave.apply(times(inner, rows(down)), sums) + down.bias  # type: ignore[no-any-return,no-untyped-call]


def logits_of(model: Gpt, text: Tensor, sums: Sums) -> Tensor:
    """The model's output, with its layers on RANKS ranks."""
    x = model.embed_byte(text) + model.embed_position(torch.arange(text.shape[1]))
    for block in model.blocks:
        x = block_on_ranks(block, x, sums)  # type: ignore[arg-type]
    return torch.as_tensor(model.head(x))


def loss_of(model: Gpt, inputs: Tensor, targets: Tensor, sums: Sums) -> Tensor:
    return functional.cross_entropy(logits_of(model, inputs, sums).flatten(0, 1), targets.flatten())


def train(system: System, seed: int, steps: int = STEPS) -> Log:
    """Trains the model with one system."""
    text, held_out = hold_out(standard_library_text())
    windows = draw_batch(held_out, CONTEXT, VALIDATION_WINDOWS if steps == STEPS else CHUNK, 1_000_000)
    torch.manual_seed(seed)
    model = MODELS["byte GPT"]()
    assert isinstance(model, Gpt)
    sums = Sums(system)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
    losses = {}
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = draw_batch(text, CONTEXT, SEQUENCES, seed * 100_000 + step)
        loss_of(model, inputs, targets, sums).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step + 1 in (*VALIDATE_AT, steps):
            with torch.no_grad():
                parts = zip(windows[0].split(CHUNK), windows[1].split(CHUNK), strict=True)
                found = torch.stack([loss_of(model, inputs, targets, sums).double() for inputs, targets in parts])
            losses[str(step + 1)] = float(found.mean())
    return {"seed": seed, "system": system.name, "losses": losses}


def whole_seeds(runs: Sequence[Log]) -> list[dict[str, Log]]:
    """The runs by system, of each seed that has all systems."""
    by_seed: dict[int, dict[str, Log]] = {}
    for log in runs:
        by_seed.setdefault(log["seed"], {})[log["system"]] = log
    return [logs for _, logs in sorted(by_seed.items()) if len(logs) == len(SYSTEMS)]


def verdict(system: System, found: Equivalence, seeds: int) -> str:
    """What the test says."""
    if seeds < len(SEEDS):
        return "open"
    if found.shown:
        return "**equivalent: the test has no force**" if system is CONTROL else "equivalent"
    return "differs" if found.differs(MARGIN) else "not shown"


def table(content: dict[str, Any]) -> str:
    """The table, as Markdown."""
    seeds = whole_seeds(content.get("runs", []))
    if len(seeds) < 2:
        return f"{len(seeds)} of {len(SEEDS)} seeds so far."
    names = ["system", *(f"after {at} steps" for at in VALIDATE_AT)]
    names += ["standard error", "90 % interval", "p", f"within ±{MARGIN} nats"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for system in SYSTEMS[1:]:
        by_step = [
            Equivalence.of(
                [logs[system.name]["losses"][str(at)] - logs[BASELINE.name]["losses"][str(at)] for logs in seeds],
                MARGIN,
            )
            for at in VALIDATE_AT
        ]
        last = by_step[-1]
        cells = [
            system.name,
            *(f"{equivalence.mean:+.4f}" for equivalence in by_step),
            f"{last.error:.4f}",
            f"{last.low:+.4f} to {last.high:+.4f}",
            f"{last.p:.1g}",
            verdict(system, last, len(seeds)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    last_losses = [logs[BASELINE.name]["losses"][str(STEPS)] for logs in seeds]
    so_far = "" if len(seeds) >= len(SEEDS) else f" of {len(SEEDS)}, **so far**"
    about = content["machine"]
    below = (
        f"{len(seeds)} seeds{so_far}. Loss with f32: {min(last_losses):.3f} to {max(last_losses):.3f} nats per byte. "
        f"Measured {content['measured']} on {about['cpu']}, torch {about['torch']}, commit {about['git_commit']}. "
        f"Generated by `bench/fidelity_tp.py` from `bench/results/fidelity_tp.json`."
    )
    return "\n".join([*lines, "", below])


def measure(content: Content, seed: int) -> None:
    """Trains the systems that the results lack with a seed."""
    runs = content.setdefault("runs", [])
    done = {log["system"] for log in runs if log["seed"] == seed}
    start_s, about = time.perf_counter(), facts()
    runs += [train(system, seed) for system in SYSTEMS if system.name not in done]
    content |= {"machine": about, "measured": today()}
    print(f"seed {seed}: {time.perf_counter() - start_s:.0f} s", flush=True)


def is_equivalent(content: Content) -> bool:
    """Whether the test shows equivalence."""
    lines = [line for line in table(content).splitlines() if line.startswith(f"| {TESTED.name} |")]
    return bool(lines) and all("| equivalent |" in line for line in lines)


BENCHMARK = Benchmark(RESULTS, PAGE, lambda content: {"tp": table(content)}, is_good=is_equivalent)


def main() -> int:
    """0, or 1 unless the test shows equivalence."""
    asked = options(__doc__, seeds=len(SEEDS), quick="one seed, few steps", table=True).parse_args()
    torch.set_num_threads(1)
    if asked.quick:
        for system in SYSTEMS:
            start_s = time.perf_counter()
            loss = train(system, SEEDS[0], 20)["losses"]["20"]
            print(f"{system.name}: {loss:.4f}, {(time.perf_counter() - start_s) / 20 * 1e3:.1f} ms per step")
        return 0
    return BENCHMARK.main(asked, SEEDS[: asked.seeds], measure)


if __name__ == "__main__":
    sys.exit(main())
