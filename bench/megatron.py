"""Losses of the Megatron example on gloo and on commlayer: a table for docs/megatron.md.

    python -m bench.megatron                     4 ranks on this machine (`make megatron`)
    python -m bench.megatron --scenario loss1    4 emulated hosts (root)

Each layout runs with Megatron's own order and in the two forms of examples/megatron/segments.py. Without clipping all
losses must be those of gloo, bit by bit. With clipping, the sum of four ranks' norms is rounded in the backend's order.
Experts run with Megatron's own all-to-all, which gloo cannot do, as it gets splits as tensors; then with tokens that
travel once to each host, whose sums are made in another order.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.options import options
from bench.harness.page import markdown, write_between

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "TP2 x DP2": ("--tp", "2"),
    "PP2 x DP2, 2 virtual stages": ("--pp", "2"),
    "TP2 x PP2, 2 virtual stages": ("--tp", "2", "--pp", "2"),
}
EXPERTS = "EP4 x DP4, 8 experts, 2 for a token"
TOLERANCE = 1e-5
"""Largest difference of losses with clipping: roundings of the norm, grown over ten steps."""
LOSS = re.compile(r"\bloss (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Run:
    """One job of the example."""

    layout: str
    backend: str
    segments: str = "none"
    clip: float = 1.0
    by_host: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether the losses of the runs after it must be its."""
        return self.backend == "gloo" or (self.layout == EXPERTS and not self.by_host)

    def command(self, scenario: str | None) -> list[str]:
        """The job on this machine, or on the hosts of a scenario."""
        if scenario is None:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
        else:
            start = [sys.executable, "-c", "from commlayer.tools.cli import app; app()", "emulate", scenario, "--"]
            start += [sys.executable, "-m"]
        chosen = ["--backend", self.backend, "--segments", self.segments, "--clip", str(self.clip)]
        layout = ("--ep", "4") if self.layout == EXPERTS else LAYOUTS[self.layout]
        return [*start, "examples.megatron.job", *layout, *chosen, *(["--by_host"] if self.by_host else [])]

    def losses(self, scenario: str | None) -> list[float]:
        """Runs the job. Raises CalledProcessError, and shows the output, if it fails."""
        done = subprocess.run(
            self.command(scenario), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
        found = [float(text) for text in LOSS.findall(done.stdout)]
        if not found:
            raise RuntimeError(f"{self}: no losses in the output: {done.stdout}{done.stderr}")
        return found


RUNS = (
    ("gloo", "none", 1.0),
    ("commlayer", "none", 1.0),
    ("commlayer", "classes", 1.0),
    ("gloo", "none", 0.0),
    ("commlayer", "deferred", 0.0),
)


def runs() -> list[Run]:
    """In each layout, a reference stands before the runs that must have its losses."""
    dense = [Run(layout, *run) for layout in LAYOUTS for run in RUNS]
    return [*dense, *(Run(EXPERTS, "commlayer", by_host=by_host) for by_host in (False, True))]


def differences(measured: Sequence[tuple[Run, list[float]]]) -> list[float]:
    """The largest difference of each run from the losses of the last reference before it."""
    found = []
    reference: list[float] = []
    for run, losses in measured:
        reference = losses if run.is_reference else reference
        found.append(max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True)))
    return found


def are_equal(measured: Sequence[tuple[Run, list[float]]]) -> bool:
    """Whether all losses are those of gloo."""
    pairs = zip(measured, differences(measured), strict=True)
    return all(difference <= (TOLERANCE if run.clip else 0) for (run, _), difference in pairs)


def table(measured: Sequence[tuple[Run, list[float]]]) -> str:
    """A row per run."""
    columns = ["layout", "backend", "`--segments`", "`--clip`", "first loss", "last loss", "difference"]
    rows = []
    for (run, losses), difference in zip(measured, differences(measured), strict=True):
        shown = "-" if run.is_reference else f"{difference:.1g}" if difference else "0"
        backend = f"{run.backend}, by host" if run.by_host else run.backend
        cells = [run.layout, backend, run.segments, f"{run.clip:g}", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", shown]
        rows.append(cells)
    return markdown(columns, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--scenario", help="scenario of `commlayer emulate`; otherwise this machine")
    given = parser.parse_args()
    if importlib.util.find_spec("megatron") is None:  # all jobs would fail, with as many tracebacks
        sys.exit("megatron-core is missing: pip install -r requirements/megatron.txt, as `make megatron` does")
    measured = []
    for run in runs():
        measured.append((run, run.losses(given.scenario)))
        print(run, *(f"{loss:.6f}" for loss in measured[-1][1]), flush=True)
    print(table(measured))
    if not are_equal(measured):
        sys.exit(f"losses differ by more than {TOLERANCE:g}, or without clipping")
    write_between(ROOT / "docs/megatron.md", **{"emulated" if given.scenario else "losses": table(measured)})


if __name__ == "__main__":
    main()
