"""torchrun's summary ends with the error of commlayer that ended a process."""

import json
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from commlayer.errors import CommError, PeerLostError
from commlayer.frontend.group.uncaught import record, text_of
from tests import ranks

JOB = """
    import os
    import torch, torch.distributed as dist

    dist.init_process_group("commlayer")
    tensor = torch.ones(5 + dist.get_rank())
    dist.all_reduce(tensor)
"""


def test_the_summary_of_torchrun_has_the_error(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(command, env=ranks.script_environ(), capture_output=True, text=True, timeout=250)
    summary = ended.stderr.partition("ChildFailedError")[2].partition("Root Cause")[2]
    assert "MismatchError: rank " in summary, ended.stderr
    assert "rank 1 called all_reduce 1 of float32 [6]" in summary
    assert f"raised in <module> ({script}:7)" in summary


def test_a_record_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    record("first", CommError(), path)
    record("second", CommError(), path)
    assert json.loads(path.read_text())["message"]["message"] == "first"
    record("third", CommError(), tmp_path / "gone" / "error.json")


@ranks.on(1)
def test_no_part_of_a_record_is_read(rank: int, size: int) -> None:
    """torchrun, which reads the file as soon as any process has ended, would end with a JSONDecodeError itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "error.json"
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        record("x" * 200, CommError(), path)
        assert list(path.parent.iterdir()) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        record("x" * 200, CommError(), path)
        assert list(path.parent.iterdir()) == [path]


def test_errors_within_backward_have_another_type() -> None:
    assert text_of(PeerLostError("rank 1 of group '0': gone")) == "PeerLostError: rank 1 of group '0': gone"
    torchs = RuntimeError("Got the following error: MismatchError: rank 3 of group '0': disagree\n\nAt:\n  work.py")
    assert text_of(torchs) == "MismatchError: rank 3 of group '0': disagree"
    assert text_of(ValueError("ConfigError: of another package")) == ""
