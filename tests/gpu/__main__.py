"""Checks CUDA tensors on the GPUs of this machine: one is enough, for two ranks.

    python -m tests.gpu

Prints a row per check, with all streams as usual and with one queue of the device for all (as Megatron has it). Exit
code 1: a check failed, or there is no GPU.
"""

import logging
import sys
import time

import torch

from tests import ranks
from tests.gpu.checks import CHECKS, ON_GPUS
from tests.gpu.lab import Gpu, waits

ENVIRONMENTS: dict[str, dict[str, str]] = {"usual": {}, "one queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}


def check(rank: int, size: int, name: str) -> bool:
    """The body of a rank; returns whether streams wait for operations."""
    logging.basicConfig(level=logging.WARNING)
    lab = Gpu(rank)
    (CHECKS | ON_GPUS)[name](lab, rank, size)
    return waits(lab)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU, or a torch without CUDA: nothing was checked")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    failed = 0
    for queues, environ in ENVIRONMENTS.items():
        for name, about in (CHECKS | ON_GPUS).items():
            begun = time.monotonic()
            try:
                stream_waits = ranks.run_job(check, 2, name, environ=environ)
                result = "ok" if all(stream_waits) else "ok, but wait() blocks the calling thread"
            except ranks.RanksError as error:
                failed += 1
                result = f"FAILED\n{error}"
            print(f"{queues:10} {name:15} {time.monotonic() - begun:5.1f} s  {result}")
            if result.startswith("FAILED"):
                print(f"           {about.__doc__}")
    print(f"{failed} checks failed" if failed else "all checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
