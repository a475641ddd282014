"""Ranks of one machine that take part in a job as those of several hosts, without namespaces: for plans and bytes."""

import contextlib
from collections.abc import Iterator, Sequence

from commlayer.transport import joining
from tests import ranks

LOOPBACK = {"COMMLAYER_IFNAME": "lo"}


@contextlib.contextmanager
def on_hosts(rank: int, size: int, hosts: Sequence[int]) -> Iterator[None]:
    """A job whose WORLD has rank r on host `hosts[r]`: rows between hosts take the network, which is loopback."""
    found: dict[int, list[int]] = {}
    for member, host in enumerate(hosts):
        found.setdefault(host, []).append(member)
    joining.group_hosts = lambda descriptions: tuple(tuple(members) for members in found.values())  # noqa: ARG005
    with ranks.job(rank, size):
        yield
