"""Skips of marked tests, the profile of hypothesis, order and second runs of tests, and a fixture for libfabric."""

import math
import os
import random
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from commlayer.errors import ConfigError
from commlayer.tools.emulate import namespace
from tests import ROOT

# A test of these folders that fails is run a second time (pytest-rerunfailures), for this reason. All others, and C
# tests and the simulation, depend on no clock and no neighbour: their first failure counts.
SECOND_RUN = {
    "tests/engine": "engine threads of several ranks share two processors with other tests",
    "tests/process": "real processes wait for each other beside other tests, within the timeouts of a job",
    "tests/emulated": "real processes and emulated links share the processors with other tests",
}
SECOND_RUNS = 3
"""More first failures than these fail the run, even if all second runs pass: the machine is not to blame then."""

FIRST_FAILURES = ROOT / "out" / "first-failures.txt"
"""The first failure of each test that was run a second time, with its output. A defect, to be explained."""

# Tests of the first folders take longest: they are begun first.
ORDER = ("tests/emulated", "tests/process/faults", "tests/process", "tests/engine", "tests/torch_suite", "tests/unit")

# Of the parameter sets of a test in these folders, `make test` draws a third, others for each commit (DRAW=): processes
# take longest, and the sets of one test have most in common. `make test-slow` runs the rest.
DRAWN = ("tests/process", "tests/emulated")

# For each connection to a Store, torch looks up the name of both ends, ::ffff:127.0.0.1, which no file of most systems
# has: so it asks the name server, by default for 5 s. Subprocesses inherit this; .ci/run adds the name to /etc/hosts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# No deadline: a shared machine's pauses are no failures.
settings.register_profile("commlayer", deadline=None, print_blob=True)
settings.load_profile("commlayer")


def _within(path: Path, folder: str) -> bool:
    return path.is_relative_to(ROOT / folder)


def _place(item: pytest.Item) -> int:
    return next((at for at, folder in enumerate(ORDER) if _within(item.path, folder)), len(ORDER))


def left_out(names: list[str], draw: str) -> set[str]:
    """Two thirds, rounded down, of the parameter sets of each test: the same ones for the same draw."""
    sets = defaultdict(list)
    for name in names:
        sets[name.split("[")[0]].append(name)
    left = set()
    for test, group in sets.items():
        drawn = random.Random(f"{draw} {test}").sample(group, math.ceil(len(group) / 3))
        left |= set(group) - set(drawn)
    return left


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the tests, and marks them: slow ones, skips of those that need root, and second runs."""
    draw = config.getoption("--hypothesis-seed")
    if draw is not None:
        shared = [item for item in items if any(_within(item.path, folder) for folder in DRAWN)]
        left = left_out([item.nodeid for item in shared if not item.get_closest_marker("slow")], draw)
        for item in shared:
            if item.nodeid in left:
                item.add_marker(pytest.mark.slow)
    reason = namespace.missing()
    for item in items:
        if reason and item.get_closest_marker("needs_root"):
            item.add_marker(pytest.mark.skip(reason=reason))
        if any(_within(item.path, folder) for folder in SECOND_RUN):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except="from pytest-timeout"))
    items.sort(key=_place)


def _first_failures(config: pytest.Config) -> list[pytest.TestReport]:
    """The failures after which pytest-rerunfailures ran the test a second time."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("rerun", []) if reporter else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A failure stays visible though the second run passed: at the end of the output, and in a file."""
    reports = _first_failures(config)
    for report in reports:
        terminalreporter.section(f"first run of {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)
    if reports:
        FIRST_FAILURES.parent.mkdir(exist_ok=True)
        with FIRST_FAILURES.open("a", encoding="utf-8") as file:
            for report in reports:
                sections = "".join(f"\n-- {name}\n{text}" for name, text in report.sections)
                file.write(f"== {report.nodeid}\n{report.longreprtext}{sections}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Second runs excuse single tests that a busy machine held up, not a defect that fails many."""
    if exitstatus == pytest.ExitCode.OK and len(_first_failures(session.config)) > SECOND_RUNS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def libfabric() -> None:
    """Skips where the ofi wire cannot be opened."""
    from tests.world import World, flat  # here, since most tests need no engine

    try:
        World(flat(1), "ofi").engines[0].close()
    except ConfigError as error:
        if "libfabric is not available" not in str(error):
            raise
        pytest.skip(str(error))
