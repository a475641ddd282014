"""The sites: three ranks on one host, three hosts, and two hosts with two ranks each."""

from collections.abc import Iterator

import pytest

from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario

from .scene import Site

HOSTS = {"one host": (0, 0, 0), "three hosts": (0, 1, 2), "two hosts": (0, 0, 1, 1)}


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Three hosts with two interfaces each; who changes it puts it back."""
    with Network(Scenario(hosts=3, nics=(Link(), Link()))) as built:
        yield built


@pytest.fixture(
    params=[pytest.param(name, marks=[] if name == "one host" else pytest.mark.needs_root) for name in HOSTS]
)
def site(request: pytest.FixtureRequest) -> Site:
    """Each of the sites in turn."""
    if request.param == "one host":
        return Site(request.param, HOSTS[request.param])
    return Site(request.param, HOSTS[request.param], request.getfixturevalue("network"))
