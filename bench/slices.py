"""Step time of a pipeline with few sequences, whole and in slices (`commlayer.pipeline.slices`).

    python -m bench.slices                everything (about 4 minutes; the links need root)
    python -m bench.slices --rounds 9     more rounds
    python -m bench.slices --slower 2     half the link rate, twice the times: half the CPU share
    python -m bench.slices --quick        one round; keeps nothing
    python -m bench.slices --table        only the table of the kept results

Four stages on four hosts, four sequences in four micro-batches. The accelerator is a sleep: a stage sleeps as long as
its slice has tokens, and twice as long in its backward pass, so attention's cost over earlier tokens is left out. The
messages are real. Each step checks that the losses are those of a first step on whole sequences.

Writes bench/results/slices.json and a table of docs/slices.md.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import commlayer
from bench.harness import turns
from bench.harness.driver import Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import ROOT, Accelerator, Log, in_turns, spread, step_s
from commlayer.scheduler.pipelines import breadth_first, one_f_one_b, sliced
from commlayer.scheduler.simulate import StageCosts, simulate
from commlayer.tools.bench import machine
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS, PAGE = ROOT / "bench/results/slices.json", ROOT / "docs/slices.md"

STAGES, MICROBATCHES, TOKENS, WIDTH = 4, 4, 64, 256
FORWARD_S = 0.16
"""The forward pass of a stage and a whole sequence."""
RATE_BPS = 1e9
WARM_UP_STEPS, STEPS, ROUNDS = 1, 2, 6

GPIPE, ONE_F_ONE_B = "GPipe", "1F1B"
SLICES = {"whole sequences": 1, "2 slices": 2, "4 slices": 4, "8 slices": 8}
WHOLE, OURS = "whole sequences", "4 slices"
TARGET = 1.38
"""The ratio of the step with whole sequences to that with 4 slices."""


class Stage(nn.Module):
    """A causal stage: each token's output has the mean of its past, and its computation is a sleep."""

    forward_s = 0.0
    """Seconds of a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.1))

    def forward(self, inputs: Tensor, past: tuple[Tensor, ...] | None = None) -> Any:
        seconds = Stage.forward_s * inputs.size(1) / TOKENS
        values: Tensor = Accelerator.apply(inputs * self.weight, seconds)  # type: ignore[no-untyped-call]
        known = torch.cat([*(past or ()), values], 1)
        counts = torch.arange(1, known.size(1) + 1).view(1, -1, 1)
        output = inputs + (known.cumsum(1) / counts)[:, -inputs.size(1) :]
        return output if past is None else (output, values)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(job: Log, _: Log) -> Log:
    """The log of one system on this rank."""
    order, _, name = job["system"].partition(", ")
    rank, slices = dist.get_rank(), SLICES[name]
    torch.manual_seed(0)
    data = torch.randn(2, MICROBATCHES, TOKENS, WIDTH)
    given: Any = ([data[0]] if rank == 0 else [], {"target": data[1]} if rank == STAGES - 1 else {})
    stage = PipelineStage(Stage(), rank, STAGES, torch.device("cpu"))
    kind = ScheduleGPipe if order == GPIPE else Schedule1F1B
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of)
    losses: list[list[Tensor]] = []

    def step() -> None:
        losses.append([])
        schedule.step(*given[0], **given[1], losses=losses[-1], return_outputs=False)
        stage.submod.zero_grad()

    Stage.forward_s = 0.0
    step()
    if slices > 1:
        commlayer.pipeline.slices(schedule, [TOKENS // slices] * slices)
        step()  # connects
    Stage.forward_s = job["forward_s"]
    log = turns.timed(step, WARM_UP_STEPS, STEPS, trace=False)
    for loss in losses:
        torch.testing.assert_close(loss, losses[0])
    return log


def measure(rounds: int, slower: float, *, short: bool) -> Log:
    """All systems, in turns. Raises BenchError if a rank failed."""
    scenario = Scenario(hosts=STAGES, nics=(Link(rate_bps=RATE_BPS / slower),))
    about = machine.facts()
    names = (WHOLE, OURS) if short else tuple(SLICES)
    jobs = [
        {"system": f"{order}, {name}", "forward_s": FORWARD_S * slower}
        for order in (GPIPE, ONE_F_ONE_B)
        for name in names
    ]
    runs = turns.measure(scenario, "bench.slices", {"jobs": in_turns(jobs, rounds)}, "slices")
    return {"schema": 1, "network": scenario.table, "runs": runs, "machine": about, "measured": today()}


def limit_s(order: str, slices: int, forward_s: float) -> float:
    """The step without any time for messages."""
    whole = breadth_first(STAGES, MICROBATCHES, 1) if order == GPIPE else one_f_one_b(STAGES, MICROBATCHES)
    cost = StageCosts(forward_s / slices, 2 * forward_s / slices)
    return simulate([sliced(actions, slices) for actions in whole], [cost] * STAGES).step_s


def table(content: Log) -> str:
    """The table of the page, as Markdown."""
    found = turns.by_system(content["runs"])
    columns = ["order", "sequences", "step (s)", "without messages (s)", "whole / it", "limit", "target", "CPU busy"]
    rows = []
    for system, logs in found.items():
        order, _, name = system.partition(", ")
        forward_s = logs[0]["job"]["forward_s"]
        whole_s = [step_s(log) for log in found[f"{order}, {WHOLE}"]]
        steps = [step_s(log) for log in logs]
        ratios = [one / other for one, other in zip(whole_s, steps, strict=True)]
        least_s = limit_s(order, SLICES[name], forward_s)
        cells = [order, name, spread(steps, 1, ".3f"), f"{least_s:.3f}"]
        cells += (
            ["", ""] if name == WHOLE else [spread(ratios, 1, ".3f"), f"{limit_s(order, 1, forward_s) / least_s:.2f}"]
        )
        is_reached = turns.verdict(statistics.median(ratios) >= TARGET, logs, found[f"{order}, {WHOLE}"])
        cells += [f"≥ {TARGET}: {is_reached}" if name == OURS else "", turns.busy_cell(logs)]
        rows.append(cells)
    forward_s = content["runs"][0]["job"]["forward_s"]
    rounds = max(len(logs) for logs in found.values())
    return markdown(columns, rows) + (
        f"\n\np = {STAGES} stages on hosts with links of {content['network']['nic'][0]['rate_bps'] / 1e6:g} Mbit/s, "
        f"{MICROBATCHES} sequences of {TOKENS} tokens and {WIDTH} values in float32, {forward_s * 1e3:g} ms forward "
        f"and {2 * forward_s * 1e3:g} ms backward per stage and sequence by sleeping. {turns.about_rounds(rounds)} "
        f"CPU: the largest share of any round, other processes included. {measured_on(content, 'slices')}"
    )


def main() -> int:
    """0; ends with 2 if a rank failed."""
    parsed = turns.parser(__doc__, ROUNDS).parse_args()
    return turns.main(parsed, Benchmark(RESULTS, PAGE, lambda found: {"slices": table(found)}), measure, train)


if __name__ == "__main__":
    sys.exit(main())
