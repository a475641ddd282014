"""Networks that `commlayer emulate` does not make: parallel links behind routers, and two switches with one uplink."""

import contextlib
import itertools
from collections.abc import Iterator

from commlayer.tools.emulate.namespace import call, prefix, remove

_serials = itertools.count(900)


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[dict[str, str]]:
    """Network namespaces by short names, removed at the end."""
    start = prefix(next(_serials))
    made = {name: f"{start}-{name}" for name in names}
    try:
        for name in made.values():
            call(f"ip netns add {name}")
            call(f"ip -n {name} link set lo up")
            for setting in ("conf.all.rp_filter=0", "conf.default.rp_filter=0", "ip_forward=1"):
                call(f"ip netns exec {name} sysctl -qw net.ipv4.{setting}")
        yield made
    finally:
        for name in made.values():
            with contextlib.suppress(RuntimeError):
                remove(name)


def join(one: str, nic: str, other: str, other_nic: str) -> None:
    """Joins two namespaces by a pair of interfaces."""
    call(f"ip -n {one} link add {nic} type veth peer name {other_nic} netns {other}")
    for name, interface in ((one, nic), (other, other_nic)):
        call(f"ip netns exec {name} ethtool -K {interface} tso off gso off gro off")
        call(f"ip -n {name} link set {interface} up")


def limit(name: str, nic: str, rate_mbit_s: int) -> None:
    """Limits what an interface sends, with a queue of 100 packets."""
    call(f"tc -n {name} qdisc add dev {nic} root handle 1: htb default 1")
    call(f"tc -n {name} class add dev {nic} parent 1: classid 1:1 htb rate {rate_mbit_s}mbit quantum 1514 burst 3000")
    call(f"tc -n {name} qdisc add dev {nic} parent 1:1 bfifo limit 151400")


@contextlib.contextmanager
def parallel_links(rate_mbit_s: int, lost_percent: int) -> Iterator[list[str]]:
    """Two hosts behind two routers. Either host sends a packet to the router that its ports choose; the second router's
    packets to the second host get lost in part. The hosts have 10.99.0.1 and 10.99.0.2 on an interface svc0."""
    with namespaces("a", "b", "r0", "r1") as spaces:
        ends = [spaces["a"], spaces["b"]]
        for host, end in enumerate(ends):
            call(f"ip -n {end} link add svc0 type veth peer name svc1")
            call(f"ip -n {end} link set svc1 up")
            call(f"ip -n {end} addr add 10.99.0.{host + 1}/32 dev svc0")
            call(f"ip -n {end} link set svc0 up")
            call(f"ip netns exec {end} sysctl -qw net.ipv4.fib_multipath_hash_policy=1")
            hops = ""
            for link in range(2):
                router, network = spaces[f"r{link}"], f"10.99.{10 * (host + 1) + link}"
                join(end, f"link{link}", router, f"host{host}")
                call(f"ip -n {end} addr add {network}.1/30 dev link{link}")
                call(f"ip -n {router} addr add {network}.2/30 dev host{host}")
                call(f"ip -n {router} route add 10.99.0.{host + 1}/32 via {network}.1")
                limit(end, f"link{link}", rate_mbit_s)
                limit(router, f"host{host}", rate_mbit_s)
                hops += f" nexthop via {network}.2"
            call(f"ip -n {end} route add 10.99.0.{2 - host}/32 src 10.99.0.{host + 1}{hops}")
        rule = f'iifname "link1" numgen random mod 100 < {lost_percent} drop'
        chain = f"chain in {{\ntype filter hook prerouting priority 0\n{rule}\n}}"
        call(f"ip netns exec {ends[1]} nft -f -", f"table ip loss {{\n{chain}\n}}\n")
        yield ends


@contextlib.contextmanager
def two_switches(rate_mbit_s: int) -> Iterator[list[str]]:
    """Four hosts, two at each of two switches; the switches have one link between them, as fast as those of the hosts.
    The hosts have 10.98.0.1 to 10.98.0.4 on eth0."""
    with namespaces("h0", "h1", "h2", "h3", "s0", "s1") as spaces:
        hosts = [spaces[f"h{host}"] for host in range(4)]
        switches = [spaces["s0"], spaces["s1"]]
        for switch in switches:
            call(f"ip -n {switch} link add br0 type bridge")
            call(f"ip -n {switch} link set br0 up")
        join(switches[0], "uplink", switches[1], "uplink")
        for switch in switches:
            call(f"ip -n {switch} link set uplink master br0")
            limit(switch, "uplink", rate_mbit_s)
        for host, name in enumerate(hosts):
            switch = switches[host // 2]
            join(name, "eth0", switch, f"port{host}")
            call(f"ip -n {switch} link set port{host} master br0")
            call(f"ip -n {name} addr add 10.98.0.{host + 1}/24 dev eth0")
            limit(name, "eth0", rate_mbit_s)
            limit(switch, f"port{host}", rate_mbit_s)
        yield hosts
