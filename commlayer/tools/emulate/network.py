"""A small network on one Linux machine: hosts are network namespaces, joined by a switch in one of its own.

Each host NIC is a veth pair with the same queues (`link.py`) at both ends: one is the NIC's queue, the other the buffer
of the switch port. Loss is behind the link, where packets arrive, and so is delay with netem; without, packets are held
before the switch port. This needs root, iproute2, nftables and ethtool, and leaves the machine's own interfaces and
addresses alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import delay, hosts, link, loss, namespace, tcp
from .event import Event
from .link import Link
from .namespace import EmulationError, call
from .scenario import HOSTS_MAX, Scenario

_OFFLOADS = ("tso", "gso", "gro", "tx-udp-segmentation")
_serial = itertools.count()


class Network:
    """`with Network(scenario) as network:` builds the hosts and removes them again.

    Raises EmulationError if the machine or the user cannot. `Stress` adds traffic and the timetable.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._prefix = namespace.prefix(next(_serial))
        self._links = [scenario.host_links(host) for host in range(scenario.hosts)]  # as they are now
        self._sources: list[str] = []
        self._anchors: list[subprocess.Popen[str]] = []
        self._delay = delay.Delay()
        self._netem: bool | None = None

    def __enter__(self) -> Network:
        reason = namespace.missing()
        if reason is not None:
            raise EmulationError(reason)
        namespace.remove_stale()
        tcp.put_back()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- names and addresses

    def name(self, host: int) -> str:
        """Name of the host's namespace, for `ip netns exec`."""
        return f"{self._prefix}h{host}"

    @property
    def switch(self) -> str:
        """Name of the namespace with the bridges."""
        return f"{self._prefix}sw"

    @property
    def interfaces(self) -> list[str]:
        """A host's interfaces, the same names on every host."""
        return [f"eth{nic}" for nic in range(len(self.scenario.nics))]

    def address(self, host: int, nic: int = 0) -> str:
        """A host's IPv4 address (RFC 1918; it exists only inside the namespaces). NIC k is in subnet 10.87.k.0/24."""
        return f"10.87.{nic}.{host + 1}"

    @property
    def delayed_by(self) -> str | None:
        """The source of the delay: "netem" or "netfilter queue"; None without delay."""
        return None if self._netem is None else "netem" if self._netem else "netfilter queue"

    # ---- processes

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on `host`, in the current directory."""
        # the anchor's namespaces: all processes of a host share /dev/shm and host name
        anchor = str(self._anchors[host].pid)
        inside = ["env", "--chdir", str(Path.cwd()), *command]
        return ["nsenter", "--target", anchor, "--net", "--uts", "--ipc", "--mount", *inside]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts `command` on `host`; the options are those of subprocess.Popen. The caller ends the process."""
        return subprocess.Popen(self.command(host, command), **options)

    def run(self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Runs `command` on `host` and returns its output. Raises EmulationError if it fails."""
        environment = None if env is None else {**os.environ, **env}
        done = subprocess.run(self.command(host, command), capture_output=True, text=True, env=environment)
        if done.returncode:
            raise EmulationError(f"host {host}: {' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def rendezvous(self) -> dict[str, str]:
        """The variables by which ranks find each other: address of torch's store, interfaces of gloo and commlayer."""
        return {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",  # free: the namespace is our own
            "GLOO_SOCKET_IFNAME": ",".join(self.interfaces),
            "COMMLAYER_IFNAME": ",".join(self.interfaces),
        }

    # ---- changes while it runs

    def current_link(self, host: int, nic: int) -> Link:
        """The link as it is now, after the events so far."""
        return self._links[host][nic]

    def switch_port(self, host: int, nic: int) -> str:
        """The switch's interface to a NIC, in namespace `switch`."""
        return f"h{host}n{nic}"

    def apply(self, event: Event) -> None:
        """Applies the event now, whatever its time."""
        for nic in self.scenario.nics_of(event.nic):
            now, port = self._links[event.host][nic], self.switch_port(event.host, nic)
            if event.action in ("link_down", "link_up"):
                # the switch's end goes down: the host loses its carrier, as with a cable, and keeps address and route
                call(f"ip -n {self.switch} link set {port} {event.action.removeprefix('link_')}")
            elif event.rate_bps is not None:
                now = dataclasses.replace(now, rate_bps=event.rate_bps)
                self._queues(event.host, nic, link.new_rate(now, "{}"))
            elif event.loss is not None:
                now = dataclasses.replace(now, loss=event.loss, loss_burst_packets=event.loss_burst_packets)
            self._links[event.host][nic] = now
        if event.action == "loss":
            self._filter(event.host)

    def add_source(self, nic: int, of: Link) -> str:
        """Adds a host that only sends traffic, over the link `of`. Returns the name of its namespace."""
        number = len(self._sources)
        if HOSTS_MAX + number >= 254:
            raise EmulationError(f"too many senders of cross traffic and incast: use at most {254 - HOSTS_MAX}")
        name = f"{self._prefix}s{number}"
        self._sources.append(name)
        call(f"ip netns add {name}")
        self._connect(name, f"s{number}n{nic}", nic, self.address(HOSTS_MAX + number, nic), of)
        return name

    def close(self) -> None:
        """Removes the network; idempotent, and safe after a failed build."""
        for anchor in self._anchors:
            anchor.kill()
            anchor.communicate()
        self._anchors.clear()
        self._delay.close()
        if namespace.missing() is not None:
            return
        for name in namespace.names():
            if name.startswith(self._prefix):
                with contextlib.suppress(EmulationError):
                    namespace.remove(name)
        tcp.put_back()

    # ---- building

    def _build(self) -> None:
        call(f"ip netns add {self.switch}")
        self._forward_unfiltered()
        tcp.allow(self.scenario.tcp_congestion_control)
        for nic in range(len(self.scenario.nics)):
            # a plain learning switch, without spanning tree and address
            call(f"ip -n {self.switch} link add br{nic} type bridge")
            call(f"ip -n {self.switch} link set br{nic} up")
        for host, links in enumerate(self._links):
            name = self.name(host)
            call(f"ip netns add {name}")
            call(f"ip -n {name} link set lo up")
            for nic, of in enumerate(links):
                self._connect(name, self.switch_port(host, nic), nic, self.address(host, nic), of)
            if any(of.is_filtered for of in links):
                self._filter(host)
            if any(of.delay_ms for of in links):
                self._hold(host)
            self._anchors.append(self._anchor(host))
        self._delay.start()

    def _forward_unfiltered(self) -> None:
        # a switch has no packet filter; without the machine's, a packet takes a tenth less CPU time
        with namespace.inside(self.switch):
            for switch in Path("/proc/sys/net/bridge").glob("bridge-nf-call-*"):  # exist only with br_netfilter
                switch.write_text("0")

    def _connect(self, name: str, port: str, nic: int, address: str, of: Link) -> None:
        interface = f"eth{nic}"
        # both ends are created in their namespaces, never in the machine's own
        peer = f"peer name {interface} mtu {of.mtu} netns {name}"
        call(f"ip -n {self.switch} link add {port} mtu {of.mtu} type veth {peer}")
        call(f"ip -n {self.switch} link set {port} master br{nic}")
        call(f"ip -n {name} address add {address}/24 dev {interface}")
        for where, device in ((self.switch, port), (name, interface)):
            if not of.offloads:
                switches = " ".join(f"{offload} off" for offload in _OFFLOADS)
                call(f"ip netns exec {where} ethtool -K {device} {switches}")
            if of.rate_bps is not None:
                call(f"tc -n {where} -batch -", "\n".join([*link.queues(of, device), ""]))
            call(f"ip -n {where} link set {device} up")

    def _queues(self, host: int, nic: int, commands: list[str]) -> None:
        for where, device in ((self.switch, self.switch_port(host, nic)), (self.name(host), f"eth{nic}")):
            call(f"tc -n {where} -batch -", "\n".join(command.format(device) for command in [*commands, ""]))

    def _filter(self, host: int) -> None:
        rules = loss.ruleset(dict(zip(self.interfaces, self._links[host], strict=True)))
        call(f"ip netns exec {self.name(host)} nft -f -", rules)

    def _hold(self, host: int) -> None:
        name = self.name(host)
        if self._netem is None:
            self._netem = delay.has_netem(name)
        for nic, of in enumerate(self._links[host]):
            if of.delay_ms and self._netem:
                delay.add_netem(name, nic, self.interfaces[nic], of)
            elif of.delay_ms:
                self._delay.add(self.switch, self.address(host, nic), of.delay_ms)

    def _anchor(self, host: int) -> subprocess.Popen[str]:
        """A process that holds the host's namespaces: host name, /etc/hosts, IPC and /dev/shm beside the network.

        Without the last two, ranks on different hosts could share memory and bypass the link. The process ends when its
        standard input closes, so it cannot outlive this process.
        """
        script = (
            "mount -t tmpfs tmpfs /dev/shm"
            f' && printf %s "$1" >/dev/shm/hosts && mount --bind /dev/shm/hosts {hosts.FILE} && rm /dev/shm/hosts'
            f" && hostname {hosts.name(host)} && echo ready && exec cat"
        )
        names = hosts.table(self.scenario.hosts, len(self.scenario.nics), self.address)
        shell = ["unshare", "--uts", "--ipc", "--mount", "sh", "-c", script, "sh", names]
        anchor = subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), *shell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if anchor.stdout is None or anchor.stdout.readline() != "ready\n":
            anchor.kill()
            anchor.communicate()
            raise EmulationError(f"host {host}: cannot set up its own host name, {hosts.FILE} and /dev/shm")
        return anchor
