"""Skips of marked tests, the profile of hypothesis, and a fixture for libfabric."""

from __future__ import annotations

import pytest
from hypothesis import settings

from commlayer.errors import ConfigError
from commlayer.tools.emulate import namespace

# No deadline: a shared machine's pauses are no failures.
settings.register_profile("commlayer", deadline=None, print_blob=True)
settings.load_profile("commlayer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked needs_root run where network namespaces can be made, and say elsewhere why not."""
    if reason := namespace.missing():
        for item in items:
            if item.get_closest_marker("needs_root"):
                item.add_marker(pytest.mark.skip(reason=reason))


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
