import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.ranks import script_environ
from tests.world import until

pytestmark = [pytest.mark.needs_root, pytest.mark.slow]


def emulate(tmp_path: Path, scenario: str, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    path = tmp_path / "s.toml"
    path.write_text(scenario)
    return [sys.executable, "-m", "commlayer", "emulate", str(path), *options, "--", *command]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=script_environ(), capture_output=True, text=True, timeout=250)


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"cl{pid}-")]


def test_a_wrong_scenario_is_refused_before_anything_runs(tmp_path: Path) -> None:
    event = "[[event]]\nat_s = 0\naction = 'loss'\nhost = 0\nloss = 0.1\nloss_burst_packets = 0"
    done = run(emulate(tmp_path, event, "true"))
    assert done.returncode == 2
    assert "event[0].loss_burst_packets = 0.0: use 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_have_their_environment_and_prefix(tmp_path: Path) -> None:
    show = 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $COMMLAYER_IFNAME"'
    command = f"{show}; test $GROUP_RANK != 1 || echo no-newline-at-the-end >&2"
    done = run(emulate(tmp_path, "ranks_per_host = 2\n[[nic]]\n[[nic]]\n", "sh", "-c", command))
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] {rank}/4 {rank % 2}/2 10.87.0.1 eth0,eth1 eth0,eth1" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected
    assert {"[2] no-newline-at-the-end", "[3] no-newline-at-the-end"} <= set(done.stderr.splitlines())


def test_torch_ranks_find_each_other(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.ones(3) * d.get_rank();"
        "d.all_reduce(t); print(t.tolist()); d.destroy_process_group()"
    )
    done = run(emulate(tmp_path, "hosts = 2", sys.executable, "-c", script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [1.0, 1.0, 1.0]" for rank in range(2)]


def test_torchrun_meets_by_host_name(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import socket, torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.ones(1);"
        "d.all_reduce(t); print(socket.gethostname(), t.item()); d.destroy_process_group()"
    )
    meeting = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host0:29400"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting.split(), str(script)]
    done = run(emulate(tmp_path, "hosts = 2\n[[nic]]\n[[nic]]\n", *torchrun))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] host0 2.0", "[1] host1 2.0"]


def test_every_nic_has_a_name_and_the_machine_keeps_its_own(tmp_path: Path) -> None:
    before = Path("/etc/hosts").read_text()
    done = run(emulate(tmp_path, "hosts = 2\n[[nic]]\n[[nic]]\n", "getent", "hosts", "host0", "host1-eth1"))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted(lines) == [
        [f"[{rank}]", *names] for rank in range(2) for names in (["10.87.0.1", "host0"], ["10.87.1.2", "host1-eth1"])
    ]
    assert Path("/etc/hosts").read_text() == before


@pytest.mark.parametrize(
    ("ending", "status", "how"),
    [
        ("exit 7", 7, "exit status 7"),
        ("kill -9 $$", 128 + signal.SIGKILL, "ended by SIGKILL"),
        ("kill -40 $$", 128 + 40, "ended by signal 40"),
    ],
)
def test_the_first_failure_is_the_status_and_the_others_are_ended(
    tmp_path: Path, ending: str, status: int, how: str
) -> None:
    command = emulate(
        tmp_path, "hosts = 2", "sh", "-c", f"test $RANK = 0 && exec sleep 1000; {ending}", options=("--grace", "0.1")
    )
    start_s = time.monotonic()
    done = run(command)
    assert done.returncode == status
    assert f"rank 1 (host 1) was the first to fail: {how}; ended 0.1 s later: rank 0\n" in done.stderr
    assert time.monotonic() - start_s < 100


def test_no_failed_rank_is_named_where_none_failed(tmp_path: Path) -> None:
    done = run(emulate(tmp_path, "hosts = 2", "true"))
    assert (done.returncode, "fail" in done.stderr) == (0, False)


def test_events_are_told(tmp_path: Path) -> None:
    scenario = 'hosts = 1\n[[event]]\nat_s = 0.1\naction = "link_down"\nhost = 0\n'
    carrier = "/sys/class/net/eth0/carrier"
    done = run(
        emulate(tmp_path, scenario, "sh", "-c", f"until grep -q 0 {carrier}; do sleep 0.05; done; cat {carrier}")
    )
    assert done.stdout == "[0] 0\n"
    assert "link_down at host 0, all NICs" in done.stderr


def test_a_killed_emulation_takes_its_ranks_along_and_clean_removes_the_rest(tmp_path: Path) -> None:
    command = emulate(tmp_path, "hosts = 2", "sh", "-c", "echo $$; exec sleep 1000")
    with subprocess.Popen(command, cwd=ROOT, env=script_environ(), stdout=subprocess.PIPE, text=True) as emulation:
        assert emulation.stdout is not None
        ranks = [int(emulation.stdout.readline().split()[1]) for _ in range(2)]
        emulation.kill()
    assert len(namespaces_of(emulation.pid)) == 3
    until(lambda: not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks))
    done = run([sys.executable, "-m", "commlayer", "emulate", "--clean"])
    assert done.returncode == 0, done.stderr
    assert namespaces_of(emulation.pid) == []


def test_a_terminated_emulation_leaves_nothing(tmp_path: Path) -> None:
    command = emulate(tmp_path, "hosts = 1", "sh", "-c", "echo ready; sleep 1000 & wait")
    with subprocess.Popen(command, cwd=ROOT, env=script_environ(), stdout=subprocess.PIPE, text=True) as emulation:
        assert emulation.stdout is not None
        assert emulation.stdout.readline() == "[0] ready\n"
        emulation.terminate()
    assert emulation.returncode == 128 + signal.SIGTERM
    assert namespaces_of(emulation.pid) == []
