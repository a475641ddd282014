"""A new user's first hour: a wheel, two hosts, and the faults that clusters have. Needs root.

    make wheel && python -m bench.new_user                   every trial
    python -m bench.new_user --only stuck --only slow-link   some of them, with all that they print

Two network namespaces are the hosts, with host names of their own and two NICs: eth0 connects them, eth1 leads nowhere.
Each trial runs torchrun on both, breaks something, and finds the line that names the fault. The times count from the
start of torchrun. docs/new_user.md has the notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.harness.options import options
from tests.wheel.__main__ import environment

ROOT = Path(__file__).parents[1]
JOB = ROOT / "bench/jobs/new_user.py"
NAMES = ("nu-a", "nu-b")
HOSTS = ("hosta", "hostb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
STATIC = f"--master-addr={ADDRESSES[0]} --master-port=29500 --node-rank={{host}}"
C10D = f"--rdzv-backend=c10d --rdzv-endpoint={ADDRESSES[0]}:29400 --rdzv-id=job7 --local-addr={{address}}"
CLOSED = "iptables -A INPUT -i eth0 -p udp"
INFO = {"COMMLAYER_LOG": "info"}
SHAPED = (
    "tc qdisc add dev eth0 root handle 1: htb default 1",
    "tc class add dev eth0 parent 1: classid 1:1 htb rate {rate} burst 64k quantum 1514",
    "tc qdisc add dev eth0 parent 1:1 pfifo limit 256",
)
SLOW = [[command.format(rate=rate) for command in SHAPED] for rate in ("100mbit", "20mbit")]
ENDED = r"step 100: loss"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One fault. `shows`: the line that names it."""

    name: str
    shows: str
    bug: str = "none"
    commands: Sequence[Sequence[str]] = ((), ())
    """Run on each host before the job, or once a line of the output matches `when`."""
    when: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rendezvous: str = STATIC
    steps: int = 100
    command: str = ""
    """This command of commlayer runs instead of the job."""
    limit_s: float = 90.0


def both(*commands: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return commands, commands


UNREACHABLE = r"no UDP packet from rank \d \(host., .* via {nic}\) to rank \d \(host., "
TRIALS = [
    Trial("static", ENDED),
    Trial("c10d", ENDED, rendezvous=C10D),
    Trial("log", r"end: \d+ operations", environ=INFO),
    Trial("firewall", UNREACHABLE.format(nic="eth0"), commands=both(f"{CLOSED} -j DROP")),
    Trial("firewall-one-way", UNREACHABLE.format(nic="eth0"), commands=((), (f"{CLOSED} -j DROP",))),
    Trial(
        "firewall-ports",
        UNREACHABLE.format(nic="eth0"),
        commands=both(f"{CLOSED} --dport 20000:20100 -j ACCEPT", f"{CLOSED} -j DROP"),
    ),
    Trial(
        "firewall-port-range",
        ENDED,
        commands=both(f"{CLOSED} --dport 20000:20100 -j ACCEPT", f"{CLOSED} -j DROP"),
        environ={"COMMLAYER_PORT_RANGE": "20000-20100"},
    ),
    Trial(
        "firewall-later",
        r"PeerLostError: .* its last packet came",
        commands=((), (f"{CLOSED} -j DROP",)),
        when="step 20:",
        steps=20000,
    ),
    Trial(
        "wrong-nic",
        UNREACHABLE.format(nic="eth1"),
        commands=both("ip link set eth1 up"),
        environ={"COMMLAYER_IFNAME": "eth1"},
    ),
    Trial("nic-typo", r"ConfigError: .*eht0", environ={"COMMLAYER_IFNAME": "eht0"}),
    Trial("wrong-nic-too", ENDED, commands=both("ip link set eth1 up")),
    Trial(
        "same-address",
        ENDED,
        commands=both("ip link set eth1 up", "ip addr flush dev eth1", "ip addr add 10.0.2.15/24 dev eth1"),
    ),
    Trial("slow-link", r"on hostb: end: .* filled the link for", commands=SLOW, environ=INFO, steps=20, limit_s=150),
    Trial("slow-link-probe", r"from hostb to hosta carries", commands=SLOW, command="probe"),
    Trial("check", r"no rank computes much slower", command="check"),
    Trial("slow-rank", r"slowest peer: rank 3", bug="slow", environ=INFO),
    Trial("skip", r"rank 3 called", bug="skip"),
    Trial("other", r"rank 3 called", bug="other"),
    Trial("stuck", r"rank 3.*has not called", bug="stuck"),
    Trial("kill", r"PeerLostError: .*rank 3", bug="kill"),
    Trial("late", r"has waited 30 s for rank\(s\) 3", bug="late", limit_s=150),
]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """The two hosts."""
    clean()
    try:
        for host, name in enumerate(NAMES):
            run(f"ip netns add {name}")
            folder = Path("/etc/netns", name)
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{a} {h}" for a, h in zip(ADDRESSES, HOSTS, strict=True))]
            (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link add eth1 type veth peer name nowhere")
            run(f"ip -n {name} addr add 192.168.{77 + host}.1/24 dev eth1")
            run(f"ip -n {name} link set nowhere up")
        run(f"ip -n {NAMES[0]} link add eth0 type veth peer name eth0 netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run(f"ip -n {name} addr add {address}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip netns exec {name} ethtool -K eth0 tso off gso off gro off")
        yield
    finally:
        clean()


def clean() -> None:
    for name in NAMES:
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def torchrun(python: Path, trial: Trial, host: int, folder: str) -> subprocess.Popen[str]:
    """The job on one host, by torchrun of the environment with the wheel."""
    rendezvous = trial.rendezvous.format(host=host, address=ADDRESSES[host])
    launch = f"-m torch.distributed.run --nnodes=2 --nproc-per-node=2 {rendezvous}".split()
    named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[host]} && exec "$@"', "sh"]
    job = [str(JOB), "--bug", trial.bug, "--steps", str(trial.steps)]
    job = [str(python), *launch, *(["-m", "commlayer", trial.command] if trial.command else job)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"OMP_NUM_THREADS": "1", **trial.environ}
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[host], *named, *job],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def breaks(trial: Trial) -> None:
    for host, commands in enumerate(trial.commands):
        for command in commands:
            run(f"ip netns exec {NAMES[host]} {command}")


def attempt(trial: Trial, python: Path) -> tuple[float, float] | None:
    """Runs a trial and prints its output. Returns the seconds until the line that names the fault, from the start of
    torchrun and from the job's first step (or again from the start, if there was none); None without such a line."""
    found: list[tuple[float, float]] = []
    first_step_s: list[float] = []
    broken = threading.Event()

    def follow(process: subprocess.Popen[str], host: int) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            passed_s = time.monotonic() - start
            print(f"{passed_s:6.1f} {HOSTS[host]}| {line.rstrip()}", flush=True)
            if trial.when and re.search(trial.when, line) and not broken.is_set():
                broken.set()
                breaks(trial)
            if "step 0:" in line:
                first_step_s.append(passed_s)
            if re.search(trial.shows, line):
                found.append((passed_s, passed_s - min(first_step_s, default=0.0)))

    with network(), tempfile.TemporaryDirectory(prefix="new-user-") as folder:
        if not trial.when:
            breaks(trial)
        start = time.monotonic()
        processes = [torchrun(python, trial, host, folder) for host in range(2)]
        threads = [threading.Thread(target=follow, args=pair) for pair in zip(processes, range(2), strict=True)]
        for thread in threads:
            thread.start()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, start + trial.limit_s - time.monotonic()))
        clean()
        for thread in threads:
            thread.join()
    return min(found, default=None)


def main() -> int:
    names = options(__doc__, only=[trial.name for trial in TRIALS]).parse_args().only
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise SystemExit("dist/ has no wheel: run `make wheel` first")
    times = {}
    with tempfile.TemporaryDirectory(prefix="new-user-") as folder:
        python = environment(Path(folder, "environment"), wheels[-1])
        for trial in TRIALS:
            if not names or trial.name in names:
                print(f"==== {trial.name}", flush=True)
                times[trial.name] = attempt(trial, python)
    for name, found in times.items():
        print(f"{name:<20} {'NO DIAGNOSIS' if found is None else '{:.1f} s, {:.1f} s after step 0'.format(*found)}")
    return int(None in times.values())


if __name__ == "__main__":
    sys.exit(main())
