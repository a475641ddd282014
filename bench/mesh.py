"""Step time of 3-D tensor parallelism beside 1-D and FSDP, on links that are much slower than the computation.

    python -m bench.mesh                     everything (about 6 minutes; the links need root)
    python -m bench.mesh --rounds 6          more rounds
    python -m bench.mesh --slower 2          half the link rate: half the CPU share
    python -m bench.mesh --quick             one round of few steps; keeps nothing
    python -m bench.mesh --table             only the table of the kept results

Eight emulated hosts train one layer of a transformer, without its attention: its four linear layers, in float32. The
bytes of docs/parallelism.md say that 3-D wins only between h and 7 h tokens a step, and by 1.5 at most, at 4.5 h. So
the rows are h / 2, 4.5 h and 15 h tokens; at the first and the last one 3-D should be slower than the better of the
others.

- 1-D: parallelize_module, of DTensor.
- FSDP: fully_shard, which gathers the weights again in the backward pass. Each rank has an eighth of the tokens.
- 3-D: commlayer.tp.mesh, which keeps what it has gathered.

Writes bench/results/mesh.json and the table of docs/parallelism.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commlayer
from bench.harness import turns
from bench.harness.driver import Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import ROOT, Log, busy_cell, in_turns, slowed, spread, step_s, verdict
from commlayer.planner import Layout, Mesh, Transformer
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/mesh.json"
PAGE = ROOT / "docs/parallelism.md"

HOSTS, WIDTH = 8, 128
RATE_BPS = 20e6
WARM_UP_STEPS, STEPS, ROUNDS = 1, 2, 3

ONE, SHARDED, THREE = "1-D", "FSDP", "3-D"
SYSTEMS = (ONE, SHARDED, THREE)
TOKENS = {"h / 2": WIDTH // 2, "4.5 h": WIDTH * 9 // 2, "15 h": WIDTH * 15}
AT, TARGET, LIMIT = "4.5 h", 1.35, 1.5
"""The row in which the better of the others takes at least TARGET times the step of 3-D; LIMIT is that of the bytes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one system."""

    system: str
    tokens: str
    steps: int = STEPS


# ---- model ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The linear layers of a transformer layer. Three neighbours, as query, key and value, are added up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.qkv(x).unflatten(-1, (-1, 3)).sum(-1))
        return x + torch.as_tensor(self.down(torch.relu(self.up(x))))


def model(system: str, width: int) -> Layer:
    """The layer of one system; equal weights on all ranks."""
    torch.manual_seed(1)
    layer = Layer(width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if system == ONE:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        parallelize_module(layer, mesh, {"qkv": columns, "project": rows, "up": columns, "down": rows})
    elif system == SHARDED:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    else:
        for place, (name, linear) in enumerate(list(layer.named_children())):
            setattr(layer, name, commlayer.tp.mesh(linear, "3d", swapped=place % 2 == 1))  # type: ignore[arg-type]
    return layer


def part_of(system: str, layer: Any, x: Tensor) -> Tensor:
    """The rows and columns of the input that this rank has."""
    if system == ONE:
        return x
    return layer.qkv.split(x) if system == THREE else x.chunk(dist.get_world_size())[dist.get_rank()]


def received_bytes(system: str, tokens: int, width: int = WIDTH, ranks: int = HOSTS) -> int:
    """Bytes that a rank receives in a step, by the planner's formula."""
    shape = Transformer(1, width, 1, length=1, sequences=tokens, value_bytes=4)
    if system == ONE:
        return Layout(Mesh.of("1-D", ranks), batch=tokens).received_bytes(shape)
    if system == THREE:
        return Layout(Mesh.of("3-D", ranks), batch=tokens).received_bytes(shape)
    return Layout(replicas=ranks, is_sharded=True, kept=False, batch=tokens // ranks).received_bytes(shape)


# ---- on each rank ---------------------------------------------------------------------------------------------------


def train(job: Job) -> Log:
    """Seconds of each step, and the busy share of the machine's CPU."""
    layer = model(job.system, WIDTH)
    inputs = part_of(job.system, layer, torch.randn(TOKENS[job.tokens], WIDTH)).contiguous()

    def step() -> None:
        layer.zero_grad()
        layer(inputs.clone().requires_grad_()).square().mean().backward()

    log = turns.timed(step, WARM_UP_STEPS, job.steps, trace=False)
    dist.barrier()
    return log


# ---- measurement and table ------------------------------------------------------------------------------------------


def network(slower: float) -> Scenario:
    """The hosts' network."""
    base = Scenario.read("overlap")
    nics = tuple(dataclasses.replace(nic, rate_bps=RATE_BPS) for nic in base.nics[:1])
    return slowed(dataclasses.replace(base, hosts=HOSTS, nics=nics), slower)


def measure(rounds: int, slower: float, *, short: bool) -> dict[str, Any]:
    """All systems. Raises BenchError if a rank failed."""
    scenario, about = network(slower), machine.facts()
    jobs = [Job(system, tokens, 1 if short else STEPS) for tokens in TOKENS for system in SYSTEMS]
    request = {"jobs": [dataclasses.asdict(job) for job in in_turns(jobs, rounds)]}
    return {
        "schema": 1,
        "network": scenario.table,
        "runs": turns.measure(scenario, "bench.mesh", request, "mesh"),
        "machine": about,
        "measured": today(),
    }


def table(content: dict[str, Any]) -> str:
    """The table, as Markdown."""
    found: dict[tuple[str, str], list[Log]] = {}
    for log in content["runs"]:
        found.setdefault((log["job"]["tokens"], log["job"]["system"]), []).append(log)
    columns = ["tokens", *(f"{system} (ms)" for system in SYSTEMS), "CPU busy", "better / 3-D", "of bytes", "to show"]
    columns.append("shown")
    rows = []
    for tokens, count in TOKENS.items():
        logs = [found[tokens, system] for system in SYSTEMS]
        ratios = [min(step_s(one), step_s(sharded)) / step_s(three) for one, sharded, three in zip(*logs, strict=True)]
        of_bytes = min(received_bytes(system, count) for system in SYSTEMS[:2]) / received_bytes(THREE, count)
        middle = statistics.median(ratios)
        is_at = tokens == AT
        wanted = f"≥ {TARGET:.2f} (limit {LIMIT:.2f})" if is_at else "below 1"
        cells = [
            tokens,
            *(spread([step_s(log) for log in runs], 1e3, ".0f") for runs in logs),
            busy_cell([log for runs in logs for log in runs]),
            spread(ratios, 1, ".2f"),
            f"{of_bytes:.2f}",
            wanted,
            verdict(middle >= TARGET if is_at else middle < 1, *logs),
        ]
        rows.append(cells)
    rounds = len(found[AT, THREE])
    text = (
        f"h = {WIDTH}, float32, one layer without attention. Better: the faster one of 1-D and FSDP. Of bytes: the "
        f"same ratio by the formulas above. Links as in: {Scenario.from_table(content['network'])}. "
        f"{turns.about_rounds(rounds)} CPU: the largest share of any round. {measured_on(content, 'mesh')}"
    )
    return f"{markdown(columns, rows)}\n\n{text}"


def main() -> int:
    """0; ends with 2 if a run failed."""
    parsed = turns.parser(__doc__, ROUNDS).parse_args()
    benchmark = Benchmark(RESULTS, PAGE, lambda found: {"mesh": table(found)})
    return turns.main(parsed, benchmark, measure, lambda job, _: train(Job(**job)))


if __name__ == "__main__":
    sys.exit(main())
