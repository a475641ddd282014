"""Shares by speed, and the pause when a process joins: `commlayer.elastic` on this host.

    python -m bench.elastic shares
    python -m bench.elastic join --megabytes 100
    python -m bench.elastic join --megabytes 10 --mbit 10     each process a host, in namespaces of its own (root)

Computation is a sleep, so that the processes share no core for it. Prints its figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import commlayer
from bench.harness.options import options
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


def join(rank: int, size: int, megabytes: float, compute_s: float, steps: int) -> dict[str, Any]:
    """The times of the steps; of the joiner (the last rank), when it asked and when it was ready."""
    joins = rank == size - 1
    parameter = nn.Parameter(torch.zeros(int(megabytes * 1e6 / 12)))  # AdamW has two more values for each
    model = nn.Module()
    model.weight = parameter
    optimizer = torch.optim.AdamW([parameter])
    store: Any = ranks.store()
    found: dict[str, Any] = {"steps": []}
    if joins:
        store.wait(["asks"])
        found["asked"] = time.time()
    else:
        ranks.init(rank, size - 1, timeout=timedelta(seconds=120))
    gradient = torch.randn(parameter.shape)
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
    found["sum"] = float(parameter.detach().double().sum())
    return found


def report_join(megabytes: float, mbit: float, compute_s: float, steps: int) -> None:
    size = 4
    if mbit:
        with Network(Scenario(hosts=size, nics=(Link(rate_bps=mbit * 1e6),))) as network:
            places = [network.name(host) for host in range(size)]
            outcomes = ranks.outcomes(
                join, size, megabytes, compute_s, steps, timeout_s=300, environ=network.rendezvous(), places=places
            )
    else:
        outcomes = ranks.outcomes(join, size, megabytes, compute_s, steps, timeout_s=300)
    errors = [each.error for each in outcomes if each.error]
    if errors:
        raise SystemExit("\n".join(errors))
    first, joiner = outcomes[0].result, outcomes[-1].result
    alone = [end - begin for begin, end, members, _ in first["steps"][2:] if members == size - 1]
    pause = max(end - begin for begin, end, members, _ in first["steps"] if members >= size - 1)
    regrouping = next(
        end - begin for (begin, end, members, _) in first["steps"] if members == size
    )  # the step at whose end they met
    listening = [
        end - begin for begin, end, members, sharing in first["steps"] if (members, sharing) == (size, size - 1)
    ]
    both = [end - begin for begin, end, _, sharing in first["steps"] if sharing == size]
    usual_s = statistics.median(alone[:-1])
    print(
        f"state {megabytes:g} MB, {f'{mbit:g} Mbit/s' if mbit else 'one host'}, {compute_s:g} s of computation: "
        f"step before {usual_s:.3f} s; the step with the regrouping took {regrouping - usual_s:.3f} s more; "
        f"while it listened ({len(listening) - 1} steps): median {statistics.median(listening[1:] or [0]):.3f} s; "
        f"afterwards {statistics.median(both[1:]):.3f} s; longest step {pause:.3f} s; "
        f"joiner ready {joiner['ready'] - joiner['asked']:.2f} s after it asked; equal: "
        f"{len({each.result['sum'] for each in outcomes}) == 1}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("case", choices=["shares", "join"])
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the state")
    parser.add_argument("--mbit", type=float, default=0.0, help="rate of each link; 0: one host")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of computation in a step")
    parser.add_argument("--steps", type=int, default=200, help="most steps")
    given = parser.parse_args(arguments)
    if given.case == "join":
        report_join(given.megabytes, given.mbit, given.compute, given.steps)
        return
    equal, by_speed = (ranks.run(shares, len(SLOWNESS), each) for each in (False, True))
    slowest = [max(step_s for step_s, _ in each) for each in (equal, by_speed)]
    print(
        f"speeds 1, 1, 1, 1/2; batch {BATCH}: equal shares {slowest[0]:.4f} s per step; shares {by_speed[0][1]} "
        f"{slowest[1]:.4f} s: {slowest[0] / slowest[1]:.2f}x (limit 1.75)"
    )


if __name__ == "__main__":
    main()
