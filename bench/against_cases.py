"""The cases of bench/against.py, and how one commit's built tree runs one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from bench import fabric
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.ranks import run as run_ranks
from commlayer.tools.emulate.scenario import Scenario

JOB = Path(__file__).with_name("against_job.py")
UDP = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}
SIZES = {"4K": (4096, 1000, 100), "1M": (1 << 20, 100, 10), "16M": (16 << 20, 12, 2)}
"""Bytes, calls and discarded calls of an all-reduce in a loop."""
GAP_S = 0.002
SEEDS = (1, 2, 3)


class CannotRunError(RuntimeError):
    """A commit cannot be built, or cannot run a case."""

    def __init__(self, tree: Tree, why: str) -> None:
        super().__init__(f"{tree.label}: {why}")
        self.tree = tree


class Taken(NamedTuple):
    """One turn of a commit at a case."""

    value: float
    """Microseconds, or bytes for memory: of the slowest or largest rank."""
    cpu_us: float
    """CPU time of all ranks for one call; 0 where there is none."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One figure. Cases without a `kind` are those of the simulated fabric, in virtual time."""

    title: str
    kind: str = ""
    arguments: tuple[tuple[str, float], ...] = ()
    ranks: int = 2
    environ: tuple[tuple[str, str], ...] = ()
    scenario: str = ""
    """An emulated network; "" for loopback."""
    loss: float | None = None
    """The loss of every link, instead of the scenario's."""
    seed: int = 0
    """The seed of the simulated fabric."""
    unit: str = "us"

    @property
    def is_exact(self) -> bool:
        """Whether every run has the same figure."""
        return not self.kind

    @property
    def discards(self) -> int:
        """Turns of each commit that do not count: of jobs that discard no calls themselves."""
        return int(not self.is_exact and "warmup" not in dict(self.arguments))

    def network(self) -> contextlib.AbstractContextManager[Network | None]:
        """The emulated network, or None. Raises EmulationError if it cannot be made."""
        if not self.scenario:
            return contextlib.nullcontext()
        scenario = Scenario.read(self.scenario)
        if self.loss is not None:
            nics = tuple(dataclasses.replace(nic, loss=self.loss) for nic in scenario.nics)
            scenario = dataclasses.replace(scenario, nics=nics)
        return Network(scenario)


def loopback(wire: str, environ: dict[str, str]) -> dict[str, Case]:
    """All-reduces of two ranks in a loop, and with pauses."""
    found = {}
    for size, (size_bytes, iters, warmup) in SIZES.items():
        for how, gap_s in (("loop", 0.0), ("spaced", GAP_S)):
            arguments: dict[str, float] = {
                "size_bytes": size_bytes,
                "iters": min(iters, 250) if gap_s else iters,
                "warmup": warmup,
            }
            if gap_s:
                arguments["gap_s"] = gap_s
            title = f"all-reduce of {size}iB, {wire}, {'pauses of 2 ms' if gap_s else 'in a loop'}"
            found[f"{wire}-{size}-{how}"] = Case(
                title, "all_reduce", tuple(arguments.items()), environ=tuple(environ.items())
            )
    return found


def emulated(title: str, scenario: str, loss: float | None = None) -> Case:
    """An all-reduce of 8 MiB on four hosts."""
    arguments = (("size_bytes", 8 << 20), ("iters", 5), ("warmup", 2))
    return Case(f"all-reduce of 8 MiB, 4 hosts, 200 Mbit/s, {title}", "all_reduce", arguments, 4, (), scenario, loss)


CASES = {
    **loopback("shm", {"COMMLAYER_SHM": "1"}),
    **loopback("udp", UDP),
    "p2p-4K": Case("4 KiB to a rank and back", "p2p", (("size_bytes", 4096), ("iters", 1000), ("warmup", 100))),
    "p2p-4M": Case("4 MiB to a rank and back", "p2p", (("size_bytes", 4 << 20), ("iters", 30), ("warmup", 5))),
    "ddp": Case("step of DDP, 8 MiB of gradients", "ddp", (("width", 512), ("iters", 40), ("warmup", 5))),
    "pipeline": Case("step of 1F1B, 8 micro-batches", "pipeline", (("width", 512), ("iters", 40), ("warmup", 5))),
    "start": Case("start of 16 ranks", "start", ranks=16),
    "memory": Case(
        "peak memory, 4 ranks, 16 MiB", "memory", (("size_bytes", 16 << 20), ("iters", 5)), ranks=4, unit="bytes"
    ),
    "clean": emulated("no loss", "clean200"),
    "loss1": emulated("1 % loss", "loss1"),
    "loss3": emulated("3 % loss", "loss1", 0.03),
    "incast": emulated("incast", "incast_cross"),
    **{f"fabric-{seed}": Case(f"fabric, all-to-owner, seed {seed}", seed=seed) for seed in SEEDS},
}


class Tree:
    """A checkout that runs cases, each with its own package and its own native code."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which Python finds this tree's package first."""
        # the job imports the package itself: the entry point is that of the installed one
        own = {"PYTHONPATH": str(self.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    def build(self, targets: list[str]) -> None:
        """Compiles the package in place, and targets of the tree's Makefile. Raises CannotRunError."""
        venv = Path(sys.prefix)
        commands = [[sys.executable, "setup.py", "-q", "build_ext", "--inplace"]]
        if targets:
            commands.append(["make", "-s", f"VENV={venv}", *targets])
        for command in commands:
            done = subprocess.run(command, cwd=self.path, env=self.environ, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr or done.stdout).strip().splitlines()[-5:]
                raise CannotRunError(self, f"{' '.join(command)}: {' / '.join(last)}")

    def take(self, case: Case, network: Network | None) -> Taken:
        """One turn. Raises CannotRunError."""
        if case.is_exact:
            return self._fabric(case.seed)
        with tempfile.TemporaryDirectory() as folder:
            request: dict[str, Any] = {
                "kind": case.kind,
                "arguments": dict(case.arguments),
                "ranks": case.ranks,
                "environ": dict(case.environ),
                "folder": folder,
            }
            if network is None:
                self._fork(json.dumps(request))
            else:
                self._emulate(network, json.dumps(request))
            found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.ranks)]
        return taken(found, is_spaced="gap_s" in request["arguments"], unit=case.unit)

    def _fabric(self, seed: int) -> Taken:
        try:
            found = fabric.run(fabric.CASES["direct"], "reliable", seed, quick=False, tree=self.path)
        except (OSError, RuntimeError) as error:
            raise CannotRunError(self, str(error)) from None
        if "unfinished" in found:
            raise CannotRunError(self, found["unfinished"])
        return Taken(found["collectives"]["mean_us"], 0.0)

    def _fork(self, request: str) -> None:
        if self._server is None:
            command = [sys.executable, str(JOB), str(self.path)]
            pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen(command, env=self.environ, **pipe)
            self._answer()
        assert self._server.stdin is not None  # for mypy: it is a pipe
        self._server.stdin.write(request + "\n")
        self._server.stdin.flush()
        if failed := json.loads(self._answer()):
            raise CannotRunError(self, f"rank {', '.join(map(str, failed))} failed, see its traceback above")

    def _answer(self) -> str:
        server = self._server
        assert server is not None  # for mypy: the caller started it, with a pipe
        assert server.stdout is not None
        line: str = server.stdout.readline()
        if not line:
            self._server = None
            raise CannotRunError(self, f"the process that starts ranks ended with status {server.wait()}")
        return line

    def _emulate(self, network: Network, request: str) -> None:
        words = [f"{name}={value}" for name, value in self.environ.items() if os.environ.get(name) != value]
        status = run_ranks(network, ["env", *words, sys.executable, str(JOB), str(self.path), request])
        if status:
            raise CannotRunError(self, f"a rank ended with status {status}, see its output above")


def taken(found: list[dict[str, Any]], *, is_spaced: bool, unit: str) -> Taken:
    """The figures of a turn, from those of its ranks.

    In a loop the slowest rank tells the time of a call. After a pause ranks call at different moments: the time is that
    of the last one to call, which waits for no other.
    """
    cpu_us = 1e6 * sum(each["cpu_s"] for each in found)
    if is_spaced:
        value = statistics.median(min(call) for call in zip(*(each["values"] for each in found), strict=True))
    else:
        value = max(statistics.median(each["values"]) for each in found)
    return Taken(value if unit == "bytes" else 1e6 * value, cpu_us)
