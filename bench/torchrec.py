"""Bytes and validation loss of a torchrec job whose embeddings travel as int8, ours or torchrec's: docs/experts.md.

    make .venv-hosts/torchrec/.stamp && .venv-hosts/torchrec/bin/python -m bench.torchrec     what is missing: 13 min
    python -m bench.torchrec --table            only the table, from bench/results/torchrec.json

Fixed before the first run of these seeds: the mean difference of the loss over 12 seeds is shown to be within 0.001, a
three-thousandth of the targets' variance, by two one-sided t-tests (bench.harness.equivalence). The job is
bench/jobs/torchrec_rows.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.driver import Benchmark, Content
from bench.harness.equivalence import Equivalence
from bench.harness.options import options
from bench.harness.page import measured_on
from bench.harness.results import today
from commlayer.tools.bench import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/torchrec.json"
PAGE = ROOT / "docs/experts.md"
SEEDS = range(1, 13)
CODECS = {"none": "float32", "torchrec": "torchrec's int8", "int8": "commlayer's int8"}
"""Of the job, by what the table calls them."""
STEPS = 300
MARGIN = 0.001
NETWORK = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}
"""Each rank is a host, so that all bytes are counted."""


def run(codec: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """One training. Raises CalledProcessError, and shows the output, if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["bench/jobs/torchrec_rows.py", f"--codec={codec}", f"--seed={seed}", f"--steps={steps}"]
    environ = {**os.environ, **NETWORK, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.stderr.write(ended.stdout + ended.stderr)
    ended.check_returncode()
    return {"codec": codec, "seed": seed, **json.loads(ended.stdout.strip().splitlines()[-1])}


def table(content: dict[str, Any]) -> str:
    """The table, as Markdown."""
    by_codec = {codec: {run["seed"]: run for run in content["runs"] if run["codec"] == codec} for codec in CODECS}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_codec.values())))
    if len(seeds) < 2:
        return f"{len(seeds)} of {len(SEEDS)} seeds so far."
    lines = [f"| | {' | '.join(CODECS.values())} |", "|---|" + "---|" * len(CODECS)]
    for name, what in (("embedding_bytes", "embeddings and their gradients"), ("sent_bytes", "all payload")):
        sizes = [runs[seeds[0]][name] / runs[seeds[0]]["steps"] / 1000 for runs in by_codec.values()]
        cells = " | ".join(f"{size:.1f} ({sizes[0] / size:.2f}x)" for size in sizes)
        lines.append(f"| {what}, KB sent by a rank per step (fewer) | {cells} |")
    means = " | ".join(f"{statistics.fmean(runs[seed]['loss'] for seed in seeds):.5f}" for runs in by_codec.values())
    lines.append(f"| validation loss, mean of {len(seeds)} seeds | {means} |")
    lines.append(f"| difference to float32, within ±{MARGIN} | | {' | '.join(verdicts(by_codec, seeds))} |")
    note = (
        f"Two ranks, four tables of 64 values, batches of 512 per rank, {STEPS} steps. Intervals of 90 %. "
        f"{measured_on(content, 'torchrec')}"
    )
    return "\n".join([*lines, "", note])


def verdicts(by_codec: dict[str, dict[int, dict[str, Any]]], seeds: Sequence[int]) -> list[str]:
    """What the test says of each codec."""
    plain, *coded = by_codec.values()
    found = [Equivalence.of([runs[seed]["loss"] - plain[seed]["loss"] for seed in seeds], MARGIN) for runs in coded]
    words = ["equivalent" if test.shown else "differs" if test.differs(MARGIN) else "not shown" for test in found]
    return [
        f"{test.mean:+.5f} ({test.low:+.5f} to {test.high:+.5f}): {word} (p = {test.p:.1g})"
        for test, word in zip(found, words, strict=True)
    ]


def main() -> int:
    """0."""
    asked = options(__doc__, table=True).parse_args()
    facts = functools.cache(machine.facts)

    def measure(content: Content, case: tuple[int, str]) -> None:
        seed, codec = case
        if any((known["seed"], known["codec"]) == case for known in content["runs"]):
            return
        content |= {"measured": today(), "machine": facts()}
        content["runs"].append(run(codec, seed))
        print(json.dumps(content["runs"][-1]), flush=True)

    benchmark = Benchmark(RESULTS, PAGE, lambda content: {"torchrec": table(content)}, {"schema": 1, "runs": []})
    return benchmark.main(asked, itertools.product(SEEDS, CODECS), measure)


if __name__ == "__main__":
    sys.exit(main())
