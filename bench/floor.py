"""The engine thread beside its floor: one thread that sends, receives and adds the same packets without a protocol.

    make build/test/speed/floor build/test/speed/loopback
    python -m bench.floor                   10 rounds (a minute)
    python -m bench.floor --other TREE      beside the same programs, built in another checkout

Both run over loopback UDP, with packets for an MTU of 1,500 and of 9,000, and take turns; between them are four ranks.
The figure is Gbit/s of payload each way per second of one thread's processor time: other load disturbs it less than the
clock. The floor is native/speed/floor.c, the engine native/speed/loopback.c; native/speed/core.c has the cost of a
packet by the number of peers, without sockets.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

from bench.harness.matrix import ROOT
from bench.harness.options import options

CASES = {1500: ("32", "1472"), 9000: ("7", "8972")}
"""The packets of a super-packet, and the bytes of a datagram, by MTU."""

SECONDS = "1"
REACH = 0.5
"""The share of the floor that the engine should reach."""


def gbps(tree: Path, program: str, *arguments: str) -> float:
    """One run of a program: Gbit/s each way per second of processor time."""
    path = tree / "build/test/speed" / program
    text = subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
    found = re.search(r"([0-9.]+) Gbit/s each way per second of CPU", text)
    if found is None:
        raise RuntimeError(f"{path} says {text!r}: no Gbit/s per second of CPU in it")
    return float(found[1])


def main() -> int:
    parser = options(__doc__, rounds=10)
    parser.add_argument("--other", type=Path, help="another checkout")
    arguments = parser.parse_args()
    trees = [ROOT] if arguments.other is None else [ROOT, arguments.other]
    reached = True
    print("| MTU | floor, Gbit/s | engine, Gbit/s | share |" + " other engine, Gbit/s | ratio |" * (len(trees) - 1))
    print("|---" * (4 + 2 * (len(trees) - 1)) + "|")
    for mtu, (segments, size) in CASES.items():
        floors, engines = [], []
        for _ in range(arguments.rounds):
            floors.append(gbps(ROOT, "floor", segments, size, SECONDS))
            engines.append([gbps(tree, "loopback", size, SECONDS) for tree in trees])
        floor, (own, *others) = statistics.median(floors), map(statistics.median, zip(*engines, strict=True))
        reached = reached and own / floor >= REACH
        print(
            f"| {mtu} | {floor:.1f} | {own:.1f} | {own / floor:.2f} |"
            + "".join(f" {other:.1f} | {own / other:.2f} |" for other in others),
            flush=True,
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
