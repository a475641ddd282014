"""Starts the replicas of torchft_job.py and their lighthouse: three here, or under `commlayer emulate` one per host.

The last replica kills itself, and is started again. Prints the first one's result, if all have the same parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch.distributed as dist
from torchft.coordination import LighthouseServer


def main(job: str, backend: str = "gloo") -> None:
    rank, hosts = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mine, last = ([rank], hosts - 1) if hosts > 1 else ([0, 1, 2], 2)
    address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
    meeting = dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=9000, heartbeat_timeout_ms=1000)
        meeting.set("lighthouse", server.address())
    os.environ |= {"TORCHFT_LIGHTHOUSE": meeting.get("lighthouse").decode(), "LAST": str(last)}
    os.environ |= {"MEETING": address, "MEETING_PORT": str(meeting.port)}
    command = [sys.executable, job, backend]
    lives = [subprocess.Popen([*command, f"{n} dies" if n == last else str(n)]) for n in mine]
    if last in mine:
        assert lives.pop().wait() == -9
        lives.append(subprocess.Popen([*command, str(last)]))
    assert {life.wait() for life in lives} == {0}
    if rank == 0:
        ends = [json.loads(meeting.get(f"end {n}")) for n in range(last + 1)]
        assert (len({end["sum"] for end in ends}), {last, last + 1} <= set(ends[0]["sizes"])) == (1, True), ends
        print(json.dumps(ends[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
