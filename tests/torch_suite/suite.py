"""Runs torch's DistributedTest for one backend, one process per rank and test; `__main__` starts it.

    python -m tests.torch_suite.suite --backend commlayer --world 2 --out out/results.json

torch starts each rank by importing everything anew, several seconds each. Here the ranks are forked from this process,
which has imported all but started nothing; so a test costs little more than itself.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
import unittest
from dataclasses import asdict
from pathlib import Path
from typing import Any

import commlayer  # noqa: F401  # registers the backend

from .gates import GATES, import_distributed_test, running
from .outcome import Outcome


def suite_class(module: Any, gate: str) -> type[unittest.TestCase]:
    """torch's test class, with forked ranks that cannot outlive their test or die unseen."""

    class TorchSuite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        def run_test(self, *args: Any) -> None:
            with running(gate):
                super().run_test(*args)

        def _check_return_codes(self, function: Any, elapsed_s: float) -> None:
            super()._check_return_codes(function, elapsed_s)  # looks at rank 0 alone
            if function not in self.skip_return_code_checks:
                codes = [process.exitcode for process in self.processes]
                assert len(set(codes)) == 1, f"the ranks' processes ended with exit codes {codes}"

    return TorchSuite


class Recorder(unittest.TestResult):
    """Keeps an `Outcome` per test, and writes them all after each test: a run that is cut off keeps its results."""

    def __init__(self, gate: str, backend: str, world: int, path: Path) -> None:
        super().__init__()
        self._of_run: dict[str, Any] = {"gate": gate, "backend": backend, "world": world}
        self._path = path
        self._outcomes: list[Outcome] = []
        self._start_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  # unittest's name, as below
        super().startTest(test)
        self._start_s = time.monotonic()
        print(f"---- {test.id().rpartition('.')[2]}", flush=True)

    def _keep(self, test: unittest.TestCase, outcome: str, detail: str) -> None:
        seconds = round(time.monotonic() - self._start_s, 2)
        print(f"---- {outcome} after {seconds} s\n{detail}", flush=True)
        name = test.id().rpartition(".")[2]
        self._outcomes.append(Outcome(test=name, outcome=outcome, detail=detail, seconds=seconds, **self._of_run))
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps([asdict(outcome) for outcome in self._outcomes], indent=1), encoding="utf-8")

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._keep(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._keep(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._keep(test, "failed", str(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._keep(test, "failed", str(err[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--gate", default="gloo", choices=GATES)
    parser.add_argument("--tests", type=Path, help="a file of names, one a line; the default is every test")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a test; then it has failed")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/init"
        module = import_distributed_test(args.gate, args.backend, args.world, args.timeout, init_method)
        suite = suite_class(module, args.gate)
        names = (
            args.tests.read_text(encoding="utf-8").split()
            if args.tests
            else unittest.TestLoader().getTestCaseNames(suite)
        )
        recorder = Recorder(args.gate, args.backend, args.world, args.out)
        recorder.write()
        unittest.TestSuite(map(suite, names)).run(recorder)


if __name__ == "__main__":
    main()
