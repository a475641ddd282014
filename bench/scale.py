"""What 1,000 hosts of 8 ranks cost a rank, without them: time, memory and packets of plans; peers of the engine; times
on a simulated fabric. Writes docs/scale.md.

    python -m bench.scale            everything, in a minute or two; needs `make build/test/fabric/simulate`
    python -m bench.scale --table    only the tables of the kept results

Seconds are of this machine. Packets, steps and bytes, and the times on the fabric, which are virtual, are the same
everywhere; tests/unit/plans/test_scale.py has limits for them.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.driver import WHOLE, Benchmark
from bench.harness.options import options
from bench.harness.page import markdown
from commlayer.config import Config
from commlayer.plans.plan import StepKind
from commlayer.plans.select import Collective, make_plan
from commlayer.plans.settings import Settings
from commlayer.transport.native import Engine
from commlayer.transport.status import ffi, lib

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/scale.json"
PAGE = ROOT / "docs/scale.md"
PROGRAM = ROOT / "build/test/fabric/simulate"
PLANS = ROOT / "build/scale.bin"

PACKET_BYTES = 1432
"""Payload of a packet in Ethernet's usual frames."""

MIB = 1 << 20
LAYOUTS = ((1000, 8), (1000, 1), (125, 8))
"""Hosts, and ranks of each."""

LENGTHS = (4096, 25 * MIB, 100 * MIB)
"""Bytes of a tensor; those of all ranks together for DIVIDED."""

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
DIVIDED = ("reduce_scatter", "all_gather")
PEERS = 7992
"""Processes on other hosts, of 1,000 hosts of 8."""

PORT = {
    "ifname": "lo",
    "address": "127.0.0.1",
    "prefix": 8,
    "mtu": 1500,
    "loopback": False,
    "running": True,
    "version": 4,
}

FABRICS = ((144, 12), (256, 16), (1000, 40))
"""Hosts, and leaves, of the simulated fabrics. The plans are those of native/sim/plans.py, three for each length: as
`auto` chooses, with one shard per rank, and deterministic; the first alone for 1,000 hosts."""
FABRIC_LENGTHS = (32, 4096, 65_536, 262_144)
FABRIC_PLANS = ("auto", "direct", "deterministic")

Figures = dict[str, Any]


def alone(body: Callable[..., Figures], *arguments: Any) -> Figures:
    """What `body` returns in a process of its own, with the MiB by which that process grew at its peak."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_grown, (body, *arguments))


def _grown(body: Callable[..., Figures], *arguments: Any) -> Figures:
    before = _peak_mib()
    found = body(*arguments)
    return {**found, "grown_mib": _peak_mib() - before}


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def plan(hosts: int, per_host: int, collective: Collective, length: int) -> Figures:
    """One rank's plan."""
    world = hosts * per_host
    layout = tuple(tuple(range(first, first + per_host)) for first in range(0, world, per_host))
    numel = length // 4 // (world if collective in DIVIDED else 1)
    begin = time.perf_counter()
    made = make_plan(collective, rank=0, hosts=layout, numel=numel, itemsize=4, settings=Settings())
    seconds = time.perf_counter() - begin
    sent = made.steps["length"][made.steps["kind"] == StepKind.SEND].astype(np.int64)
    return {
        "seconds": seconds,
        "steps": len(made.steps),
        "messages": len(sent),
        "packets": int((-(-sent // PACKET_BYTES)).sum()),
        "least": float(sent.sum() / PACKET_BYTES),
        "plan_mib": (made.steps.nbytes + made.successors.nbytes) / MIB,
        "scratch_mib": made.scratch_bytes / MIB,
    }


def described(count: int) -> Figures:
    """What a group keeps of so many other ranks: their descriptions, as they come through the Store."""
    engine = Engine(Config(), [PORT], "udp")
    text = json.dumps(engine.describe())
    begin = time.perf_counter()
    kept = [json.loads(text) for _ in range(count)]
    seconds = time.perf_counter() - begin
    engine.close()
    return {"seconds": seconds, "bytes": len(text), "count": len(kept)}


def peers(count: int) -> Figures:
    """An engine that knows so many peers, each on one path."""
    engine = Engine(Config(), [PORT], "udp")
    begin = time.perf_counter()
    address = ffi.new("char[]", b"127.0.0.1")
    keep = (ffi.new("char *[]", [address]), ffi.new("uint32_t[]", [0]), ffi.new("uint32_t[]", [9]))
    lib.cl_engine_identify(engine.raw, 1, bytes(16), 0, 1)
    for peer in range(1, count + 1):
        fields = {
            "peer": peer,
            "path_count": 1,
            "local": keep[1],
            "remote_addresses": ffi.cast("const char *const *", keep[0]),
            "remote_ports": keep[2],
        }
        if lib.cl_engine_add_peer(engine.raw, ffi.new("struct cl_peer_options *", fields)) != 0:
            raise RuntimeError(f"peer {peer} of {count} was refused")
    seconds = time.perf_counter() - begin
    engine.close()
    return {"seconds": seconds}


def fabric(hosts: int, leaves: int, shape: int) -> Figures:
    """An all-reduce on a fabric that nobody else uses, in virtual time: its mean, and that of its slowest rank."""
    arguments = {"plans": PLANS, "shapes": shape, "leaves": leaves, "hosts_per_leaf": hosts // leaves, "load": 0}
    command = [str(PROGRAM), *(text for name, value in arguments.items() for text in (f"--{name}", str(value)))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return {"unfinished": done.stderr.strip()}
    found = json.loads(done.stdout)
    return {"mean_us": found["collectives"]["mean_us"], "max_us": found["collectives"]["max_us"]}


def measure() -> Figures:
    """All figures."""
    subprocess.run([sys.executable, ROOT / "native/sim/plans.py", PLANS, "scale"], check=True)
    found: Figures = {"plans": {}, "fabric": {}}
    for hosts, per_host in LAYOUTS:
        for collective in COLLECTIVES:
            for length in LENGTHS if collective != "barrier" else (0,):
                name = f"{hosts} x {per_host} {collective} {length}"
                found["plans"][name] = alone(plan, hosts, per_host, collective, length)
                print(name, found["plans"][name], file=sys.stderr, flush=True)
    found["peers"] = alone(peers, PEERS)
    found["described"] = alone(described, PEERS)
    shape = 0
    for hosts, leaves in FABRICS:
        for length in FABRIC_LENGTHS:
            for name in FABRIC_PLANS[: 3 if hosts < 1000 else 1]:
                found["fabric"][f"{hosts} {length} {name}"] = fabric(hosts, leaves, shape)
                shape += 1
    return found


def plan_table(found: Figures) -> str:
    """Plans, as Markdown."""
    columns = ["hosts x ranks", "collective", "bytes", "seconds", "steps", "messages", "packets", "of the least", "MiB"]
    rows = []
    for name, of in found["plans"].items():
        layout, collective, length = name.rsplit(" ", 2)
        share = f"{of['packets'] / of['least']:.2f}" if of["least"] > of["messages"] else ""
        cells = [layout, collective, f"{int(length):,}", f"{of['seconds']:.2f}", f"{of['steps']:,}"]
        cells += [f"{of['messages']:,}", f"{of['packets']:,}", share, f"{of['grown_mib'] + of['scratch_mib']:.0f}"]
        rows.append(cells)
    known, kept = (found[name]["grown_mib"] for name in ("peers", "described"))
    return markdown(columns, rows) + (
        f"\n\nAn engine that knows {PEERS:,} peers takes {known:.0f} MiB, and the descriptions of so many ranks, which "
        f"each group keeps, {kept:.0f} MiB."
    )


def fabric_table(found: Figures) -> str:
    """Times on the fabric, as Markdown: the mean of all ranks."""
    rows = []
    for hosts, _ in FABRICS:
        for length in FABRIC_LENGTHS:
            runs = [found["fabric"].get(f"{hosts} {length} {name}", {}) for name in FABRIC_PLANS]
            cells = [f"{run['mean_us']:.0f}" if "mean_us" in run else run.get("unfinished", "") for run in runs]
            rows.append([str(hosts), f"{length:,}", *cells])
    return markdown(["hosts", "bytes", "`auto`, us", "`direct`, us", "`deterministic`, us"], rows)


BENCHMARK = Benchmark(RESULTS, PAGE, lambda found: {"plans": plan_table(found), "fabric": fabric_table(found)})


def main() -> int:
    """0, or 2 if the simulator has not been built."""
    asked = options(__doc__, table=True).parse_args()
    if not (asked.table or PROGRAM.exists()):
        print(f"{PROGRAM} is missing: make build/test/fabric/simulate", file=sys.stderr)
        return 2
    return BENCHMARK.main(asked, WHOLE, lambda content, _: content.update(measure()))


if __name__ == "__main__":
    sys.exit(main())
