"""Pipelines whose stages torch.compile compiles with inductor, its default backend: the same bits as a plain reduction.

    python -m bench.inductor         about 3 minutes; needs a C++ compiler

`tests/process/test_pipeline_compiled.py` checks the same with backends that compile nothing, in seconds. Each process
compiles its own stages here, so this is run by hand. Exit status 0; 1 if a comparison failed; 2 without a compiler.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import torch

from bench.harness.options import options
from tests import ranks
from tests.pipelines import Block, compare, compare_late, usual

DEFER = [{"defer": True}]
LIMIT_S = 900.0


def wrapped(block: Block) -> Any:
    return torch.compile(block)


def in_place(block: Block) -> Block:
    block.compile()
    return block


def in_parts(block: Block) -> Block:
    block.inner.compile()
    block.outer.compile()
    return block


CASES: dict[str, Any] = {
    "1F1B, torch.compile(stage)": lambda rank: compare(rank, usual, "1F1B", modes=DEFER, compiled=wrapped),
    "LoopedBFS, torch.compile(stage)": lambda rank: compare(rank, usual, "LoopedBFS", modes=DEFER, compiled=wrapped),
    "LoopedBFS, stage.compile()": lambda rank: compare(rank, usual, "LoopedBFS", compiled=in_place),
    "LoopedBFS, parts of a stage": lambda rank: compare(rank, usual, "LoopedBFS", modes=DEFER, compiled=in_parts),
    "1F1B, staleness=1": lambda rank: compare_late(rank, usual, "1F1B", steps=3, compiled=in_place),
    "LoopedBFS, FSDP2": lambda rank: compare(rank, usual, "LoopedBFS", modes=DEFER, sharded=True, compiled=in_place),
}
"""What a rank of four runs, by name. Each raises AssertionError where a bit differs."""


def compare_all(rank: int, size: int) -> None:
    """Compares all on each rank."""
    del size
    torch.set_num_threads(1)
    for name, case in CASES.items():
        torch._dynamo.reset()
        start_s = time.monotonic()
        case(rank)
        if rank == 0:
            print(f"{name}: equal, {time.monotonic() - start_s:.0f} s", flush=True)


def main() -> int:
    """0, 1 if a comparison failed, or 2."""
    options(__doc__).parse_args()
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        print("inductor needs a C++ compiler: install g++", file=sys.stderr)
        return 2
    from bench import inductor  # the ranks import the function by its module

    try:
        ranks.run_job(inductor.compare_all, 4, timeout_s=LIMIT_S)
    except ranks.RanksError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
