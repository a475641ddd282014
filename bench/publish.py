"""Bytes and speed of published weights: `commlayer.publish` beside its entropy and beside other ways.

    python -m bench.publish           # prints two tables (a minute)
    python -m bench.publish --keep    # and writes them to docs/publish.md

Bytes: a byte-level transformer learns this repository's pages by AdamW, in float32; after each step its bfloat16 copy
is committed, and a reader on loopback follows. Counted are all bytes of the reader's messages. The entropy is that of
the changes of a step, as if they were independent and alike. The two other ways are arithmetic: 2 bytes for each value
(a broadcast in bfloat16, on gloo or anything else), and 6 for each changed one (int32 place, bfloat16 value).

Speed: one thread compares two states and codes the drawn changes, of which 11 % are larger than one unit. It takes
turns with memcpy of one state. Rates are CPU times of the thread: of all bytes read, so of two states and of one.
"""

from __future__ import annotations

import ctypes
import math
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import commlayer
from bench.harness.options import options
from bench.harness.page import write_between
from commlayer.transport import kernels

ROOT = Path(__file__).parents[1]
RATES = (1e-6, 3e-6, 1e-5)
SHARES = (0.01, 0.034)
WARM_STEPS, SETTLE_STEPS, STEPS = 40, 4, 8
LENGTH, BATCH = 64, 16
VALUES = 16 << 20
ROUNDS = 9


class Model(nn.Module):
    """Predicts the next byte. About 0.9 million values."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a batch of rows of bytes."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        result: Tensor = self.head(self.blocks(self.embed(tokens), mask, is_causal=True))
        return result


def train(model: Model, optimizer: torch.optim.Optimizer, text: Tensor) -> None:
    """One step on rows from random places of the text."""
    rows = torch.randint(len(text) - LENGTH - 1, (BATCH,))
    batch = torch.stack([text[row : row + LENGTH + 1] for row in rows.tolist()]).long()
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def bits_of(state: dict[str, Tensor]) -> npt.NDArray[np.int16]:
    return np.array(torch.cat([tensor.view(torch.int16).flatten() for tensor in state.values()]).numpy(), np.int16)


def entropy_bytes(before: npt.NDArray[np.int16], after: npt.NDArray[np.int16]) -> float:
    """The entropy of the changes, as independent draws from their histogram."""
    counts = np.unique(after - before, return_counts=True)[1] / len(after)
    return float(-(counts * np.log2(counts)).sum() * len(after) / 8)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def bytes_row(model: Model, rate: float, text: Tensor) -> str:
    """A row of the first table."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    published = {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}
    address = f"127.0.0.1:{free_port()}"
    sent, entropy, changed, ones = 0, 0.0, 0, 0
    with commlayer.publish(published, address) as publisher, commlayer.subscribe(address) as reader:
        before = bits_of(published)
        for step in range(SETTLE_STEPS + STEPS):
            train(model, optimizer, text)
            for name, tensor in model.state_dict().items():
                published[name].copy_(tensor)
            publisher.commit(step)
            version = next(reader)
            after = bits_of(published)
            if not np.array_equal(bits_of(version.tensors()), after):
                raise AssertionError(f"version {step} has other bits")
            if step >= SETTLE_STEPS:
                sent += version.received_bytes
                entropy += entropy_bytes(before, after)
                changed += int((before != after).sum())
                ones += int((np.abs(after.astype("i4") - before) == 1).sum())
            before = after
        publisher.close(0.0)
    values = STEPS * len(before)
    return (
        f"| {rate:g} | {changed / values:.2%} | {ones / changed:.0%} | {sent / STEPS:,.0f} | {sent / entropy:.2f} | "
        f"{2 * values / sent:.0f} | {6 * changed / sent:.1f} |"
    )


def seconds_of(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def speed_row(share: float) -> str:
    """A row of the second table."""
    chance = np.random.default_rng(1)
    base = (chance.standard_normal(VALUES, np.float32).view("u4") >> 16).astype("u2")
    values, target = base.copy(), np.zeros_like(base)
    places = np.flatnonzero(chance.random(VALUES) < share)
    large = np.where(chance.random(len(places)) < 0.11, chance.geometric(0.5, len(places)), 0)
    values[places] += ((1 + large) * chance.choice((1, -1), len(places))).astype("u2")
    code = np.zeros(base.nbytes + 64, "u1")
    lengths: list[int | None] = []

    def encode() -> None:
        lengths.append(
            kernels.encode_difference(base.ctypes.data, values.ctypes.data, VALUES, 2, code.ctypes.data, code.nbytes)
        )

    copies, codings = [], []
    for _ in range(ROUNDS):
        copies.append(seconds_of(lambda: ctypes.memmove(target.ctypes.data, base.ctypes.data, base.nbytes)))
        codings.append(seconds_of(encode))
    copy_rate = base.nbytes / statistics.median(copies) / 1e9
    code_rate = 2 * base.nbytes / statistics.median(codings) / 1e9
    ratio = (lengths[-1] or math.nan) / entropy_bytes(base.view("i2"), values.view("i2"))
    return (
        f"| {share:.1%} | {kernels.kernels_level()} | {copy_rate:.1f} | {code_rate:.1f} | {code_rate / copy_rate:.0%} |"
        f" {ratio:.3f} |"
    )


def main() -> None:
    """Measures, prints, and keeps the tables with `--keep`."""
    parser = options(__doc__)
    parser.add_argument("--keep", action="store_true", help="write the tables to docs/publish.md")
    asked = parser.parse_args()
    torch.manual_seed(0)
    pages = b"".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))
    text, model = torch.frombuffer(bytearray(pages), dtype=torch.uint8), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WARM_STEPS):
        train(model, optimizer, text)
    head = (
        "| AdamW's rate | changed values | of them by one unit | bytes per version | bytes / entropy | bf16 broadcast: "
        "times the bytes | int32 places + bf16 values: times the bytes |"
    )
    size = [
        head,
        "|---|---|---|---|---|---|---|",
        *(bytes_row(model, rate, text) for rate in RATES),
    ]
    speed = [
        "| changed values (drawn) | kernels | memcpy, GB/s | compare and code, GB/s | share | bytes / entropy |",
        "|---|---|---|---|---|---|",
        *map(speed_row, SHARES),
    ]
    parts = {"bytes": "\n".join(size), "speed": "\n".join(speed)}
    print("\n\n".join(parts.values()))
    if asked.keep:
        write_between(ROOT / "docs/publish.md", **parts)


if __name__ == "__main__":
    main()
