"""Gradients of a real training run, on which tests measure the errors of the codecs; tests/data keeps a sample.

    python -m bench.capture_gradients              train 1,000 steps (minutes), keep all gradients and the sample
    python -m bench.capture_gradients --sample     only draw the sample again, from the gradients kept in out/
    python -m bench.capture_gradients --figures    only print the errors, on all gradients and on the sample

The model, the data and the optimizer are those of docs/training.md. Four virtual ranks share the weights and draw
their batches from different seeds; the optimizer gets the exact mean of their gradients.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from bench.harness.options import options
from bench.jobs.training import ROOT, Job, hold_out, learning_rate_share
from bench.time_to_loss import MODEL
from commlayer.plans.codec import CODECS
from examples.train_gpt import Gpt, draw_batch, standard_library_text
from tests.virtual import Kernel, virtual_all_reduce

Array = npt.NDArray[np.float32]

WHOLE = ROOT / "out/gradients.npz"
SAMPLE = ROOT / "tests/data/gradients.npz"
RANKS = 4
STEPS = (10, 100, 1000)
JOB = Job("capture", steps=1500, **MODEL)
"""The learning rate falls over 1,500 steps; the run ends at the last of STEPS."""
PIECES, PIECE = 4, 256
"""The sample has 4 pieces of 256 values of each matrix, at 1/8, 3/8, 5/8 and 7/8 of it, and all vectors whole."""
KEYS = 8
"""Rotations of int4 over which its error is averaged."""


class Gradients(NamedTuple):
    """Gradients of all ranks at some steps, in pieces of parameters that follow each other."""

    steps: dict[int, Array]
    """Each step's values, one row per rank."""
    pieces: list[dict[str, Any]]
    """Parameter, class of layer, start in the parameter, length."""

    def values_of(self, kind: str) -> npt.NDArray[np.bool_]:
        """A mask of the values of one class of layers."""
        return np.repeat([piece["class"] == kind for piece in self.pieces], [piece["length"] for piece in self.pieces])

    @property
    def classes(self) -> list[str]:
        return list(dict.fromkeys(piece["class"] for piece in self.pieces))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {f"step{step}": rows for step, rows in self.steps.items()}
        np.savez_compressed(path, pieces=np.array(json.dumps(self.pieces)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Gradients:
        with np.load(path) as file:
            steps = {int(name.removeprefix("step")): file[name] for name in file.files if name.startswith("step")}
            return cls(steps, json.loads(str(file["pieces"])))

    def sample(self) -> Gradients:
        """Pieces of 256 values of every matrix, then every vector; see PIECES."""
        matrices, vectors = [], []
        at = 0
        for piece in self.pieces:
            if piece["vector"]:
                vectors.append((at, piece))
            else:
                for i in range(PIECES):
                    start = piece["length"] * (2 * i + 1) // (2 * PIECES) // PIECE * PIECE
                    matrices.append((at + start, {**piece, "start": start, "length": PIECE}))
            at += piece["length"]
        chosen = matrices + vectors
        index = np.concatenate([np.arange(at, at + piece["length"]) for at, piece in chosen])
        return Gradients(
            {step: rows.take(index, axis=1) for step, rows in self.steps.items()}, [piece for _, piece in chosen]
        )


def pieces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Every parameter as one piece, in DDP's order: the last first."""
    pieces = []
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                kind = "embedding"
            elif isinstance(module, nn.LayerNorm):
                kind = "norm"
            elif name == "bias":
                kind = "bias"
            elif module_name.startswith("read_out"):
                kind = "head"
            else:
                kind = "feed-forward" if "feed_forward" in module_name else "attention"
            piece = {"parameter": f"{module_name}.{name}", "class": kind, "start": 0, "length": parameter.numel()}
            pieces.append({**piece, "vector": parameter.dim() == 1})
    return pieces[::-1]


def capture() -> Gradients:
    """Trains up to the last of STEPS."""
    torch.set_num_threads(1)
    torch.manual_seed(JOB.seed)
    text, _ = hold_out(standard_library_text())
    model = Gpt(JOB.context, JOB.width, JOB.layers, JOB.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=JOB.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, JOB.steps))
    pieces = pieces_of(model)
    parameters = [model.get_parameter(piece["parameter"]) for piece in pieces]
    steps: dict[int, Array] = {}
    for step in range(max(STEPS) + 1):
        gradients, losses = [], []
        for rank in range(RANKS):
            seed = (JOB.seed * 100_000 + step) * RANKS + rank
            inputs, targets = draw_batch(text, JOB.context, JOB.batch, seed)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            gradients.append(torch.autograd.grad(loss, parameters))
            losses.append(loss.item())
        if step in STEPS:
            steps[step] = np.stack(
                [np.concatenate([gradient.numpy().ravel() for gradient in rank]) for rank in gradients]
            )
        if step % 100 == 0 or step in STEPS:
            print(f"step {step}: loss {sum(losses) / RANKS:.3f}", flush=True)
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        optimizer.step()
        schedule.step()
    return Gradients(steps, pieces)


def nmse(values: Array, exact: Array) -> float:
    """Mean squared error as a share of the mean square; 0 where all is zero."""
    squares = float(np.square(exact, dtype="f8").sum())
    return float(np.square(values.astype("f8") - exact).sum()) / squares if squares else 0.0


def cosine(values: Array, exact: Array) -> float:
    """Cosine of the angle between two vectors."""
    a, b = values.astype("f8"), exact.astype("f8")
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def round_trip(name: str, values: Array, key: int) -> Array:
    """The values after one codec."""
    kernel = Kernel(CODECS[name], key)
    return kernel.decode(kernel.encode(values), len(values))


def worst_nmse(gradients: Gradients, step: int, name: str, mask: npt.NDArray[np.bool_]) -> float:
    """NMSE of a codec on the values in the mask: of the rank with the largest, a mean over some keys. All values are
    encoded together."""
    ranks = gradients.steps[step]
    return max(
        float(np.mean([nmse(round_trip(name, rank, key)[mask], rank[mask]) for key in range(KEYS)])) for rank in ranks
    )


def aggregate_cosine(gradients: Gradients, step: int, up: str, down: str, mask: npt.NDArray[np.bool_]) -> float:
    """Cosine between the encoded and the exact mean of the ranks' gradients."""
    ranks = gradients.steps[step]
    mean = virtual_all_reduce(list(ranks), up, down, key=step).total
    return cosine(mean[mask], ranks.mean(0, dtype="f8").astype("f4")[mask])


def print_figures(title: str, gradients: Gradients) -> None:
    """A table of errors by step and class of layers."""
    print(f"\n{title}: {next(iter(gradients.steps.values())).shape[1]} values of each rank")
    columns: dict[str, Callable[[int, npt.NDArray[np.bool_]], float]] = {
        **{
            f"nmse {name}": lambda step, mask, name=name: worst_nmse(gradients, step, name, mask)  # type: ignore[misc]
            for name in CODECS
        },
        **{
            f"1 - cosine {up}-{down}": lambda step, mask, up=up, down=down: (  # type: ignore[misc]
                1 - aggregate_cosine(gradients, step, up, down, mask)
            )
            for up, down in (("int8", "int8"), ("int4", "int8"), ("int4", "int4"))
        },
    }
    print("| step | values | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    everything = np.ones(next(iter(gradients.steps.values())).shape[1], bool)
    for step in gradients.steps:
        for kind in ("all", *gradients.classes):
            mask = everything if kind == "all" else gradients.values_of(kind)
            cells = [f"{figure(step, mask):.2g}" for figure in columns.values()]
            print(f"| {step} | {kind} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sample", action="store_true", help="draw the sample again from out/gradients.npz")
    parser.add_argument("--figures", action="store_true", help="only print the errors")
    arguments = parser.parse_args()
    if arguments.sample and not WHOLE.exists():
        parser.error(f"--sample: {WHOLE} is absent; run without --sample first, which trains and keeps the gradients")
    if not arguments.figures:
        if not arguments.sample:
            capture().save(WHOLE)
        Gradients.load(WHOLE).sample().save(SAMPLE)
        print(f"{SAMPLE}: {SAMPLE.stat().st_size} bytes; Python {platform.python_version()}, torch {torch.__version__}")
    for path in (WHOLE, SAMPLE):
        if path.exists():
            print_figures(path.name, Gradients.load(path))


if __name__ == "__main__":
    main()
