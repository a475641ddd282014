"""Runs the examples of hosts on gloo and on commlayer, by name and by COMMLAYER_INSTEAD_OF, and compares the losses.

python examples/hosts/compare.py accelerate trainer ...     # an environment that has the host
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TOLERANCE = 1e-6
TIMEOUT_S = 300


class Host(NamedTuple):
    """A host: the package whose version counts, and how to run its example."""

    package: str
    torchrun: bool = True
    """Whether torchrun starts it."""
    replaceable: bool = True
    """Whether it asks torch for its group of gloo. torchft makes it by itself."""
    environ: dict[str, str] = {}  # noqa: RUF012  # never changed


HOSTS = {
    "accelerate": Host("accelerate"),
    "trainer": Host("transformers"),
    "lightning": Host("pytorch-lightning"),
    "fabric": Host("pytorch-lightning"),
    "deepspeed": Host("deepspeed", environ={"DS_ACCELERATOR": "cpu"}),
    "pyg": Host("torch-geometric"),
    "torchrec": Host("torchrec"),
    "torchft": Host("torchft", torchrun=False, replaceable=False),
}


def run(name: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """One run of an example, with two ranks: what it prints at its end. Raises RuntimeError if it fails."""
    host = HOSTS[name]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if host.torchrun else []
    command = [sys.executable, *start, str(HERE / f"{name}_job.py"), *arguments]
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **host.environ, **environ}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=HERE
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"backend"')]
    if ended.returncode != 0 or len(lines) != 1:
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
        raise RuntimeError(f"{name} {' '.join(arguments)}: exit code {ended.returncode}\n{said}")
    result: dict[str, Any] = json.loads(lines[0])
    return result


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
            assert abs(loss - expected) <= TOLERANCE * abs(expected), (how, ours, stock)
    same = "bit by bit" if all(each["losses"] == stock["losses"] for each in rows.values()) else f"within {TOLERANCE:g}"
    first, last = stock["losses"][0], stock["losses"][-1]
    version = importlib.metadata.version(HOSTS[name].package)
    return f"| `{name}_job.py` | {HOSTS[name].package} {version} | {first:.6f} | {last:.6f} | {same} |"


def main(names: list[str]) -> None:
    for name in names:
        print(compare(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(HOSTS))
