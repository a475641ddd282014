"""A small network on one Linux machine: hosts are network namespaces, joined by a switch in one of its own.

Each host NIC is a veth pair; its two ends carry the same shaper: HTB with one class, and a short pfifo as the queue of
the NIC on the host's side and as the switch buffer on the port's side. HTB because TBF drops segmentation-offloaded
super-packets. Loss is an iptables rule on INPUT, behind the link: a lost packet has used its share of the rate. Needs
root, iproute2, iptables and ethtool; nothing of the machine's own interfaces or addresses is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .link import Link

_PREFIX = "cl"
_TOOLS = ("ip", "tc", "iptables", "ethtool", "unshare", "nsenter")
_ALLOWED_TCP_CC = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_OFFLOADS = ("tso", "gso", "gro", "tx-udp-segmentation")
_serial = itertools.count()


class NamespaceError(RuntimeError):
    """The network cannot be built here; the text says what is missing."""


def missing() -> str | None:
    """Why namespaces cannot be made on this machine, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _call(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NamespaceError(f"{command}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _names() -> list[str]:
    return [line.split()[0] for line in _call("ip netns list").splitlines() if line]


def remove_stale() -> list[str]:
    """Deletes what a crashed run left: namespaces with our prefix whose process is gone. Returns their names."""
    stale = []
    for name in _names():
        owner = re.match(rf"{_PREFIX}(\d+)-", name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            _call(f"ip netns delete {name}")
            stale.append(name)
    return stale


class Namespaces:
    """`with Namespaces(4, rate_bps=200e6, loss=0.01) as network:` builds the hosts and removes them again.

    The keywords are those of `Link`. Raises NamespaceError when the machine or the user cannot do it, ValueError on
    values out of range.
    """

    def __init__(self, hosts: int = 2, **link: Any) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts {hosts}: expected 1 to 250")
        self.link = Link(**link)
        self.hosts = hosts
        self._prefix = f"{_PREFIX}{os.getpid()}-{next(_serial)}"
        self._anchors: list[subprocess.Popen[str]] = []
        self._tcp_cc_before: str | None = None

    def __enter__(self) -> Namespaces:
        reason = missing()
        if reason is not None:
            raise NamespaceError(reason)
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def name(self, host: int) -> str:
        """The namespace's name, for `ip netns exec`."""
        return f"{self._prefix}h{host}"

    @property
    def switch(self) -> str:
        """The name of the namespace that holds the bridges."""
        return f"{self._prefix}sw"

    def interface(self, nic: int = 0) -> str:
        """A host's interface, the same name on every host."""
        return f"eth{nic}"

    def address(self, host: int, nic: int = 0) -> str:
        """A host's IPv4 address (RFC 1918; it exists only inside the namespaces). NIC k is in subnet 10.87.k.0/24."""
        return f"10.87.{nic}.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on `host`, in the current directory."""
        # setns into the anchor, so that all processes of a host share its /dev/shm and host name
        anchor = str(self._anchors[host].pid)
        inside = ["env", "--chdir", str(Path.cwd()), *command]
        return ["nsenter", "--target", anchor, "--net", "--uts", "--ipc", "--mount", *inside]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts `command` on `host`; the options are those of subprocess.Popen. The caller ends the process."""
        return subprocess.Popen(self.command(host, command), **options)

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Runs `command` on `host` and returns what it printed. Raises NamespaceError when it fails."""
        environment = None if env is None else {**os.environ, **env}
        done = subprocess.run(self.command(host, command), capture_output=True, text=True, env=environment)
        if done.returncode:
            raise NamespaceError(f"host {host}: {' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def allow_tcp_cc(self, algorithms: Iterable[str]) -> None:
        """Lets namespaces choose these TCP congestion controls.

        The kernel keeps one list for the whole machine and lets a namespace use only what is on it, so this is the one
        setting outside the namespaces that is changed. `close` puts it back, unless another run may rely on it by then.
        """
        allowed = _ALLOWED_TCP_CC.read_text().split()
        extra = [algorithm for algorithm in algorithms if algorithm not in allowed]
        if not extra:
            return
        try:
            _ALLOWED_TCP_CC.write_text(" ".join([*allowed, *extra]))
        except OSError as error:
            raise NamespaceError(f"TCP congestion control {' '.join(extra)}: not in this kernel ({error})") from error
        self._tcp_cc_before = " ".join(allowed)

    def close(self) -> None:
        """Removes everything; idempotent, and safe after a failed build."""
        for anchor in self._anchors:
            anchor.kill()
            anchor.communicate()
        self._anchors.clear()
        if missing() is not None:
            return
        for name in _names():
            if name.startswith(self._prefix):
                with contextlib.suppress(NamespaceError):
                    _call(f"ip netns delete {name}")
        if self._tcp_cc_before is not None and not any(re.match(rf"{_PREFIX}\d+-", name) for name in _names()):
            _ALLOWED_TCP_CC.write_text(self._tcp_cc_before)
        self._tcp_cc_before = None

    def _build(self) -> None:
        _call(f"ip netns add {self.switch}")
        for nic in range(self.link.nics):
            # no spanning tree and no address: a plain learning switch
            _call(f"ip -n {self.switch} link add br{nic} type bridge")
            _call(f"ip -n {self.switch} link set br{nic} up")
        for host in range(self.hosts):
            name = self.name(host)
            _call(f"ip netns add {name}")
            _call(f"ip -n {name} link set lo up")
            for nic in range(self.link.nics):
                self._connect(host, nic)
            if self.link.loss:
                # every protocol alike: the rule must not know which transport is under test
                lose = f"-m statistic --mode random --probability {self.link.loss:.9f} -j DROP"
                _call(f"ip netns exec {name} iptables -A INPUT ! -i lo {lose}")
            self._anchors.append(self._anchor(host))

    def _connect(self, host: int, nic: int) -> None:
        name, interface, port, mtu = self.name(host), self.interface(nic), f"h{host}n{nic}", self.link.mtu
        # both ends are created where they belong: no interface of ours is ever in the machine's own namespace
        peer = f"peer name {interface} mtu {mtu} netns {name}"
        _call(f"ip -n {self.switch} link add {port} mtu {mtu} type veth {peer}")
        _call(f"ip -n {self.switch} link set {port} master br{nic}")
        _call(f"ip -n {name} address add {self.address(host, nic)}/24 dev {interface}")
        for namespace, device in ((self.switch, port), (name, interface)):
            if not self.link.offloads:
                switches = " ".join(f"{offload} off" for offload in _OFFLOADS)
                _call(f"ip netns exec {namespace} ethtool -K {device} {switches}")
            if self.link.rate_bps is not None:
                self._shape(namespace, device, self.link.rate_bps)
            _call(f"ip -n {namespace} link set {device} up")

    def _shape(self, namespace: str, device: str, rate_bps: float) -> None:
        add = f"add dev {device}"
        rate = f"rate {rate_bps:.0f}bit burst 64k quantum {self.link.mtu + 14}"
        _call(f"tc -n {namespace} qdisc {add} root handle 1: htb default 1")
        _call(f"tc -n {namespace} class {add} parent 1: classid 1:1 htb {rate}")
        _call(f"tc -n {namespace} qdisc {add} parent 1:1 pfifo limit {self.link.buffer_packets}")

    def _anchor(self, host: int) -> subprocess.Popen[str]:
        """A process that holds the host's namespaces: its own host name, IPC and /dev/shm beside the network.

        Without them, ranks on different "hosts" could share memory and the link would not be measured at all. It ends
        when its standard input closes, so it cannot outlive this process.
        """
        script = f"mount -t tmpfs tmpfs /dev/shm && hostname {self.name(host)} && echo ready && exec cat"
        anchor = subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), "unshare", "--uts", "--ipc", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if anchor.stdout is None or anchor.stdout.readline() != "ready\n":
            anchor.kill()
            anchor.communicate()
            raise NamespaceError(f"host {host}: cannot set up its own host name and /dev/shm")
        return anchor
