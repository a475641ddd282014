"""Shares by speed, the pause when a process joins, and that after a death: `commlayer.elastic`.

    python -m bench.elastic shares
    python -m bench.elastic join --megabytes 100
    python -m bench.elastic join --mbit 100 --trained 0.02    each process a host, in namespaces of its own (root)
    python -m bench.elastic join --shards 2                   a row of two joins two such rows; each has the state
    python -m bench.elastic kill                              beside torchrun's restart
    python -m bench.elastic kill --mbit 1000
    python -m bench.elastic codec --mbit 200 --megabytes 24   8 MB of gradients, in bf16 and as they are
    python -m bench.elastic overlap --mbit 200 --compute 0.6  8 MB of gradients, beside DDP on the same backend

Computation is a sleep, so that the processes share no core for it. Prints its figures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.options import options
from bench.jobs.data_parallel import Layer
from commlayer.frontend.group.parts import part_of, whole_of
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks

SAMPLE_S = 0.002
SLOWNESS = (1, 1, 1, 2)
BATCH = 56
STEPS = 60
SETTLED = 20
"""Steps after which the shares have changed."""


def shares(rank: int, size: int, by_speed: bool) -> tuple[float, list[int]]:
    """Seconds per step once the shares are settled, and the shares."""
    ranks.init(rank, size)
    parameter = nn.Parameter(torch.zeros(1000))
    model = nn.Module()
    model.weight = parameter
    with commlayer.elastic(model, torch.optim.SGD([parameter], lr=0.1)) as job:
        sampler = job.sampler(range(BATCH * STEPS), BATCH, by_speed=by_speed)
        for share in sampler:
            if job.steps == SETTLED:
                begin_s = time.perf_counter()
            time.sleep(len(share) * SAMPLE_S * SLOWNESS[rank])
            (parameter.sum() * len(share)).backward()
            job.step()
        step_s = (time.perf_counter() - begin_s) / (STEPS - SETTLED)
        return step_s, list(sampler.shares.values())


def _store(rank: int) -> Any:
    """The Store of the job: in a network, that of host 0."""
    if address := os.environ.get("MASTER_ADDR"):
        return dist.TCPStore(address, int(os.environ["MASTER_PORT"]), None, rank == 0, wait_for_workers=False)
    return ranks.store()


@contextlib.contextmanager
def _hosts(size: int, mbit: float) -> Iterator[dict[str, Any]]:
    """Options of `ranks.outcomes` for processes that are hosts with links of this rate; 0: one host."""
    if not mbit:
        yield {}
        return
    with Network(Scenario(hosts=size, nics=(Link(rate_bps=mbit * 1e6),))) as network:
        yield {"environ": network.rendezvous(), "places": [network.name(host) for host in range(size)]}


def join(
    rank: int, size: int, shards: int, megabytes: float, trained: float, compute_s: float, steps: int
) -> dict[str, Any]:
    """The times of the steps; of those that join (the last rank, or row), when they asked and when they were ready."""
    joins = rank >= size - shards
    values = megabytes * 1e6 / 4
    parameter = nn.Parameter(torch.zeros(int(values * trained / 3)))  # AdamW has two more values for each
    model = nn.Module()
    model.weight = parameter
    model.frozen = nn.Parameter(torch.zeros(int(values * (1 - trained))), requires_grad=False)
    store = _store(rank)
    found: dict[str, Any] = {"steps": []}
    if not joins:
        ranks.init(rank, size - shards, store=store, timeout=timedelta(seconds=120))
    elif shards > 1:
        ranks.init(rank % shards, shards, store=dist.PrefixStore("row", store), timeout=timedelta(seconds=120))
    if shards > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("rows", "shards"))
        fully_shard(model, mesh=mesh["shards"])
        parameter = model.weight
    optimizer = torch.optim.AdamW([parameter])
    if joins:
        store.wait(["asks"])
        found["asked"] = time.time()
    gradient = whole_of(torch.randn(part_of(parameter).shape), parameter)
    with commlayer.elastic(model, optimizer, join=store if joins else None) as job:
        sampler = job.sampler(range(12 * steps), 12, by_speed=False)
        found["ready"] = time.time()
        for _ in sampler:
            begin_s = time.time()
            time.sleep(compute_s)
            parameter.grad = gradient.clone()
            job.step()
            found["steps"].append((begin_s, time.time(), len(job.members), len(sampler.shares)))
            if job.steps == 8:
                store.set("asks", "")
            if len(sampler.shares) == size and not store.check(["end"]):
                store.set("end", str(job.steps + 6))
            if store.check(["end"]) and job.steps >= int(store.get("end")):
                break
    found["sum"] = float(part_of(parameter).detach().double().sum())
    return found


def report_join(shards: int, megabytes: float, trained: float, mbit: float, compute_s: float, steps: int) -> None:
    size = 4 if shards == 1 else 3 * shards
    before = size - shards
    with _hosts(size, mbit) as where:
        outcomes = ranks.outcomes(join, size, shards, megabytes, trained, compute_s, steps, timeout_s=300, **where)
    results = ranks.results(outcomes, ())
    first, joiner = results[0], results[-1]
    alone = [end - begin for begin, end, members, _ in first["steps"][2:] if members == before]
    pause = max(end - begin for begin, end, members, _ in first["steps"] if members >= before)
    regrouping = next(
        end - begin for (begin, end, members, _) in first["steps"] if members == size
    )  # the step at whose end they met
    listening = [end - begin for begin, end, members, sharing in first["steps"] if (members, sharing) == (size, before)]
    both = [end - begin for begin, end, _, sharing in first["steps"] if sharing == size]
    usual_s = statistics.median(alone[:-1])
    whose = f" of a row of {shards}" if shards > 1 else ""
    print(
        f"state {megabytes:g} MB{whose}, {trained:.0%} of it trained, {_place(mbit)}, {compute_s:g} s of computation: "
        f"step before {usual_s:.3f} s; the step with the regrouping took {regrouping - usual_s:.3f} s more; "
        f"while it listened ({len(listening) - 1} steps): median {statistics.median(listening[1:] or [0]):.3f} s; "
        f"afterwards {statistics.median(both[1:]):.3f} s; longest step {pause:.3f} s; "
        f"joiner ready {joiner['ready'] - joiner['asked']:.2f} s after it asked; equal: "
        f"{len({(rank % shards, result['sum']) for rank, result in enumerate(results)}) == shards}"
    )


def _place(mbit: float) -> str:
    return f"hosts with {mbit:g} Mbit/s" if mbit else "one host"


# ---- a codec ----


def step(rank: int, size: int, codec: str, megabytes: float, compute_s: float) -> float:
    """Seconds of a step, the median of 20."""
    ranks.init(rank, size, store=_store(rank))
    parameter = nn.Parameter(torch.zeros(int(megabytes * 1e6 / 12)))
    model = nn.Module()
    model.weight = parameter
    times_s, gradient = [], torch.randn(parameter.shape)
    with commlayer.elastic(model, torch.optim.AdamW([parameter]), codec=codec) as job:
        for _ in job.batches(range(22)):
            begin_s = time.perf_counter()
            time.sleep(compute_s)
            parameter.grad = gradient.clone()
            job.step()
            times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[2:])


def report_codec(mbit: float, megabytes: float, compute_s: float, rounds: int) -> None:
    found: dict[str, list[float]] = {"none": [], "bf16": []}
    for _ in range(rounds):
        for codec, times_s in found.items():
            with _hosts(4, mbit) as where:
                found_s = ranks.run(step, 4, codec, megabytes, compute_s, timeout_s=300, **where)
            times_s.append(max(found_s) - compute_s)
    ratios = [one / other for one, other in zip(*found.values(), strict=True)]
    print(
        f"{megabytes / 3:g} MB of gradients, {_place(mbit)}, without the {compute_s:g} s of computation: none "
        f"{statistics.median(found['none']):.3f} s, bf16 {statistics.median(found['bf16']):.3f} s: "
        f"{statistics.median(ratios):.2f}x (median of {rounds}; {min(ratios):.2f} to {max(ratios):.2f}; limit 2)"
    )


# ---- overlap ----

LAYERS, WIDTH = 8, 512
DDP = "DDP"
LATE = "elastic(overlap=False)"
EARLY = "elastic"


def layered(rank: int, size: int, system: str, compute_s: float) -> float:
    """Seconds of a step of a model of several layers, the median of 10."""
    ranks.init(rank, size, store=_store(rank))
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(Layer(WIDTH, compute_s / 3 / LAYERS) for _ in range(LAYERS)))
    if system == DDP:
        model = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = None if system == DDP else commlayer.elastic(model, optimizer, overlap=system == EARLY)
    times_s = []
    with job or contextlib.nullcontext():
        for _ in range(14) if job is None else job.batches(range(14)):
            begin_s = time.perf_counter()
            model(torch.ones(2, WIDTH)).sum().backward()
            if job is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                job.step()
            times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[4:])


def report_overlap(mbit: float, compute_s: float, rounds: int) -> None:
    found: dict[str, list[float]] = {DDP: [], LATE: [], EARLY: []}
    for _ in range(rounds):
        for system, times_s in found.items():
            with _hosts(4, mbit) as where:
                times_s.append(max(ranks.run(layered, 4, system, compute_s, timeout_s=300, **where)))
    print(f"{LAYERS * WIDTH * WIDTH * 4 / 1e6:.1f} MB of gradients, {_place(mbit)}, {compute_s:g} s of computation:")
    for system, times_s in found.items():
        ratios = [own / ddp for own, ddp in zip(times_s, found[DDP], strict=True)]
        print(
            f"{system}: {statistics.median(times_s):.3f} s per step, {statistics.median(ratios):.2f} times {DDP} "
            f"(median of {rounds}; {min(ratios):.2f} to {max(ratios):.2f})"
        )


# ---- a death ----


def kill(rank: int, size: int, compute_s: float, steps: int) -> tuple[float, list[float]]:
    """The last rank dies after half of the steps. When it died, and when each step was made here."""
    store = _store(rank)
    ranks.init(rank, size, store=store)
    model = nn.Linear(1000, 1000)
    made = []
    with commlayer.elastic(model, torch.optim.AdamW(model.parameters())) as job:
        for _ in job.batches(range(steps)):
            time.sleep(compute_s)
            model(torch.ones(1, 1000)).sum().backward()
            if job.steps == steps // 2 and rank == size - 1:
                store.set("died", str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            job.step()
            made.append(time.time())
    return float(store.get("died")), made


JOB = Path(__file__).parent / "jobs" / "restarted.py"


def restart_s(size: int, compute_s: float, steps: int) -> float:
    """Seconds from the death to the end of the next step of all ranks, restarted by torchrun on one host."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += ["--max-restarts=1", "--monitor-interval=0.1", str(JOB)]
        environ = ranks.script_environ(OMP_NUM_THREADS="1")
        given = [name, str(steps), str(compute_s)]
        subprocess.run([*command, *given], env=environ, capture_output=True, timeout=300, check=True)
        made = [float((folder / f"made {rank}").read_text()) for rank in range(size)]
        return max(made) - float((folder / "died").read_text())


def report_kill(mbit: float, compute_s: float, steps: int, rounds: int) -> None:
    size, found = 4, dict[str, list[float]](elastic=[], torchrun=[])
    timeout_s = commlayer.Config().peer_timeout_s if mbit else 0.0
    for _ in range(rounds):
        with _hosts(size, mbit) as where:
            ended = ranks.outcomes(kill, size, compute_s, steps, timeout_s=300, **where)
        living = ranks.results(ended, {size - 1})[:-1]
        died, _ = living[0]
        found["elastic"].append(max(min(at for at in made if at > died) for _, made in living) - died)
        if not mbit:
            found["torchrun"].append(restart_s(size, compute_s, steps))
    for name, times_s in found.items():
        if times_s:
            print(
                f"{name}, {_place(mbit)}, {compute_s:g} s of computation, one of {size} killed: next step "
                f"{statistics.median(times_s) - timeout_s:.2f} s after {'the peer timeout' if mbit else 'the death'} "
                f"(median of {len(times_s)}; {min(times_s) - timeout_s:.2f} to {max(times_s) - timeout_s:.2f})"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("case", choices=["shares", "join", "kill", "codec", "overlap"])
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the state")
    parser.add_argument("--trained", type=float, default=1.0, help="share of the state that is trained")
    parser.add_argument("--mbit", type=float, default=0.0, help="rate of each link; 0: one host")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of computation in a step")
    parser.add_argument("--steps", type=int, default=200, help="most steps")
    parser.add_argument("--shards", type=int, default=1, help="ranks of a row, over which FSDP2 shards the state")
    given = parser.parse_args(arguments)
    if given.case == "join":
        report_join(given.shards, given.megabytes, given.trained, given.mbit, given.compute, given.steps)
        return
    if given.case == "codec":
        report_codec(given.mbit, given.megabytes, given.compute, given.rounds)
        return
    if given.case == "overlap":
        report_overlap(given.mbit, given.compute, given.rounds)
        return
    if given.case == "kill":
        report_kill(given.mbit, 0.05, 40, given.rounds)
        return
    equal, by_speed = (ranks.run(shares, len(SLOWNESS), is_by_speed) for is_by_speed in (False, True))
    slowest = [max(step_s for step_s, _ in times) for times in (equal, by_speed)]
    print(
        f"speeds 1, 1, 1, 1/2; batch {BATCH}: equal shares {slowest[0]:.4f} s per step; shares {by_speed[0][1]} "
        f"{slowest[1]:.4f} s: {slowest[0] / slowest[1]:.2f}x (limit 1.75)"
    )


if __name__ == "__main__":
    main()
