"""What every test module shares: why a marked test is skipped, and how hypothesis behaves here."""

from __future__ import annotations

import pytest
from hypothesis import settings

from commlayer.emulate import namespace

# No deadline: a shared machine's pauses are no failures.
settings.register_profile("commlayer", deadline=None, print_blob=True)
settings.load_profile("commlayer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked needs_root run where network namespaces can be made, and say elsewhere why not."""
    if reason := namespace.missing():
        for item in items:
            if item.get_closest_marker("needs_root"):
                item.add_marker(pytest.mark.skip(reason=reason))
