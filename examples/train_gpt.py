"""Trains a small byte-level GPT on the Python standard library's own sources, data-parallel with DDP.

    torchrun --nproc_per_node 2 examples/train_gpt.py --backend commlayer

An ordinary DDP script: what commlayer needs of it is the import and the backend's name, and `--backend gloo` runs
exactly the same job without it. `--hook` shows the other way in, a DDP communication hook, and `--overlap` lets
gradients travel during the next forward pass.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commlayer  # registers the backend "commlayer"

BYTES = 256  # the vocabulary: text is its bytes, no tokenizer to download
CALIBRATE_EVERY = 10  # steps between two steps without communication
WARM_UP_STEPS = 5  # DDP rebuilds its buckets after the first; not counted in the timings


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        query, key, value = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + torch.as_tensor(self.feed_forward(x))


class Gpt(nn.Module):
    """Predicts each next byte."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(BYTES, width)
        self.embed_position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, text: Tensor) -> Tensor:
        position = torch.arange(text.shape[1], device=text.device)
        return torch.as_tensor(self.head(self.blocks(self.embed_byte(text) + self.embed_position(position))))


def standard_library_text(limit_bytes: int = 8 << 20) -> Tensor:
    """The bytes of the standard library's .py files: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= limit_bytes:
                break
    return torch.frombuffer(text, dtype=torch.uint8)


def draw_batch(text: Tensor, context: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random windows and their next bytes; the same `seed` gives the same windows."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def parameters_digest(model: nn.Module) -> str:
    """A digest that is equal on two ranks if every bit of every parameter is equal."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains, and returns the log: a record per step, then the summary. Times are seconds, medians after warm-up."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    text = standard_library_text()
    gpt = Gpt(options.context, options.width, options.layers, options.heads)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=options.overlap)
    if options.hook:
        model.register_comm_hook(commlayer.HookState(commlayer.Policy()), commlayer.allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    overlap = commlayer.overlap(model, optimizer) if options.overlap else None

    def forward_backward(step: int) -> Tensor:
        seed = (options.seed * options.steps + step) * world + rank
        inputs, targets = draw_batch(text, options.context, options.batch, seed)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    losses, step_s, update_s, alone_s = [], [], [], []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), disable=rank != 0) as progress:
        bar = progress.add_task(f"{options.backend}, {world} ranks", total=options.steps, loss=float("nan"))
        for step in range(options.steps):
            start = time.perf_counter()
            loss = forward_backward(step)
            update_start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            update_s.append(time.perf_counter() - update_start)
            with commlayer.priority(0):  # ahead of gradients that are still on their way
                dist.all_reduce(loss)  # log the mean over all ranks, as most jobs do
            step_s.append(time.perf_counter() - start)
            losses.append(loss.item() / world)
            progress.update(bar, advance=1, loss=losses[-1])
            if step % CALIBRATE_EVERY == WARM_UP_STEPS:
                # The same work without communication, its gradients dropped. Only this rank's own speed may count,
                # so all ranks wait for each other before and after, outside the timing.
                dist.barrier()
                start = time.perf_counter()
                with model.no_sync():
                    forward_backward(step)
                alone_s.append(time.perf_counter() - start)
                optimizer.zero_grad()
                dist.barrier()

    if overlap is not None:
        overlap.finish()
    computing_s = statistics.median(alone_s) + statistics.median(update_s)
    median_s = statistics.median(step_s[WARM_UP_STEPS:])
    digests: list[Any] = [None] * world
    dist.all_gather_object(digests, parameters_digest(model))
    summary = {
        "backend": options.backend,
        "ranks": world,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_s": median_s,
        "communication_s": median_s - computing_s,  # waiting for other ranks: network and stragglers
        "tokens_per_s": world * options.batch * options.context / median_s,
        "final_loss": statistics.fmean(losses[-10:]),
        "replicas_identical": len(set(digests)) == 1,
    }
    steps = zip(losses, step_s, itertools.accumulate(step_s), strict=True)
    records: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "wall_s": wall, "step_s": took, "communication_s": took - computing_s}
        for step, (loss, took, wall) in enumerate(steps)
    ]
    return [*records, summary]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="commlayer", choices=["commlayer", "gloo"])
    parser.add_argument("--hook", action="store_true", help="all-reduce gradients in commlayer's DDP hook")
    parser.add_argument("--overlap", action="store_true", help="let gradients travel during the next forward pass")
    parser.add_argument("--steps", type=int, default=400, help="at least 10 (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes per window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=160, help="model width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same weights and data (default: %(default)s)")
    parser.add_argument("--metrics", type=Path, help="write a JSON line per step and a summary here")
    options = parser.parse_args()

    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(options.backend)  # <- the one line that differs between gloo and commlayer
    log = train(options)
    summary = log[-1]
    if dist.get_rank() == 0:
        if options.metrics:
            options.metrics.parent.mkdir(parents=True, exist_ok=True)
            options.metrics.write_text("".join(json.dumps(record) + "\n" for record in log), encoding="utf-8")
        print(f"final loss {summary['final_loss']:.4f}, replicas identical: {summary['replicas_identical']}")
    dist.barrier()  # a rank that ends first would break the last collective of the others
    dist.destroy_process_group()
    if options.backend == "gloo":  # its threads live on; one that frees a tensor while Python ends aborts the process
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
