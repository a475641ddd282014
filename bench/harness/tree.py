"""`Tree`: a commit, built in its own folder, which runs cases with its own package and native code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from commlayer.tools.emulate.namespace import EmulationError
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.ranks import run as run_ranks
from commlayer.tools.emulate.scenario import Scenario
from commlayer.tools.emulate.stress import Stress

ROOT = Path(__file__).parents[2]
JOB = ROOT / "bench/jobs/against.py"


class UnknownCommitError(ValueError):
    """The repository has no such commit."""


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
    arguments: tuple[tuple[str, float | str], ...] = ()
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

    @contextlib.contextmanager
    def network(self) -> Iterator[Network | None]:
        """The emulated network with its stress, or None. Raises EmulationError if it cannot be made, or if the stress
        differed from the scenario."""
        if not self.scenario:
            yield None
            return
        scenario = Scenario.read(self.scenario)
        if self.loss is not None:
            nics = tuple(dataclasses.replace(nic, loss=self.loss) for nic in scenario.nics)
            scenario = dataclasses.replace(scenario, nics=nics)
        with Network(scenario) as network, Stress(network) as stress:
            yield network
            if stress.error is not None:
                raise EmulationError(stress.error)


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
        """One turn of a case with a `kind`. Raises CannotRunError."""
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
    cpu_us = 1e6 * sum(rank["cpu_s"] for rank in found)
    if is_spaced:
        value = statistics.median(min(call) for call in zip(*(rank["values"] for rank in found), strict=True))
    else:
        value = max(statistics.median(rank["values"]) for rank in found)
    return Taken(value if unit == "bytes" else 1e6 * value, cpu_us)


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit in a temporary folder. Raises UnknownCommitError if there is no such commit."""
    with tempfile.TemporaryDirectory(prefix="commlayer-against-") as folder:
        path = Path(folder, "tree")
        done = git("worktree", "add", "--quiet", "--detach", str(path), commit)
        if done.returncode:
            raise UnknownCommitError(f"git has no worktree of {commit}: {done.stderr.strip()}")
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """A git command in this checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def abbreviated(commit: str) -> str:
    """The commit as people write it. Raises UnknownCommitError if there is no such commit."""
    done = git("rev-parse", "--verify", "--quiet", "--short=7", f"{commit}^{{commit}}")
    if done.returncode:
        raise UnknownCommitError(f"{commit} is no commit of this repository: name one that `git log` shows")
    return done.stdout.strip()
