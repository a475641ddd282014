"""When is the ring faster than the direct plan? All-reduces of 24 hosts on a simulated fabric, at three rates.

    make build/test/fabric/simulate
    python -m bench.ring_threshold         a minute

The production transport and plans run in virtual time (native/fabric), so the figures do not depend on the machine.
They lack the time that a rank needs from the arrival of a message to the start of the next one, which a ring pays at
each of its 2 (n - 1) hops. docs/defects.md has the figures, and what they say of `select.RING_CHUNK_BYTES`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.fabric import PROGRAM, QUICK
from bench.harness.options import options
from commlayer.plans.settings import Settings
from native.sim import plans

HOSTS = 24
CHUNKS_KIB = (2, 4, 8, 16, 32, 64)
"""The parts of a tensor that each rank owns."""


class Rate(NamedTuple):
    """A fabric of one rate, with delays and marking thresholds that suit it."""

    host_gbps: int
    tick_ns: int
    delay_us: int
    mark_us: int


RATES = (Rate(100, 20, 1, 16), Rate(10, 200, 2, 100), Rate(1, 1000, 5, 1000))


def work() -> Iterator[tuple[Any, Iterator[Any]]]:
    """Each size by the direct plan and by the ring."""
    lengths = [HOSTS * chunk << 10 for chunk in CHUNKS_KIB]
    yield (
        tuple((rank,) for rank in range(HOSTS)),
        (
            plans.Shape("all_reduce", length // 4, 4, False, 0, settings)
            for length in lengths
            for settings in (Settings(algorithm="direct"), Settings(algorithm="ring"))
        ),
    )


def mean_us(file: Path, shape: int, rate: Rate) -> float:
    """The time of one all-reduce, the mean of the ranks."""
    options: dict[str, Any] = {**QUICK, **rate._asdict(), "spine_gbps": 4 * rate.host_gbps}
    options |= {"plans": file, "shapes": shape, "load": 0, "seed": 1, "limit_ms": 4000}
    words = [str(PROGRAM), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["collectives"]["mean_us"])


def main() -> int:
    """0, or 2 if the program has not been built."""
    options(__doc__).parse_args()
    if not PROGRAM.exists():
        print(f"{PROGRAM} is missing: make build/test/fabric/simulate", file=sys.stderr)
        return 2
    print("| bytes per rank | " + " | ".join(f"{r.host_gbps} Gbit/s: direct, us | ring, us" for r in RATES) + " |")
    print("|---" * (1 + 2 * len(RATES)) + "|")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plans.bin")
        plans.write(file, work())
        for number, chunk in enumerate(CHUNKS_KIB):
            times = [mean_us(file, 2 * number + ring, rate) for rate in RATES for ring in range(2)]
            print(f"| {chunk} KiB | " + " | ".join(f"{time:.0f}" for time in times) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
