"""A trainer publishes its weights after each step, and readers in other processes follow.

    python examples/publish.py                        # a trainer and two readers on this host
    python examples/publish.py --read HOST:PORT       # one more reader, in another terminal (or on another host, with
                                                      # COMMLAYER_SECRET_FILE at both)

The model is small and its task made up: what matters are the lines with `commlayer`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from torch import nn

import commlayer


def make() -> nn.Module:
    """The model of trainer and readers, in the type that is published."""
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).bfloat16()


def train(address: str, steps: int, pause_s: float) -> None:
    """Trains in float32, and publishes a bfloat16 copy."""
    torch.manual_seed(0)
    master, published = make().float(), make()
    optimizer = torch.optim.AdamW(master.parameters(), lr=3e-6)
    with commlayer.publish(published, address) as publisher:
        for step in range(steps):
            batch = torch.randn(64, 256)
            loss = (master(batch) - batch.roll(1, dims=1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            published.load_state_dict(master.state_dict())  # rounds to bfloat16
            publisher.commit(step)
            time.sleep(pause_s)


def read(address: str) -> None:
    """Follows the trainer, and uses each version."""
    model = make()
    with torch.inference_mode():
        example = torch.ones(1, 256, dtype=torch.bfloat16)
    for version in commlayer.subscribe(address):
        version.apply(model)
        with torch.inference_mode():
            answer = model(example).float().norm().item()
        how = "whole" if version.is_whole else "difference"
        print(f"version {version.number}: {version.received_bytes:,} bytes ({how}), answer {answer:.4f}", flush=True)


def main() -> None:
    """A reader, or a trainer with two readers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--address", default="127.0.0.1:29600", help="where the trainer publishes (default %(default)s)"
    )
    parser.add_argument("--read", metavar="HOST:PORT", help="follow the trainer at this address")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between steps")
    options = parser.parse_args()
    if options.read:
        read(options.read)
        return
    readers = [subprocess.Popen([sys.executable, __file__, "--read", options.address]) for _ in range(2)]
    train(options.address, options.steps, options.pause)
    sys.exit(max(reader.wait() for reader in readers))


if __name__ == "__main__":
    main()
