"""Tokens to experts and back on emulated hosts: `commlayer.experts` beside a plain all-to-all, here and on gloo.

    python -m bench.experts                everything (about 6 minutes; the links need root)
    python -m bench.experts --rounds 9     more rounds
    python -m bench.experts --quick        one round; keeps nothing
    python -m bench.experts --table        only the table of the kept results

Four hosts of two ranks, links of 100 Mbit/s. Each token goes to 8 of 64 experts and back; the experts return what they
get, so that a step is the exchange alone. A plain all-to-all sends a row for each pair of a token and an expert, as
megatron-core's dispatcher does, sorted by expert, with the numbers of rows before it.

Routing is uniform (8 different experts at random) or skewed (drawn by Zipf's law of exponent 1, without replacement).
Every step checks its result. Bytes are those that a host's interface has sent, headers included.

Writes bench/results/experts.json and a table of docs/experts.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commlayer
from bench.harness import turns
from bench.harness.driver import Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import ROOT, Log, in_turns, spread
from commlayer.tools.bench import machine
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS, PAGE = ROOT / "bench/results/experts.json", ROOT / "docs/experts.md"
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

EXPERTS, K, TOKENS, WIDTH = 64, 8, 64, 1024
WARM_UP_STEPS, STEPS, ROUNDS = 1, 3, 5
RATE_BPS = 100e6

GLOO, PLAIN, ONCE, INT8 = "gloo, all-to-all", "commlayer, all-to-all", "experts", "experts, int8 dispatch"
UNIFORM, SKEWED = "uniform", "skewed"


def routing(name: str, rank: int, step: int) -> Tensor:
    """The experts of each token of a rank: (TOKENS, K), all different."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    share = torch.ones(EXPERTS) if name == UNIFORM else 1.0 / torch.arange(1.0, EXPERTS + 1)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(7))  # which experts are popular
    return order[torch.multinomial(share.expand(TOKENS, -1), K, generator=drawn)]


def plain(tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A row for each pair of a token and an expert there and back, weighted at home."""
    size, flat = dist.get_world_size(), ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    per_expert = torch.bincount(flat, minlength=EXPERTS)
    theirs = torch.empty_like(per_expert)
    dist.all_to_all_single(theirs, per_expert)
    sent, received = (counts.view(size, -1).sum(1).tolist() for counts in (per_expert, theirs))
    arrived = tokens.new_empty(sum(received), WIDTH)
    dist.all_to_all_single(arrived, tokens[order // K], received, sent)
    returned = tokens.new_empty(sum(sent), WIDTH)
    dist.all_to_all_single(returned, arrived, sent, received)
    weighted = returned.float() * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros(tokens.shape).index_add(0, order // K, weighted).to(tokens.dtype)


def once(tokens: Tensor, ids: Tensor, weights: Tensor, policy: commlayer.Policy) -> Tensor:
    """The same by `commlayer.experts`."""
    sent = commlayer.experts.dispatch(tokens, ids, weights, EXPERTS, policy=policy)
    return commlayer.experts.combine(sent.rows, sent)


def exchange_of(system: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if system in (GLOO, PLAIN):
        return plain
    policy = commlayer.Policy(codec="int8") if system == INT8 else commlayer.Policy()
    return lambda tokens, ids, weights: once(tokens, ids, weights, policy)


def run_job(job: Log, _: Log) -> Log:
    """Steps of one system: their seconds, and the bytes that this rank's host has sent in one."""
    rank, exchange = dist.get_rank(), exchange_of(job["system"])
    tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
    weights = torch.full((TOKENS, K), 1 / K)
    seconds, start_bytes, start_cpu = [], 0, CpuTime.now()
    for step in range(WARM_UP_STEPS + STEPS):
        ids = routing(job["routing"], rank, step)
        dist.barrier()
        if step == WARM_UP_STEPS:
            start_bytes, start_cpu = int(SENT.read_text()), CpuTime.now()
        begin = time.perf_counter()
        found = exchange(tokens, ids, weights)
        dist.barrier()  # a step ends when it has ended on all ranks
        seconds.append(time.perf_counter() - begin)
        error = ((found - tokens).float().norm() / tokens.float().norm()).item()
        if error > (0.01 if job["system"] == INT8 else 0.005):
            raise RuntimeError(f"{job}: the result has an error of {error:.3f}")
    kept = seconds[WARM_UP_STEPS:]
    sent = (int(SENT.read_text()) - start_bytes) / STEPS
    return {"step_s": kept, "sent_bytes": sent, **turns.busy(CpuTime.now() - start_cpu, sum(kept))}


def measure(rounds: int, slower: float, *, short: bool) -> dict[str, Any]:
    """All systems and routings, in turns. Raises BenchError if a rank failed."""
    scenario = Scenario(hosts=4, nics=(Link(rate_bps=RATE_BPS / slower),), ranks_per_host=2)
    about = machine.facts()
    routings = (UNIFORM,) if short else (UNIFORM, SKEWED)
    jobs = [{"system": system, "routing": name} for name in routings for system in (GLOO, PLAIN, ONCE, INT8)]
    runs = turns.measure(scenario, "bench.experts", {"jobs": in_turns(jobs, rounds)}, "experts")
    return {"schema": 1, "network": scenario.table, "runs": runs, "machine": about, "measured": today()}


def table(content: dict[str, Any]) -> str:
    runs: list[Log] = content["runs"]
    rows = []
    for name in (UNIFORM, SKEWED):
        found = turns.by_system([log for log in runs if log["job"]["routing"] == name])
        if not found:
            continue
        bytes_of = {system: statistics.median(log["sent_bytes"] for log in logs) for system, logs in found.items()}
        for system, logs in found.items():
            steps = [turns.step_s(log) for log in logs]
            cells = [name, system, f"{bytes_of[system] / 1e3:,.0f}", f"{bytes_of[PLAIN] / bytes_of[system]:.2f}x"]
            cells.append(spread(steps, 1e3, ".0f"))
            for other in (PLAIN, GLOO):
                ratios = [turns.step_s(log) / step for log, step in zip(found[other], steps, strict=True)]
                cells.append("" if other == system else spread(ratios, 1, ".2f"))
            rows.append([*cells, f"{max(log['busy'] for log in logs):.0%}"])
    columns = ["routing", "system", "KB sent by a host", "fewer", "exchange (ms)", "commlayer's all-to-all / it"]
    columns += ["gloo's / it", "CPU busy"]
    rate_bps = content["network"]["nic"][0]["rate_bps"]
    rounds = len({id(log) for log in runs if log["job"] == runs[0]["job"]})
    return markdown(columns, rows) + (
        f"\n\nA step sends {TOKENS} tokens of each rank, {WIDTH} values in bfloat16, to {K} of {EXPERTS} experts and "
        f"back, between 4 hosts of 2 ranks with links of {rate_bps / 1e6:g} Mbit/s. Bytes: of host 0, with headers. "
        f"{turns.about_rounds(rounds)} CPU: the largest share of any round, other processes included; all ranks share "
        f"these processors, so exchange times include the waits for them. {measured_on(content, 'experts')}"
    )


def main() -> int:
    """0; ends with 2 if a rank failed."""
    parsed = turns.parser(__doc__, ROUNDS).parse_args()
    benchmark = Benchmark(RESULTS, PAGE, lambda found: {"experts": table(found)})
    return turns.main(
        parsed, benchmark, measure, run_job, backend=lambda job: "gloo" if job["system"] == GLOO else "commlayer"
    )


if __name__ == "__main__":
    sys.exit(main())
