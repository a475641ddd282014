"""Tries `commlayer probe --hosts` with a real sshd on each of several emulated hosts (as root).

    python -m bench.probe_ssh [--sshd /usr/sbin/sshd]

A key of its own lets ssh in. The trial measures a clean network, asks for a host that does not exist, and then stops
one sshd: each time the status and the output must be right.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness.options import options
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario

HOSTS = 3
QUICK = ("--packets", "300", "--burst", "400K", "--ports", "4")
CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""


def make_keys(folder: Path) -> None:
    """Keys of the hosts and of the user."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)


@contextlib.contextmanager
def servers(network: Network, sshd: Path, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """An sshd on each host. Each has a mount namespace with the user and the folder that sshd wants when root starts
    it."""
    users = Path("/etc/passwd").read_text(encoding="utf-8")
    (folder / "passwd").write_text(f"{users}sshd:x:64999:64999::/run/sshd:/bin/false\n", encoding="utf-8")
    (folder / "config").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    prepare = f"mount --bind {folder}/passwd /etc/passwd; mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd"
    start = f"{prepare}; exec {sshd} -D -e -f {folder}/config"
    with contextlib.ExitStack() as stack:
        found = []
        for host in range(HOSTS):
            log = stack.enter_context((folder / f"sshd{host}.log").open("wb"))
            process = network.popen(host, ["unshare", "--mount", "sh", "-c", start], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(process)
        yield found


def probe(network: Network, folder: Path, hosts: str) -> tuple[int, str, str]:
    """Status, output and errors of the command, started on the first host."""
    options = f"-i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known -o ConnectTimeout=10"
    command = [sys.executable, "-m", "commlayer", "probe", "--hosts", hosts, *QUICK]
    command += ["--ssh", f"ssh -o BatchMode=yes {options}", "--json", str(folder / "probe.json")]
    done = subprocess.run(network.command(0, command), capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def wait_until_open(network: Network, folder: Path) -> None:
    """Waits until every sshd takes connections."""
    probe_one = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1)"
    end = time.monotonic() + 20
    for host in range(HOSTS):
        command = network.command(0, [sys.executable, "-c", probe_one, f"host{host}"])
        while subprocess.run(command, capture_output=True).returncode:
            if time.monotonic() > end:
                raise SystemExit((folder / f"sshd{host}.log").read_text())
            time.sleep(0.1)


def main() -> None:
    """Runs the trial; exits with a message if something is wrong."""
    parser = options(__doc__)
    parser.add_argument("--sshd", type=Path, default=Path("/usr/sbin/sshd"))
    sshd: Path = parser.parse_args().sshd
    if not sshd.exists():
        raise SystemExit(f"{sshd}: there is no sshd; install openssh-server, or name one with --sshd")
    scenario = Scenario(hosts=HOSTS, nics=(Link(rate_bps=100e6),))
    with tempfile.TemporaryDirectory() as name, Network(scenario) as network:
        folder = Path(name)
        make_keys(folder)
        with servers(network, sshd, folder) as running:
            wait_until_open(network, folder)
            start_s = time.monotonic()
            status, out, error = probe(network, folder, "host0,root@host1,host2")
            print(f"three hosts: status {status} after {time.monotonic() - start_s:.0f} s; {out.splitlines()[:1]}")
            if status != 0 or not out.startswith("No findings"):
                raise SystemExit(f"{out}\n{error}")
            rates = [path["rate_bps"] / 1e6 for path in json.loads((folder / "probe.json").read_text())["paths"]]
            print(f"rates in Mbit/s: {', '.join(f'{rate:.0f}' for rate in rates)}")
            for what, hosts in (
                ("a name that does not resolve", "host0,absent"),
                ("a host without sshd", "host0,host2"),
            ):
                if hosts.endswith("host2"):
                    running[2].kill()
                    running[2].wait()
                start_s = time.monotonic()
                status, out, error = probe(network, folder, hosts)
                last = error.strip().splitlines()[-1]
                print(f"{what}: status {status} after {time.monotonic() - start_s:.0f} s; {last}")
                if status != 1 or hosts.partition(",")[2] not in last:
                    raise SystemExit(f"{out}\n{error}")


if __name__ == "__main__":
    main()
