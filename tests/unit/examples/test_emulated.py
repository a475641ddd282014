"""The comparison of hosts on emulated hosts finds differences. `make hosts-emulated` runs it."""

import json
import subprocess
from typing import Any

import pytest

from examples.hosts import compare, emulated


class Runs:
    """Stands for the runs of an example on four hosts: gloo, by name, by variable."""

    def __init__(self, *losses: list[list[float]], lost: int = 3) -> None:
        self.losses = list(losses)
        self.lost = lost
        self.commands: list[list[str]] = []
        self.environs: list[dict[str, str]] = []

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.environs.append(env)
        backend = "commlayer" if "COMMLAYER_LOG" in env else "gloo"
        told = [json.dumps({"backend": backend, "losses": losses}) for losses in self.losses.pop(0)]
        said = "".join(f"[{rank}] noise\n[{rank}] {line}\n" for rank, line in enumerate(told))
        log = f"[1] end: 5 operations; network: 2 MiB sent in 100 packets, {self.lost} lost (3 %); slowest peer\n"
        return subprocess.CompletedProcess(command, 0, said, log * len(told))


GLOO, NEAR = [[2.0, 1.0]] * 4, [[2.0, 1.00001]] * 4


def test_a_row_says_how_far_gloo_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(GLOO, NEAR, NEAR)
    monkeypatch.setattr(subprocess, "run", runs)
    assert emulated.compare("deepspeed") == "| `deepspeed_job.py` | 1.000000 | 1.000010 | 1e-05 | 24 of 800 |"
    assert [command[2:6] == ["commlayer", "emulate", "loss1", "--"] for command in runs.commands] == [True] * 3
    assert [command[-1] == "commlayer" for command in runs.commands] == [False, True, False]
    assert ["COMMLAYER_INSTEAD_OF" in environ for environ in runs.environs] == [False, False, True]
    assert ["COMMLAYER_DETERMINISTIC" in environ for environ in runs.environs] == [False, True, True]
    assert all("--nnodes=4" in command for command in runs.commands)


def test_ray_starts_a_node_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(GLOO[:1], NEAR[:1], NEAR[:1])
    monkeypatch.setattr(subprocess, "run", runs)
    assert emulated.compare("ray") == "| `ray_job.py` | 1.000000 | 1.000010 | 1e-05 | not counted |"
    assert [[word for word in command if "ray_" in word] for command in runs.commands] == [
        [str(compare.HERE / "ray_nodes.py"), str(compare.HERE / "ray_job.py")]
    ] * 3


@pytest.mark.parametrize(
    "runs",
    [
        Runs(GLOO, [[2.0, 1.001]] * 4, [[2.0, 1.001]] * 4),  # too far from gloo
        Runs(GLOO, NEAR, GLOO),  # two runs on commlayer differ
        Runs(GLOO, [*NEAR[:3], [2.0, 1.00002]], NEAR),  # a rank differs
        Runs(GLOO, NEAR[:3], NEAR),  # a rank is silent
        Runs(GLOO, [[2.0, float("nan")]] * 4, [[2.0, float("nan")]] * 4),
        Runs(GLOO, NEAR, NEAR, lost=0),  # the network was no lossy one
    ],
)
def test_differences_are_found(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", runs)
    with pytest.raises(AssertionError):
        emulated.compare("lightning")


def test_every_rank_must_have_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Runs([[1.0], [2.0]]))
    with pytest.raises(AssertionError):
        compare.run("lightning")
