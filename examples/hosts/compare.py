"""Runs the examples of hosts on gloo and on commlayer, by name and by COMMLAYER_INSTEAD_OF, and compares the losses.

python examples/hosts/compare.py accelerate trainer ...     # an environment that has the host
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TOLERANCE = 1e-6
TIMEOUT_S = 300
RESULT = re.compile(r'\{"backend"')


class Host(NamedTuple):
    """A host: the package whose version counts, and how to run its example."""

    package: str
    torchrun: bool = True
    """Whether torchrun starts it."""
    launcher: str = ""
    """The file of this folder that starts it, if one does."""
    cluster: str = ""
    """The same for several hosts, if that is another file."""
    replaceable: bool = True
    """Whether it asks torch for its group of gloo. torchft makes it by itself."""
    ranks: int = 2
    tolerance: float = TOLERANCE
    """Largest relative difference of a loss from gloo's. Experts compute in bfloat16, which makes it large."""
    environ: dict[str, str] = {}  # noqa: RUF012  # never changed


RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves this machine
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine 30 are too few
    "RAY_agent_register_timeout_ms": "120000",
}
HOSTS = {
    "accelerate": Host("accelerate"),
    "trainer": Host("transformers"),
    "lightning": Host("pytorch-lightning"),
    "lightning_fsdp": Host("pytorch-lightning", ranks=4),
    "fabric": Host("pytorch-lightning"),
    "deepspeed": Host("deepspeed", environ={"DS_ACCELERATOR": "cpu"}),
    "pyg": Host("torch-geometric"),
    "ray": Host("ray", torchrun=False, cluster="ray_nodes.py", environ=RAY),
    "torchrec": Host("torchrec"),
    "torchft": Host("torchft", torchrun=False, launcher="replicas.py", replaceable=False),
    "torchtitan": Host("torchtitan", launcher="titan_shim.py", ranks=4, tolerance=1e-4),
}


def starter(host: Host, *torchrun: str) -> list[str]:
    """The words before the file of an example, with torchrun's options."""
    started = ["-m", "torch.distributed.run", *torchrun] if host.torchrun else []
    return [sys.executable, *started, *([str(HERE / host.launcher)] if host.launcher else [])]


def here(host: Host) -> list[str]:
    """Starts an example as ranks of this machine."""
    return starter(host, "--standalone", f"--nproc-per-node={host.ranks}")


def launch(
    name: str, *arguments: str, start: Callable[[Host], list[str]] = here, **environ: str
) -> subprocess.CompletedProcess[str]:
    """One run of an example. Raises RuntimeError, with its output, if it fails."""
    host = HOSTS[name]
    command = [*start(host), str(HERE / f"{name}_job.py"), *arguments]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **host.environ, **environ}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=HERE
    )
    if ended.returncode != 0 or not results(ended):
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
        raise RuntimeError(f"{name} {' '.join(arguments)}: exit code {ended.returncode}\n{said}")
    return ended


def results(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What ranks print at their end: backend, losses of all ranks, and the sum of the parameters of this one.

    Two of them may be in one line: an unbuffered print writes the end of its line separately.
    """
    starts = [match.start() for match in RESULT.finditer(ended.stdout)]
    return [json.JSONDecoder().raw_decode(ended.stdout, start)[0] for start in starts]


def run(name: str, *arguments: str, start: Callable[[Host], list[str]] = here, **environ: str) -> dict[str, Any]:
    """The result of one run, which must be the same on all ranks that print one."""
    found = results(launch(name, *arguments, start=start, **environ))
    assert found.count(found[0]) == len(found), found
    return found[0]


def compare(name: str) -> str:
    """A row of the table in docs/trainers.md. Raises AssertionError for another backend or other losses."""
    stock = run(name)
    assert stock["backend"] != "commlayer", stock
    rows = {"by name": run(name, "commlayer")}
    if HOSTS[name].replaceable:
        rows["by variable"] = run(name, COMMLAYER_INSTEAD_OF="gloo")
    for how, ours in rows.items():
        assert ours["backend"] == "commlayer", (how, ours)
        assert len(ours["losses"]) == len(stock["losses"]) >= 2, (how, ours, stock)
        for loss, expected in zip(ours["losses"], stock["losses"], strict=True):
            assert abs(loss - expected) <= HOSTS[name].tolerance * abs(expected), (how, ours, stock)
    same = likeness([stock, *rows.values()], HOSTS[name].tolerance)
    first, last = stock["losses"][0], stock["losses"][-1]
    version = importlib.metadata.version(HOSTS[name].package)
    return f"| `{name}_job.py` | {HOSTS[name].package} {version} | {first:.6f} | {last:.6f} | {same} |"


def likeness(runs: list[dict[str, Any]], tolerance: float) -> str:
    """How much runs are alike: their losses, and where these differ the sums of their parameters."""
    if all(report["losses"] == runs[0]["losses"] for report in runs):
        return "bit by bit"
    if "sum" in runs[0] and all(report["sum"] == runs[0]["sum"] for report in runs):
        return f"within {tolerance:g}; parameters bit by bit"
    return f"within {tolerance:g}"


def main(names: list[str]) -> None:
    for name in names:
        print(compare(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(HOSTS))
