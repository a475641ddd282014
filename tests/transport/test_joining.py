"""Joining groups: what goes wrong there, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.transport import joining

from .cases import run
from .world import PATIENCE_S, Exchange, World, flat, open_descriptors


@pytest.mark.parametrize("step", ["memory", "mapped", "open"])
def test_a_start_that_fails_leaves_nothing_behind(step: str) -> None:
    class LostError(Exception):
        pass

    def failing(exchange: Exchange) -> Callable[[int], Callable[[str, bytes], list[bytes]]]:
        def meet(rank: int) -> Callable[[str, bytes], list[bytes]]:
            def all_gather(name: str, value: bytes) -> list[bytes]:
                values = exchange(rank)(name, value)
                if name == step:
                    raise LostError
                return values

            return all_gather

        return meet

    with World([(0, 1)], "none") as world:
        world.open_group().__exit__()  # watches the processes, for good
        before = open_descriptors()
        with pytest.raises(LostError):
            world.open_group(failing(Exchange(2)))
        assert open_descriptors() == before
        with world.open_group() as team:
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]


def test_engines_leave_nothing_behind() -> None:
    with World([(0, 1), (2,)]) as world, world.open_group():
        pass
    before = open_descriptors()
    with World([(0, 1), (2,)], "udp") as world, world.open_group() as team:
        world.on_each(lambda rank: run(team[rank]))
    assert open_descriptors() == before


def test_without_shared_memory_the_network_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share = joining._share_memory

    def refuse(local: Any, rank: int, descriptions: Any, exchange: Any) -> tuple[int, str]:
        fd, problem = share(local, rank, descriptions, exchange)
        return fd, "rank 1 has none" if rank == 1 else problem

    monkeypatch.setattr(joining, "_share_memory", refuse)
    with World([(0, 1, 2)]) as world, world.open_group() as team:
        assert team[0].hosts == ((0,), (1,), (2,))
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [6.0] * 3
        assert world.engines[0].stats()["packets_sent"] > 0
    assert "no shared memory (rank 1 has none)" in caplog.text


def test_no_path() -> None:
    with World(flat(2)) as world:
        world.descriptions[1]["ports"] = []
        with pytest.raises(ConfigError, match=r"rank 0 of group 'group 1': no network path to rank 1.*no address"):
            world.threads.submit(world.open_group, lambda _: lambda _, value: [value] * 2).result(PATIENCE_S)


def test_group_hosts() -> None:
    ranks = [{"host": host, "shm": shm} for host, shm in [("b", True), ("a", True), ("b", True), ("a", False)]]
    assert joining.group_hosts(ranks) == ((0, 2), (1,), (3,))
