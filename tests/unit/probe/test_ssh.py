import shlex
import time
from pathlib import Path

import pytest

from commlayer.tools.probe.command import Spec
from commlayer.tools.probe.meeting import MeetingError
from commlayer.tools.probe.path import Effort
from commlayer.tools.probe.ssh import Remote, run

SPEC = Spec(partners=3, effort=Effort(burst_bytes=1000, train_packets=77, flows=5))


def test_the_command_of_a_rank() -> None:
    remote = Remote(["me@a", "b"], ["ssh", "-4"], "/opt/my python", 29501)
    *shell, words = remote.command(1, SPEC, {"COMMLAYER_IFNAME": "eth*", "HOME": "/root"})
    assert shell == ["ssh", "-4", "b"]
    variables = ["COMMLAYER_IFNAME=eth*", "RANK=1", "WORLD_SIZE=2", "MASTER_PORT=29501", "MASTER_ADDR=a"]
    start = ["/opt/my python", "-m", "commlayer", "probe"]
    options = ["--partners", "3", "--burst", "1000", "--packets", "77", "--ports", "5", "--json", "-"]
    assert shlex.split(words.partition("; ")[2]) == ["env", *variables, *start, *options]


@pytest.mark.parametrize(("shell", "said"), [("false", "[ab] ended with status 1"), ("/absent/ssh", "--ssh: ")])
def test_a_host_that_cannot_be_reached_is_named(shell: str, said: str) -> None:
    with pytest.raises(MeetingError, match=said):
        run(Remote(["a", "b"], [shell], "python3", 29500), SPEC)


def test_a_host_that_reports_something_else_is_named() -> None:
    with pytest.raises(MeetingError, match="a: no report"):
        run(Remote(["a", "b"], ["echo"], "python3", 29500), SPEC)


def test_one_absent_host_ends_the_others(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ntest "$1" = absent && exit 255\nsleep 1000 & wait\n')
    ssh.chmod(0o755)
    start_s = time.monotonic()
    with pytest.raises(MeetingError, match="absent ended with status 255"):
        run(Remote(["a", "absent"], [str(ssh)], "python3", 29500), SPEC)
    assert time.monotonic() - start_s < 30
