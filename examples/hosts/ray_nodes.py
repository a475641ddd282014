"""Starts ray_job.py on a Ray cluster of its own: under `commlayer emulate` every host is a node, the first is the head.

Ray's workers inherit the environment of their node, and with it the names of the emulated NICs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch.distributed as dist

NODE = ("--block", "--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats")
PORT = 6379
LIMIT = timedelta(minutes=10)


def main(job: str, *arguments: str) -> int:
    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = socket.gethostbyname(f"host{rank}")
    meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts, rank == 0, LIMIT)
    if rank == 0:
        meeting.set("token", secrets.token_hex(32))
        meeting.set("folder", tempfile.mkdtemp())  # /tmp/ray would name this cluster to later scripts
    environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": meeting.get("token").decode()}
    environ["RAY_TMPDIR"] = meeting.get("folder").decode()
    role: tuple[str, ...] = ("--head", f"--port={PORT}", "--include-dashboard=false")
    if rank > 0:
        role = (f"--address={meeting.get('head').decode()}",)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}", *role, *NODE]
    if rank > 1:  # nodes that share a folder for sockets must not start at once
        meeting.get(f"started {rank - 1}")
    node = subprocess.Popen(start, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        await_start(node)
        meeting.set("head" if rank == 0 else f"started {rank}", f"{address}:{PORT}")
        if rank > 0:
            return int(meeting.get("status"))
        environ |= {"RAY_ADDRESS": f"{address}:{PORT}", "WORKERS": str(hosts)}
        status = subprocess.run([sys.executable, job, *arguments], env=environ, check=False).returncode
        meeting.set("status", str(status))
        return status
    finally:
        node.terminate()
        node.wait()
        if rank == 0:
            shutil.rmtree(environ["RAY_TMPDIR"], ignore_errors=True)


def await_start(node: subprocess.Popen[str]) -> None:
    """Returns as soon as a node runs. Its few later lines stay in the pipe."""
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        lines.append(line)
        if "Ray runtime started" in line:
            return
    raise RuntimeError("a node of Ray ended:\n" + "".join(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
