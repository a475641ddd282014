"""`commlayer.stats` and `commlayer.paths`: the counters of a job's engine."""

import contextlib
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.transport.base import DType
from commlayer.transport.lags import Lag
from commlayer.transport.stats import Paths, Stats, duration, size
from commlayer.transport.status import ffi
from tests import ranks
from tests.documents import table
from tests.engine.cases import LARGE, Case, check
from tests.world import World, flat

COUNTERS = [*(name for name, _ in ffi.typeof("struct cl_engine_stats").fields), "waited_us"]


@ranks.on(1)
def test_without_an_engine_there_is_nothing_to_ask(rank: int, size: int) -> None:
    for ask in (commlayer.stats, commlayer.paths, lambda: commlayer.paths(1)):
        with pytest.raises(commlayer.ClosedError, match="create a process group first"):
            ask()


@pytest.mark.parametrize("rank", [-1, 1 << 16, "1", 0.0, True])
def test_an_invalid_rank_is_refused(rank: Any) -> None:
    with pytest.raises(commlayer.ConfigError, match=rf"commlayer.paths\({re.escape(repr(rank))}\): use the number"):
        commlayer.paths(rank)


def _name(path: Any) -> tuple[Any, ...]:
    return tuple(path[key] for key in ("rank", "interface", "address", "port", "remote"))


@ranks.on(2, environ=ranks.NETWORK)
def test_a_job_asks_its_own_engine(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        before = commlayer.stats()
        dist.all_reduce(torch.ones(1 << 20))
        dist.barrier()
        after = commlayer.stats()
        with pytest.raises(commlayer.CommError, match=f"no group of this process has rank {size}"):
            commlayer.paths(size)
        found = commlayer.paths(1 - rank)
        assert [_name(path) for path in commlayer.paths()] == [_name(path) for path in found]  # counters go on
        dist.barrier()
    last = commlayer.stats()  # the group is gone
    assert last["operations_done"] >= after["operations_done"]
    assert commlayer.paths(1 - rank)[0]["packets_sent"] >= found[0]["packets_sent"]
    with ranks.job(rank, size):
        assert commlayer.stats()["operations_done"] < last["operations_done"]  # another engine
    (path,) = found
    assert (path["rank"], path["interface"], path["address"]) == (1 - rank, "lo", "127.0.0.1")
    assert path["remote"].startswith("127.0.0.1:")
    assert path["remote"] != f"127.0.0.1:{path['port']}"
    assert path["port"] >= 1024  # the number of the socket's port
    assert f"rank {1 - rank}: lo 127.0.0.1:{path['port']} -> {path['remote']}" in str(found)
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
    before = commlayer.stats()
    dist.all_reduce(torch.ones(1 << 20))
    after = commlayer.stats()
    assert after["packets_sent"] < 100  # a greeting or two
    assert after["shared_bytes_received"] - before["shared_bytes_received"] >= 4 * (1 << 20)
    if rank == 0:
        dist.send(torch.ones(1000), 1)
    else:
        dist.recv(torch.ones(1000), 0)
        assert commlayer.stats()["shared_bytes_received"] == after["shared_bytes_received"] + 4000


LATE_S = 0.3


def come_late_on_rank_1(rank: int, name: str, size: int) -> None:
    """Returns on rank 1 some time after it has returned on the other `size` - 1 ranks."""
    ranks.meet(name, size)
    if rank == 1:
        time.sleep(LATE_S)


@pytest.mark.parametrize("environ", [{}, ranks.NETWORK], ids=["shared memory", "network"])
@ranks.on(3, environ="environ")
def test_the_late_rank_is_named(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        group = dist.new_group([2, 1])  # other numbers than in the job
        before = commlayer.stats()
        for number in range(3):
            come_late_on_rank_1(rank, str(number), size)
            dist.all_reduce(torch.ones(1000))
        if rank != 0:
            come_late_on_rank_1(rank, "pair", 2)
            dist.all_reduce(torch.ones(10), group=group)
            if rank == 2:
                dist.destroy_process_group(group)
        found = commlayer.stats()
    assert found["waited_us"] == sum(lag.waited_us for lag in found.lags.values())
    if rank == 1:
        return
    late = found.lags[1]
    assert late.last - before.lags.get(1, (0, 0))[0] == (3 if rank == 0 else 4)
    assert late.waited_us > 0.7e6 * LATE_S * late.last
    assert re.search(rf"\n  rank 1 +\d.* last in {late.last} operations", str(found))
    assert max(found.lags, key=lambda rank: found.lags[rank].waited_us) == 1


def test_counters_add_up() -> None:
    """Every retransmission has a reason, and every packet a path."""
    with World(flat(3), loss=0.05) as world, world.open_group() as team:
        case = Case("all_reduce", DType.F32, LARGE)

        def body(rank: int) -> None:
            for number in range(3):
                check(team[rank], case, number)

        world.on_each(body)
        for engine in world.engines:
            report = engine.report()
            stats, paths = report.stats, [path for of_peer in report.paths.values() for path in of_peer]
            reasons = [stats[f"retransmitted_{reason}"] for reason in ("lost", "refused", "probes")]
            assert stats["packets_retransmitted"] == sum(reasons) > 0
            assert stats["packets_lost"] == sum(path["packets_lost"] for path in paths) > 0
            assert stats["packets_lost"] >= stats["retransmitted_lost"]
            assert stats["packets_sent"] == stats["acks_sent"] + sum(path["packets_sent"] for path in paths)
            assert stats["waited_us"] == sum(lag.waited_us for lag in report.lags.values())


def test_numbers_are_written_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [duration(count) for count in (7, 1500, 2_500_000)] == ["7 us", "1.5 ms", "2.5 s"]
    many = Stats(dict.fromkeys(COUNTERS, 1), {rank: Lag(1, rank) for rank in range(12)})
    assert "rank 11" in str(many)
    assert str(many).count(", last in 1 operation\n") == 8
    assert "and 4 more ranks" in str(many)
    assert max(len(line) for line in str(many).splitlines()) <= 80
    assert str(Paths()) == "no paths: all ranks share this host's memory"


@pytest.mark.parametrize(("heading", "struct"), [("Counters", "cl_engine_stats"), ("Paths", "cl_path_stats")])
def test_documented_counters_exist(heading: str, struct: str) -> None:
    """docs/settings.md has those that a job may want; of a path all."""
    names = {name for name, _ in ffi.typeof(f"struct {struct}").fields}
    names |= {"waited_us"} if heading == "Counters" else {"rank", "interface", "address", "remote"}
    documented = {name.strip(" `") for cells in table("settings.md", heading)[1:] for name in cells[0].split(",")}
    assert documented <= names
    if heading == "Paths":
        assert documented == names
