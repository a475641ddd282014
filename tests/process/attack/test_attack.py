"""Ranks of a job reduce under attack: the sums stay right, and each packet of the attacker is counted and dropped."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from commlayer.transport.native import Engine
from tests import ranks
from tests.process.attack.attacker import ENOUGH, Plain, Raw

SIZE = 3
SECONDS = 4.0
NUMELS = (1, 1000, 50_000)
COUNTERS = ("foreign", "forged", "replayed")
AUTHS = ("header", "full", "off")


def _engine() -> Engine:
    assert Engine._shared is not None
    return Engine._shared


def _reduce_until(store: dist.Store, rank: int, key: str) -> int:
    """All-reduces until rank 0 sees `key` in the Store; returns how many."""
    count = 0
    while True:
        numel = NUMELS[count % len(NUMELS)]
        tensor = torch.arange(numel + 1, dtype=torch.float64) * (rank + 1)
        tensor[0] = float(rank == 0 and store.check([key]))
        dist.all_reduce(tensor)
        ended, tensor[0] = bool(tensor[0]), 0
        assert torch.equal(tensor, torch.arange(numel + 1, dtype=torch.float64) * sum(range(1, SIZE + 1))), count
        count += 1
        if ended:
            return count


def _live(rank: int, _size: int, kind: str) -> dict[str, int]:
    """Ranks 0 to SIZE - 1 work; the last one attacks. Returns the counters of the engine, or of the attacker."""
    store = ranks.store()
    if rank < SIZE:
        with ranks.job(rank, SIZE):
            (port,) = _engine().describe()["ports"]
            store.set(f"address {rank}", json.dumps([port["address"], port["port"]]))
            reductions = _reduce_until(store, rank, "attacked")
            dist.barrier()
            return {**_engine().stats(), "reductions": reductions}
    addresses = [tuple(json.loads(store.get(f"address {owner}"))) for owner in range(SIZE)]
    job = int(store.get("commlayer/job").split()[0])
    attacker = Raw("lo", os.environ["COMMLAYER_AUTH"]) if kind == "raw" else Plain()
    try:
        attacker.attack(addresses, job & 0xFFFF, SECONDS)
    finally:
        store.set("attacked", "")
    return dict(attacker.sent)


@pytest.mark.parametrize(
    ("kind", "auth"),
    [
        ("plain", "header"),
        pytest.param("raw", "header", marks=pytest.mark.needs_root),
        pytest.param("raw", "full", marks=pytest.mark.needs_root),
    ],
)
def test_sums_are_right_under_attack(kind: str, auth: str) -> None:
    environ = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo", "COMMLAYER_AUTH": auth}
    *workers, sent = ranks.run(_live, SIZE + 1, kind, environ=environ)
    total = {name: sum(worker[name] for worker in workers) for name in workers[0]}
    assert total["reductions"] > 5 * SIZE
    # Nothing was taken that no rank had sent: not one forged packet was accepted.
    assert total["packets_received"] <= total["packets_sent"]
    for counter in COUNTERS:
        counted = total[f"packets_{counter}"]
        # a busy rank's socket may have no room for some, as for any packet
        assert sent.get(counter, 0) // 2 <= counted <= sent.get(counter, 0), (counter, total, sent)
    assert sent["forged"] > 50
    assert kind == "plain" or sent["replayed"] > ENOUGH


ENVIRONS = [{"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo", "COMMLAYER_AUTH": auth} for auth in AUTHS]


@pytest.mark.parametrize("environ", ENVIRONS, ids=AUTHS)
@ranks.on(2, ranks.run_job, environ="environ")
def test_ranks_that_agree_work(rank: int, size: int) -> None:
    tensor = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert bool((tensor == 3).all())
    dist.barrier()
    stats = _engine().stats()
    assert stats["packets_forged"] + stats["packets_foreign"] == 0
