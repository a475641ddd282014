"""Skips of marked tests, the profile of hypothesis, second runs of failed tests, and a fixture for libfabric."""

from __future__ import annotations

import pytest
from hypothesis import settings

from commlayer.errors import ConfigError
from commlayer.tools.emulate import namespace

# `make test` runs a failed test again (pytest-rerunfailures), because four groups share the processors. More than this
# many failures of a group fail it, even if all second runs pass.
SECOND_RUNS = 3

# No deadline: a shared machine's pauses are no failures.
settings.register_profile("commlayer", deadline=None, print_blob=True)
settings.load_profile("commlayer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked needs_root run where network namespaces can be made, and say elsewhere why not."""
    if reason := namespace.missing():
        for item in items:
            if item.get_closest_marker("needs_root"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _first_runs(config: pytest.Config) -> list[pytest.TestReport]:
    """The failures after which pytest-rerunfailures ran the test a second time."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("rerun", []) if reporter else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A failure stays visible though the second run passed."""
    for report in _first_runs(config):
        terminalreporter.section(f"first run of {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Second runs excuse single tests that a busy machine held up, not a defect that fails many."""
    if exitstatus == pytest.ExitCode.OK and len(_first_runs(session.config)) > SECOND_RUNS:
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
