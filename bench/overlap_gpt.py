"""Step time of a small GPT when gradients travel during the next forward pass, by codec.

    python -m bench.overlap_gpt              everything (about 5 minutes; the links need root)
    python -m bench.overlap_gpt --quick      one round of few steps, one codec; keeps nothing
    python -m bench.overlap_gpt --table      only the table and the picture of the kept results

Four hosts with 100 Mbit/s train the byte-level GPT of bench/jobs/training.py. For each codec, DDP with commlayer's hook
and `commlayer.overlap` run in turns. Computation is real, and the ranks share the cores of this machine.
Communication is the time that the bytes sent in a step take at the link's rate. Writes
bench/results/overlap_gpt.json, the table of docs/overlap.md and docs/overlap_gpt.png.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.harness import turns
from bench.harness.bars import Bar, draw
from bench.harness.driver import WHOLE, Benchmark, Content
from bench.harness.options import options
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import LOGS, PAGE, ROOT, interval, slowed
from bench.jobs.training import WARM_UP_STEPS, Job, Log, measure_all
from bench.overlap import SCENARIO
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

RESULTS = ROOT / "bench/results/overlap_gpt.json"
PICTURE = ROOT / "docs/overlap_gpt.png"
CODECS = ("none", "bf16", "int8", "int4-int8")
ROUNDS, STEPS = 5, 14
MODEL: dict[str, Any] = {"width": 128, "layers": 5, "batch": 2}
BUCKET_MB = 0.7
"""Seven buckets."""
SLACK = 1.05
"""Target: this much of the longer one of computation and communication, and a bucket."""


def jobs_of(codecs: Sequence[str], rounds: int, steps: int) -> list[Job]:
    """Both forms of each codec in every round; each round begins with the other form."""
    jobs = []
    for number in range(rounds):
        for codec in codecs:
            pair = [
                Job(codec, policy={"codec": codec}, overlap=overlap, bucket_mb=BUCKET_MB, steps=steps, **MODEL)
                for overlap in (False, True)
            ]
            jobs += pair if number % 2 == 0 else pair[::-1]
    return jobs


def step_s(log: Log) -> float:
    """Median step."""
    return float(statistics.median(log["step_s"][WARM_UP_STEPS:]))


@dataclasses.dataclass(frozen=True)
class Row:
    """The runs of one codec, by round."""

    plain: list[Log]
    overlapped: list[Log]

    @property
    def ratios(self) -> list[float]:
        """DDP's step over ours."""
        return [step_s(one) / step_s(other) for one, other in zip(self.plain, self.overlapped, strict=True)]

    @property
    def computing_s(self) -> float:
        """Forward, backward and update of a step."""
        return float(statistics.median(log["forward_s"] + log["backward_s"] + log["update_s"] for log in self.plain))

    def communication_s(self, rate_gb_s: float) -> float:
        """The bytes of a step at this rate."""
        sent = statistics.median(byte for log in self.plain for byte in log["sent_bytes"][WARM_UP_STEPS:])
        return float(sent / (rate_gb_s * 1e9))

    def target_s(self, rate_gb_s: float) -> float:
        """The step to reach."""
        communication_s = self.communication_s(rate_gb_s)
        values = self.plain[0]["parameters"]
        buckets = max(1.0, 4 * values / (BUCKET_MB * (1 << 20)))
        return float(SLACK * max(self.computing_s, communication_s) + communication_s / buckets)


def rows(runs: Sequence[Log]) -> dict[str, Row]:
    """One row per codec."""
    found: dict[str, Row] = {}
    for log in runs:
        row = found.setdefault(log["job"]["system"], Row([], []))
        (row.overlapped if log["job"]["overlap"] else row.plain).append(log)
    return found


def table(content: dict[str, Any]) -> str:
    """The page's table, as Markdown: only from the results."""
    network = Scenario.from_table(content["network"])
    rate = network.payload_gb_s
    assert rate is not None
    columns = ["codec", "computing (ms)", "communication (ms)", "DDP (ms)", "overlap (ms)", "DDP / overlap"]
    columns += ["at most (ms)", "reached"]
    found = []
    for codec, row in rows(content["runs"]).items():
        ours = statistics.median(map(step_s, row.overlapped))
        low, high = interval(row.ratios)
        cells = [
            f"`{codec}`",
            f"{row.computing_s * 1e3:.0f}",
            f"{row.communication_s(rate) * 1e3:.0f}",
            f"{statistics.median(map(step_s, row.plain)) * 1e3:.0f}",
            f"{ours * 1e3:.0f}",
            f"{statistics.median(row.ratios):.2f} ({low:.2f} to {high:.2f})",
            f"{row.target_s(rate) * 1e3:.0f}",
            "yes" if ours <= row.target_s(rate) else "**no**",
        ]
        found.append(cells)
    log, count = content["runs"][0], len(next(iter(rows(content["runs"]).values())).plain)
    conditions = (
        f"{log['parameters']:,} parameters, {log['ranks']} ranks, buckets of {BUCKET_MB:g} MB. Network: {network}. "
        f"{turns.about_rounds(count)} Target: {SLACK:g} x the longer one of computing and communication, and a bucket. "
        f"{measured_on(content, 'overlap_gpt')}"
    )
    return f"{markdown(columns, found)}\n\n{conditions}"


def picture(content: dict[str, Any]) -> None:
    """Draws the steps, beside the target."""
    rate = Scenario.from_table(content["network"]).payload_gb_s
    assert rate is not None
    bars = []
    for codec, row in rows(content["runs"]).items():
        bars.append(Bar.of(f"{codec}, DDP", [*map(step_s, row.plain)]))
        bars.append(
            Bar.of(f"{codec}, overlap", [*map(step_s, row.overlapped)], limit_s=row.target_s(rate), is_ours=True)
        )
    draw({"a small GPT on CPUs, by codec; beside the target": bars}, PICTURE, limit="target")


BENCHMARK = Benchmark(RESULTS, PAGE, lambda content: {"gpt": table(content)}, picture=picture)


def main() -> int:
    """0, or 2 if a run failed."""
    asked = options(__doc__, rounds=ROUNDS, quick="one round of few steps, one codec", table=True).parse_args()
    codecs, rounds, steps = (CODECS[2:3], 1, 6) if asked.quick else (CODECS, asked.rounds, STEPS)

    def measure(content: Content, _: None) -> None:
        scenario, about = slowed(Scenario.read(SCENARIO), 0.5), machine.facts()
        runs = measure_all(scenario, jobs_of(codecs, rounds, steps), LOGS, name="gpt")
        content |= {"schema": 1, "network": scenario.table, "runs": runs, "machine": about, "measured": today()}

    return BENCHMARK.main(asked, WHOLE, measure)


if __name__ == "__main__":
    sys.exit(main())
