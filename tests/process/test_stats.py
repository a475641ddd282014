"""`commlayer.stats` and `commlayer.paths`: the counters of a job's engine."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.transport.native import ffi
from tests import ranks
from tests.documents import table


def test_without_an_engine_there_is_nothing_to_ask() -> None:
    for ask in (commlayer.stats, lambda: commlayer.paths(1)):
        with pytest.raises(commlayer.ClosedError, match="create a process group first"):
            ask()


@pytest.mark.parametrize("rank", [-1, 1 << 16, "1", 0.0, True, None])
def test_an_invalid_rank_is_refused(rank: Any) -> None:
    with pytest.raises(commlayer.ConfigError, match=rf"commlayer.paths\({re.escape(repr(rank))}\): use the number"):
        commlayer.paths(rank)


@ranks.on(2, environ={"COMMLAYER_SHM": "0"})
def test_a_job_asks_its_own_engine(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        before = commlayer.stats()
        dist.all_reduce(torch.ones(1 << 20))
        dist.barrier()
        after = commlayer.stats()
        with pytest.raises(commlayer.CommError, match=f"no group of this process has rank {size}"):
            commlayer.paths(size)
        found = commlayer.paths(1 - rank)
    with pytest.raises(commlayer.ClosedError):
        commlayer.stats()
    sent = after["packets_sent"] - before["packets_sent"]
    assert sent > 4 * (1 << 20) / 2 / 9000
    assert after["packets_lost"] <= sent
    assert sum(path["packets_sent"] for path in found) > 4 * (1 << 20) / 2 / 9000  # without acknowledgements
    assert all(path["round_trip_us"] > 0 for path in found if path["packets_received"])


@ranks.on(1)
def test_counters_are_not_read_from_an_engine_that_is_being_closed(rank: int, size: int) -> None:
    asked = 0
    ended = threading.Event()

    def ask() -> None:
        nonlocal asked
        while not ended.is_set():
            with contextlib.suppress(commlayer.CommError):  # ClosedError is one, too
                commlayer.paths(0)
            asked += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        with ranks.job(rank, size):
            pass
    ended.set()
    for thread in threads:
        thread.join()
    assert asked > 0


@ranks.on(2, ranks.run_job)
def test_shared_memory_sends_no_packets(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1 << 20))
    assert commlayer.stats()["packets_sent"] < 100  # a greeting or two


@pytest.mark.parametrize(("heading", "struct"), [("Lost packets", "cl_engine_stats"), ("Paths", "cl_path_stats")])
def test_documented_counters_exist(heading: str, struct: str) -> None:
    """docs/settings.md has those that a job may want; of a path all."""
    names = {name for name, _ in ffi.typeof(f"struct {struct}").fields}
    documented = {name.strip(" `") for cells in table("settings.md", heading)[1:] for name in cells[0].split(",")}
    assert documented <= names
    if heading == "Paths":
        assert documented == names
