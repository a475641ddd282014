"""`commlayer.torchft` by torchft's documented interface; examples/hosts/torchft_job.py runs it under torchft itself."""

import importlib.util
import os
import signal
import sys
import threading
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks


class StandIn(dist.ProcessGroup):
    """`torchft.process_group.ProcessGroupWrapper` as torchft 0.2 describes it: what is used of it here."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: Any = None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._pg, self._timeout = pg, timeout

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        assert replica_id
        self.abort()
        host, _, rest = store_addr.partition(":")
        port, _, prefix = rest.partition("/")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
        self._pg = self._create_pg(dist.PrefixStore(prefix, store), rank, world_size)  # type: ignore[attr-defined]

    def abort(self) -> None:
        if self._pg is not None:
            self._pg.abort()
        self._pg = None

    def shutdown(self) -> None:
        self._pg = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:  # type: ignore[override]
        return self._pg.allreduce(tensors, opts)


def group(timeout_s: float = 20) -> Any:
    """A group of `commlayer.torchft`, on torchft if it is installed."""
    if importlib.util.find_spec("torchft") is None:
        torchft, module = ModuleType("torchft"), ModuleType("torchft.process_group")
        module.ProcessGroupWrapper = StandIn  # type: ignore[attr-defined]
        sys.modules.update({"torchft": torchft, "torchft.process_group": module})
    from commlayer.torchft import ProcessGroupCommlayer

    return ProcessGroupCommlayer(timedelta(seconds=timeout_s))


def configure(pg: Any, quorum: int, rank: int, size: int) -> None:
    pg.configure(f"127.0.0.1:{os.environ['RANKS_STORE_PORT']}/torchft/{quorum}", f"replica {rank}", rank, size)


def total(pg: Any, value: float = 1.0) -> float:
    tensor = torch.full((1000,), value)
    pg.allreduce([tensor], dist.AllreduceOptions()).wait()
    return tensor[0].item()


@pytest.mark.parametrize("shm", ["1", "0"])
@ranks.on(3)
def test_replicas_go_on_without_a_killed_one_and_it_joins_again(rank: int, size: int, shm: str) -> None:
    os.environ.update(COMMLAYER_SHM=shm, COMMLAYER_IFNAME="lo", COMMLAYER_PEER_TIMEOUT_S="1")
    if rank == 2 and (child := os.fork()) != 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        pg = group()
    else:
        pg = group()
        configure(pg, 0, rank, size)
        assert total(pg) == 3.0
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(commlayer.PeerLostError):
            list(map(total, [pg] * 1000))
        for quorum in (1, 2):
            configure(pg, quorum, 1 - rank, 2)  # ranks change, too
            assert total(pg) == 2.0
            ranks.meet(f"end of quorum {quorum}", 2)  # as torchft's lighthouse asks all replicas first
    configure(pg, 3, rank, size)
    assert total(pg) == 3.0
    pg.shutdown()
    pg.shutdown()
    assert threading.active_count() == 1


@ranks.on(2)
def test_world_is_left_alone(rank: int, size: int) -> None:
    """WORLD is the replica, torchft's group joins the replicas: with these names a rank has two numbers."""
    with ranks.job(rank, size):
        pg = group()
        assert pg.getBackendName() == "torchft-commlayer"
        for quorum in range(2):
            configure(pg, quorum, 1 - rank, size)
            assert total(pg) == 2.0
            ranks.meet(f"end of quorum {quorum}", size)
        subgroup = dist.new_group()
        assert total(dist.group.WORLD) == total(subgroup) == 2.0
        ranks.meet("subgroup", size)
        pg.abort()
        assert total(dist.group.WORLD) == 2.0
