"""A job that is slow for a hidden reason, on four emulated hosts: found with commlayer's tools alone?

    python -m bench.slow_job                 draws one of the three reasons, runs the tools, and then tells it (root)
    python -m bench.slow_job --number 2      one of them

The commands are those that docs/headroom.md and docs/probe.md give a newcomer: headroom first, then probe if it says
so. docs/new_user.md has the notes.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.harness.options import options
from bench.jobs.headroom import Layer

REASONS = {
    1: "the link of host 2 carries 20 Mbit/s, the others 200",
    2: "rank 3 loads its data 100 ms longer in each step",
    3: "the job reduces 60 metrics in each step, one by one, on a network with 0.5 ms per link",
}
HIDDEN = "SLOW_JOB"
"""Variable with the number of the reason: the command line does not tell it."""

NETWORK = """
hosts = 4

[[nic]]
rate_bps = "200M"
delay_ms = {delay_ms}
"""
SLOW_LINK = """
[[link]]
host = 2
rate_bps = "20M"
"""
TIMEOUT_S = 300


def train(number: int) -> None:
    """The job: DDP on gloo, until the process ends."""
    torch.set_num_threads(1)  # four ranks share the processors of one machine
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Layer(256, 0.005) for _ in range(8))), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        if number == 2 and dist.get_rank() == 3:
            time.sleep(0.1)
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(60 if number == 3 else 1):
            dist.all_reduce(torch.ones(()))


def type_in(command: list[str], number: int) -> str:
    """Runs a command as the newcomer would, and prints it with its output and seconds."""
    print(f"$ {shlex.join(command).replace(sys.executable, 'python')}", flush=True)
    begin_s = time.monotonic()
    place = {**os.environ, HIDDEN: str(number), "COLUMNS": "100"}
    ended = subprocess.run(command, env=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(f"{ended.stdout}{ended.stderr}({time.monotonic() - begin_s:.0f} s, exit status {ended.returncode})\n")
    return ended.stdout + ended.stderr


def main() -> None:
    """Runs the tools on one job."""
    parser = options(__doc__)
    parser.add_argument("--number", type=int, choices=REASONS, help="of the reason; default: any")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(int(os.environ[HIDDEN]))
        return
    number = given.number or random.choice(list(REASONS))
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder, "network.toml")
        network.write_text(NETWORK.format(delay_ms=0.5 if number == 3 else 0) + (SLOW_LINK if number == 1 else ""))
        commlayer = [sys.executable, "-m", "commlayer"]
        emulate = [*commlayer, "emulate", str(network), "--"]
        job = [*emulate, sys.executable, "-m", "bench.slow_job", "--train"]
        said = type_in([*commlayer, "headroom", "--", *job], number)
        if "commlayer probe" in said:
            type_in([*emulate, *commlayer, "probe"], number)
    print(f"The reason: {REASONS[number]}.")


if __name__ == "__main__":
    main()
