"""Bytes and speed of published weights: `commlayer.publish` beside its entropy and beside other ways.

    python -m bench.publish           # prints two tables (a minute)
    python -m bench.publish --keep    # and writes them to docs/publish.md
    python -m bench.publish --links   # prints two others, of emulated hosts, instead (root; a quarter of an hour)

Bytes: a byte-level transformer learns this repository's pages by AdamW, in float32; after each step its bfloat16 copy
is committed, and a reader on loopback follows. Counted are the bytes of the contents that it gets, without the heads of
messages. The entropy is that of the changes of a step, as if they were independent and alike. The two other ways are
arithmetic: 2 bytes for each value (a broadcast in bfloat16, on gloo or anything else), and 6 for each changed one
(int32 place, bfloat16 value).

Speed: one thread compares two states and codes the drawn changes, of which 11 % are larger than one unit. It takes
turns with memcpy of one state. Rates are CPU times of the thread: of all bytes read, so of two states and of one.

Links: a publisher and its readers are hosts in namespaces of their own, whose links have one rate in both directions.
Three times from `commit` on, over the time that one link needs for the bytes of the content: until a difference is
coded; until the last reader has all parts; and until the last one has checked the version. `serves=True` and
`serves=False` take turns. Then the mean step of a DDP job of two hosts, of which the first publishes, beside that
of the job alone. All hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import commlayer
from bench.harness.options import options
from bench.harness.page import write_between
from bench.jobs import published
from commlayer.tools.bench.launch import free_port
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from commlayer.transport import kernels
from tests import ranks

ROOT = Path(__file__).parents[1]
RATES = (1e-6, 3e-6, 1e-5)
SHARES = (0.01, 0.034)
WARM_STEPS, SETTLE_STEPS, STEPS = 40, 4, 8
LENGTH, BATCH = 64, 16
VALUES = 16 << 20
SERVES = (True, False)
ROUNDS = 9
VERSIONS = 4
LIMIT_S = 400.0


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


def on_hosts(hosts: int, mbit: float, body: Callable[..., object], *arguments: object) -> list[Any]:
    """The results of a job whose ranks are hosts. Switches know the classes of packets, and the engine marks its own.
    Segmentation is offloaded, as by NICs, or this machine's cores would limit so many links; TCP is cubic."""
    link = Link(rate_bps=mbit * 1e6, priorities=True, offloads=True)
    scenario = Scenario(hosts=hosts, nics=(link,), tcp_congestion_control=("cubic",))
    with Network(scenario) as network, tempfile.NamedTemporaryFile() as secret:
        for host in range(hosts):
            network.run(host, ["sysctl", "-qw", "net.ipv4.tcp_congestion_control=cubic"])
        secret.write(secrets.token_bytes(32))
        secret.flush()
        values, *others = arguments
        given = (values, secret.name, *others)
        places = [network.name(host) for host in range(hosts)]
        environ = {**network.rendezvous(), "COMMLAYER_DSCP": "1"}
        return ranks.run(body, hosts, *given, timeout_s=LIMIT_S, environ=environ, places=places)


def spread(found: list[float], form: str) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(found):{form}} ({min(found):{form}} to {max(found):{form}})"


def links_table(readers: int, mbit: float, values: int, rounds: int) -> str:
    """How long readers wait for a version."""
    times: dict[tuple[str, bool, bool], list[float]] = {}
    sizes: dict[bool, float] = {}
    sent: dict[bool, list[float]] = {True: [], False: []}
    for _, serves in itertools.product(range(rounds), SERVES):
        (committed, sent_bytes), *found = on_hosts(1 + readers, mbit, published.follow, values, serves, VERSIONS)
        for version, (begin_s, coded_s) in committed.items():
            came = [reader[version] for reader in found]
            size, is_whole = came[0].size, came[0].is_whole
            sizes[is_whole] = size / 1e6
            link_s = 8 * size / (mbit * 1e6)
            ends_s = {
                "coded": coded_s,
                "come": max(copy.arrived_s for copy in came),
                "checked": max(copy.at_s for copy in came),
            }
            for what, end_s in ends_s.items():
                times.setdefault((what, is_whole, serves), []).append((end_s - begin_s) / link_s)
        sent[serves].append(sent_bytes / sum(found[0][version].size for version in committed))
    rows = [
        f"| {content}, {sizes[is_whole]:.1f} MB: {text} | {spread(times[what, is_whole, True], '.2f')} | "
        f"{spread(times[what, is_whole, False], '.2f')} |"
        for content, is_whole in (("whole state", True), ("difference", False))
        for text, what in (("coded", "coded"), ("all parts have come", "come"), ("checked", "checked"))
    ]
    return "\n".join(
        [
            f"| {readers} readers, {mbit:g} Mbit/s: times the link's time | `serves=True` | `serves=False` |",
            "|---|---|---|",
            *rows,
            f"| copies that the publisher sent | {spread(sent[True], '.2f')} | {spread(sent[False], '.2f')} |",
        ]
    )


def steps_table(readers: int, mbit: float, values: int, rounds: int, steps: int, every: int) -> str:
    """How much a job that publishes is slower, and how late its versions are."""
    found: dict[bool | None, list[float]] = {None: [], True: [], False: []}
    late_s: dict[bool | None, list[float]] = {serves: [] for serves in found}
    skipped = dict.fromkeys(found, 0)
    for _ in range(rounds):
        for serves, times_s in found.items():
            first, second, *came = on_hosts(2 + readers, mbit, published.train, values, serves, steps, every)
            times_s.append(statistics.mean(first[0] + second[0]))
            for version, begin_s in first[1].items():
                if all(version in versions for versions in came):
                    late_s[serves].append(max(versions[version].at_s for versions in came) - begin_s)
                else:
                    skipped[serves] += 1
    rows = [
        f"| {what} | {1e3 * statistics.median(found[serves]):.0f} ms | "
        f"{spread([one / alone - 1 for one, alone in zip(found[serves], found[None], strict=True)], '+.1%')} | "
        f"{spread(late_s[serves], '.2f') + ' s' if late_s[serves] else ''} | "
        f"{'' if serves is None else skipped[serves]} |"
        for what, serves in (("alone", None), ("`serves=True`", True), ("`serves=False`", False))
    ]
    title = f"| DDP on 2 hosts, a version every {every} steps for {readers} readers | step | slower than alone | "
    title += "from `commit` until the last reader has it | versions that a reader skipped |"
    return "\n".join([title, "|---|---|---|---|---|", *rows])


def measure_links(asked: argparse.Namespace) -> dict[str, str]:
    """The tables of emulated hosts."""
    values = int(asked.megabytes * 1e6 / 2)
    return {
        "links": links_table(asked.readers, asked.mbit, values, asked.rounds),
        "steps": steps_table(asked.readers, asked.mbit, values, asked.rounds, asked.steps, asked.every),
    }


def measure() -> dict[str, str]:
    """The tables of bytes and of speed."""
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
    return {"bytes": "\n".join(size), "speed": "\n".join(speed)}


def main() -> None:
    """Measures, prints, and keeps the tables with `--keep`."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--keep", action="store_true", help="write the tables to docs/publish.md")
    parser.add_argument("--links", action="store_true", help="emulated hosts")
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each link")
    parser.add_argument("--megabytes", type=float, default=12.0, help="size of the state")
    parser.add_argument("--steps", type=int, default=60, help="of the DDP job")
    parser.add_argument("--every", type=int, default=15, help="steps between its versions")
    asked = parser.parse_args()
    parts = measure_links(asked) if asked.links else measure()
    print("\n\n".join(parts.values()))
    if asked.keep:
        write_between(ROOT / "docs/publish.md", **parts)


if __name__ == "__main__":
    main()
