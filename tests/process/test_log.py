"""The log of a job: its start, fallbacks to gloo, and its end."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import ranks

JOB = """
    import os, sys
    import torch, torch.distributed as dist
    import commlayer

    dist.init_process_group("commlayer")
    pair = dist.new_group([0, 1], pg_options=commlayer.Options(commlayer.Policy(priority=1)))
    for _ in range(40):
        dist.all_reduce(torch.ones(1 << 18), group=pair)
    for _ in range(3):
        dist.all_reduce(torch.eye(3).to_sparse())
        try:
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        except RuntimeError:
            pass  # gloo's
    dist.barrier()
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()
"""


def lines_of(tmp_path: Path, end: str, **environ: str) -> list[list[str]]:
    """The lines of each of two ranks on stderr."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = []
    for rank in range(2):
        job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "COMMLAYER_IFNAME": "lo", **environ}
        command = [sys.executable, str(script), end]
        processes.append(subprocess.Popen(command, env=ranks.script_environ(**job), stderr=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    return [[line for line in text.splitlines() if " commlayer rank " in line] for text in texts]


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_job_is_told_from_its_start_to_its_end(tmp_path: Path, end: str) -> None:
    found = lines_of(tmp_path, end, COMMLAYER_LOG="info", COMMLAYER_SHM="0")
    for rank, lines in enumerate(found):
        assert all(f"commlayer rank {rank} on " in line for line in lines)
        text = "\n".join(lines)
        assert ": commlayer 0." in lines[0]
        assert "bytes; settings: ifname=('lo',), shm=False, log=info" in lines[1]
        assert "lo 127.0.0.1:" in lines[2]
        assert "buffers of " in lines[2]
        assert text.count("group '0': 2 ranks on 2 hosts: ") == 1
        assert f"path lo to rank {1 - rank} on " in text
        assert "all_reduce by exchange at 4 KiB, exchange at 64 KiB, direct at 1 MiB, direct at 64 MiB" in text
        assert text.count(": policy defaults") == 1
        assert text.count(": policy priority=1") == 1
        assert text.count("allreduce goes to gloo: sparse tensors") == 1
        assert text.count("allreduce goes to gloo: no kernel for BAND of float32") == 1
        assert text.count(" end: ") == 1
        assert " end: 41 operations of 40 MiB; " in lines[-1]
        assert "; network: " in lines[-1]
        named = rf"; slowest peer: rank {1 - rank} on \S+, waited for \S+ s \(\d+%\)$"
        assert re.search(named, lines[-1]) or "slowest" not in lines[-1]
    assert any("slowest peer" in lines[-1] for lines in found)


def test_without_the_variable_nothing_is_told(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "exit") == [[], []]
