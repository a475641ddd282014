"""`commlayer.publish` among emulated hosts: what each link carries."""

import os
import time
from pathlib import Path

import pytest
import torch

import commlayer
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks

pytestmark = pytest.mark.needs_root

READERS = 4
STATE_BYTES = 8_000_000
PORT = 29600
FRAMES = 1.12
"""Headers of packets and messages, acknowledgements and packets that TCP sends again."""


def state() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(STATE_BYTES // 4, dtype=torch.int32)}


def share(rank: int, size: int, secret: str, late: int) -> bool:
    """Rank 0 publishes a version to the others, of which the last `late` come when the first have it. Whether it came
    as it left."""
    address, store = f"{os.environ['MASTER_ADDR']}:{PORT}", ranks.store()
    if rank == 0:
        with commlayer.publish(state(), address, secret_file=secret) as publisher:
            early = range(1, size - late)
            store.wait([f"ready {reader}" for reader in early])
            time.sleep(1.0)  # they have asked
            publisher.commit(1)
            store.wait([f"has {reader}" for reader in early])
            store.set("late", "")
            store.wait([f"has {reader}" for reader in range(1, size)])
        return True
    if rank >= size - late:
        store.wait(["late"])
    with commlayer.subscribe(address, secret_file=secret, timeout_s=ranks.TIMEOUT_S) as reader:
        store.set(f"ready {rank}", "")
        version = next(reader)
        store.set(f"has {rank}", "")
        is_same = torch.equal(version.tensors()["weight"], state()["weight"])
        assert list(reader) == []
        return is_same


def sent_bytes(network: Network, host: int) -> int:
    """What has left a host's NIC."""
    lines = network.run(host, ["cat", "/proc/self/net/dev"]).splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


@pytest.mark.parametrize("late", [0, 2])
def test_every_link_carries_a_version_once(tmp_path: Path, late: int) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    size = 1 + READERS
    with Network(Scenario(hosts=size, nics=(Link(rate_bps=100e6),))) as network:
        places = [network.name(host) for host in range(size)]
        assert all(ranks.run(share, size, str(secret), late, environ=network.rendezvous(), places=places))
        sent = [sent_bytes(network, host) / STATE_BYTES for host in range(size)]
    assert 1 < sent[0] < FRAMES
    assert sum(sent) == pytest.approx(READERS, rel=FRAMES - 1)
    # readers that are equally fast send equally much; one that waits for a core sends less, and the others more
    assert max(sent[1:]) < (1.5 if late else 1.25) * FRAMES
