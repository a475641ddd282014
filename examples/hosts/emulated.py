"""Runs the examples as four ranks on four emulated hosts whose links lose 1 % of the packets; compares the losses.

    python -m examples.hosts.emulated accelerate trainer ...     # as root; an environment that has the host

The runs on commlayer reduce in a fixed order (COMMLAYER_DETERMINISTIC), so their losses must be equal bit by bit. gloo
adds four numbers in another order: its losses may differ by TOLERANCE.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from examples.hosts.compare import HOSTS, Host, launch, results, starter

SCENARIO = "loss1"
RANKS = 4
TOLERANCE = 1e-4
"""Largest relative difference of a loss from gloo's."""
OURS = {"COMMLAYER_DETERMINISTIC": "1", "COMMLAYER_LOG": "info"}
NETWORK = re.compile(r"network: .* sent in (\d+) packets, (\d+) lost")


def on_hosts(host: Host) -> list[str]:
    """Starts an example on every emulated host."""
    meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400")
    emulate = [sys.executable, "-m", "commlayer", "emulate", SCENARIO, "--"]
    host = host._replace(launcher=host.cluster or host.launcher)
    return [*emulate, *starter(host, f"--nnodes={RANKS}", "--nproc-per-node=1", *meeting)]


def result(name: str, ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The result of a run: that of every rank."""
    found = results(ended)
    assert len(found) == (RANKS if HOSTS[name].torchrun else 1), (name, ended.stdout)
    assert found.count(found[0]) == len(found), found
    return found[0]


def packets(ended: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """The packets that the ranks sent, and those of them that were lost, from the ends of their logs."""
    found = [(int(sent), int(lost)) for sent, lost in NETWORK.findall(ended.stderr)]
    assert len(found) >= RANKS, ended.stderr
    return sum(sent for sent, _ in found), sum(lost for _, lost in found)


def compare(name: str) -> str:
    """A row of the table in docs/trainers.md. Raises AssertionError for another backend or other losses."""
    stock = result(name, launch(name, start=on_hosts))
    ours = [launch(name, "commlayer", start=on_hosts, **OURS)]
    if HOSTS[name].replaceable:
        ours.append(launch(name, start=on_hosts, COMMLAYER_INSTEAD_OF="gloo", **OURS))
    by_name, *others = (result(name, run) for run in ours)
    assert (stock["backend"] != "commlayer", by_name["backend"]) == (True, "commlayer"), (stock, by_name)
    assert others == [by_name] * len(others), (by_name, others)
    pairs = zip(by_name["losses"], stock["losses"], strict=True)
    differences = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    assert all(difference <= TOLERANCE for difference in differences), (by_name, stock)
    row = [f"`{name}_job.py`", *(f"{run['losses'][-1]:.6f}" for run in (stock, by_name)), f"{max(differences):.1g}"]
    if not HOSTS[name].torchrun:  # the ends of the logs of torchft's groups and Ray's workers are not in the output
        return f"| {' | '.join(row)} | not counted |"
    sent, lost = (sum(column) for column in zip(*map(packets, ours), strict=True))
    assert lost > 0
    return f"| {' | '.join(row)} | {lost} of {sent} |"


def main(names: list[str]) -> None:
    for name in names:
        print(compare(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(HOSTS))
