"""The link between a NIC and the switch: its rate, queue, loss and delay, and the best goodput on it."""

from __future__ import annotations

from dataclasses import dataclass

from .table import check

RATE_LEAST_BPS, RATE_LIMIT_BPS = 8e3, 1e12
BUFFER_LIMIT_PACKETS = 100_000  # of 9 KB; the kernel counts the bytes of a queue in 32 bits
BURST_LIMIT_PACKETS = 10_000

ETHERNET_HEADER_BYTES = 14
IP_UDP_HEADER_BYTES = 28

_BURST = "64k"  # HTB sends this much at once; with less, a coarse timer would lose rate
_GUARANTEED = "8kbit"  # rate of each class; classes borrow the rest of the link in strict order
_URGENCIES = 8


@dataclass(frozen=True)
class Link:
    """Rate and queue hold for both directions. Loss and delay apply to packets that arrive at the host."""

    rate_bps: float | None = None
    """Bits per second, counted on Ethernet frames without FCS, as HTB counts; None: not shaped. In a file also text:
    "200M", "1G"."""
    loss: float = 0.0
    """Share of arriving IP packets that are lost, TCP and UDP alike. 1: all packets."""
    loss_burst_packets: float = 1.0
    """Mean number of packets lost in a row (two-state model, Gilbert 1960); 1: each is lost independently."""
    delay_ms: float = 0.0
    """Propagation delay, one way."""
    buffer_packets: int = 256
    """Queue in front of the link, at the host and at the switch port, in full-sized packets. The limit is in bytes, so
    a super-packet counts with its size. The default is about that of a shallow commodity switch."""
    not_ect_buffer_packets: int = 0
    """Drop precedence: packets that are not ECN-capable have a queue of this size, which is served after that of the
    other packets. So an overloaded link drops them first. 0: one queue for all."""
    priorities: bool = False
    """Strict priority by the DSCP's class selector (its upper three bits): 7 goes first, 0 last. A queue for each."""
    offloads: bool = False
    """Segmentation offloads. They are off by default: a 64 KB super-packet would be lost or queued as one packet."""
    mtu: int = 1500
    """Largest IP packet, in bytes."""
    bleach_dscp: bool = False
    """Arriving IPv4 packets have lost their DSCP, as behind routers that set it to 0."""
    bleach_ecn: bool = False
    """Arriving IPv4 packets have lost their ECN bits."""

    def __post_init__(self) -> None:
        shaped = self.rate_bps is not None
        check_rate(self.rate_bps)
        check_loss(self.loss, self.loss_burst_packets)
        check(0 <= self.delay_ms <= 10_000, "delay_ms", self.delay_ms, "use 0 to 10000 milliseconds")
        remedy = f"use 1 to {BUFFER_LIMIT_PACKETS} packets"
        check(1 <= self.buffer_packets <= BUFFER_LIMIT_PACKETS, "buffer_packets", self.buffer_packets, remedy)
        check(
            0 <= self.not_ect_buffer_packets <= self.buffer_packets,
            "not_ect_buffer_packets",
            self.not_ect_buffer_packets,
            f"use 0 (no drop precedence) to buffer_packets, {self.buffer_packets}",
        )
        check(576 <= self.mtu <= 9000, "mtu", self.mtu, "use 576 to 9000 bytes")
        remedy = "only a link with a rate_bps has a queue"
        check(shaped or not self.priorities, "priorities", self.priorities, remedy)
        check(shaped or not self.not_ect_buffer_packets, "not_ect_buffer_packets", self.not_ect_buffer_packets, remedy)

    def __str__(self) -> str:
        words = [f"{self.rate_bps / 1e6:g} Mbit/s" if self.rate_bps else "not shaped"]
        if self.loss:
            bursts = f" in bursts of {self.loss_burst_packets:g}" if self.loss_burst_packets > 1 else ""
            words.append(f"loss {self.loss:.2%}{bursts}")
        if self.delay_ms:
            words.append(f"delay {self.delay_ms:g} ms")
        if self.rate_bps:
            words.append(f"buffer {self.buffer_packets} packets")
        flags = {"priorities": self.priorities, "offloads": self.offloads}
        flags |= {"without DSCP": self.bleach_dscp, "without ECN": self.bleach_ecn}
        words += [word for word, there in flags.items() if there]
        if self.not_ect_buffer_packets:
            words.append(f"{self.not_ect_buffer_packets} packets of Not-ECT")
        return ", ".join(words)

    @property
    def is_filtered(self) -> bool:
        """Whether packets are lost or changed where they arrive."""
        return bool(self.loss or self.bleach_dscp or self.bleach_ecn)

    @property
    def frame_bytes(self) -> int:
        """Size of a full frame, as the rate counts it."""
        return self.mtu + ETHERNET_HEADER_BYTES

    @property
    def payload_bytes(self) -> int:
        """UDP payload of a full frame."""
        return self.mtu - IP_UDP_HEADER_BYTES

    @property
    def payload_gb_s(self) -> float | None:
        """Best possible rate of UDP payload, in GB/s; None if the link is not shaped."""
        return None if self.rate_bps is None else self.rate_bps * self.payload_bytes / self.frame_bytes / 8e9


def check_rate(rate_bps: float | None) -> None:
    """Raises ConfigError unless a link can have this rate, or None."""
    remedy = f"use {RATE_LEAST_BPS:.0f} to {RATE_LIMIT_BPS:.0e} bits per second, or leave it out"
    check(rate_bps is None or RATE_LEAST_BPS <= rate_bps <= RATE_LIMIT_BPS, "rate_bps", rate_bps, remedy)


def check_loss(loss: float | None, burst_packets: float) -> None:
    """Raises ConfigError unless a link can lose this share in such bursts."""
    check(loss is None or 0 <= loss <= 1, "loss", loss, "use a share from 0 to 1 (1 % is 0.01)")
    remedy = f"use 1 (independent losses) to {BURST_LIMIT_PACKETS}"
    check(1 <= burst_packets <= BURST_LIMIT_PACKETS, "loss_burst_packets", burst_packets, remedy)
    most = burst_packets / (burst_packets + 1)  # a packet arrives between two bursts
    good = loss in (None, 1) or burst_packets == 1 or loss <= most
    check(
        good,
        "loss",
        loss,
        f"bursts of {burst_packets:g} packets lose a share of {most:.3g} at most: use longer bursts, or loss = 1",
    )


def queues(link: Link, device: str) -> list[str]:
    """The `tc` commands that make the queues of one end of a link with a rate: HTB, because TBF drops super-packets."""
    commands = [f"qdisc add dev {device} root handle 1: htb default 10"]
    commands += [f"class add dev {device} {text}" for text in _classes(link)]
    for minor, _urgency, limit, match in _leaves(link):
        commands.append(f"qdisc add dev {device} parent 1:{minor} bfifo limit {limit * link.frame_bytes}")
        if match:
            # filters that match the ECN bits, too, come first
            preference = 1 if match.endswith(("e3", "03")) else 2
            commands.append(
                f"filter add dev {device} parent 1: protocol ip pref {preference} u32 match ip dsfield {match} "
                f"flowid 1:{minor}"
            )
    return commands


def new_rate(link: Link, device: str) -> list[str]:
    """The `tc` commands that change the rate of a link with queues."""
    return [f"class change dev {device} {text}" for text in _classes(link)]


def _classes(link: Link) -> list[str]:
    rate = f"{link.rate_bps:.0f}bit"
    texts = [f"parent 1: classid 1:1 htb rate {rate} burst {_BURST} quantum {link.frame_bytes}"]
    for minor, urgency, _limit, _match in _leaves(link):
        texts.append(
            f"parent 1:1 classid 1:{minor} htb rate {_GUARANTEED} ceil {rate} cburst {_BURST} prio {urgency} "
            f"quantum {link.frame_bytes}"
        )
    return texts


def _leaves(link: Link) -> list[tuple[str, int, int, str]]:
    """(class, HTB priority, packets of buffer, match on the TOS byte) of each queue, most urgent first.

    The first class is also the default: ARP has no TOS byte and must not starve.
    """
    if not link.priorities and not link.not_ect_buffer_packets:
        return [("10", 0, link.buffer_packets, "")]
    selectors = range(_URGENCIES - 1, -1, -1) if link.priorities else [None]
    leaves = []
    for urgency, selector in enumerate(selectors):
        value, mask = (0, 0) if selector is None else (selector << 5, 0xE0)
        if not link.not_ect_buffer_packets:
            leaves.append((f"{0x10 + urgency:x}", urgency, link.buffer_packets, f"{value:#04x} {mask:#04x}"))
            continue
        # HTB has eight priorities: with two queues per class selector, two selectors share a pair of priorities
        pair = urgency // 2 * 2
        leaves.append((f"{0x10 + urgency:x}", pair, link.buffer_packets, f"{value:#04x} {mask:#04x}"))
        droppable = (f"{0x20 + urgency:x}", pair + 1, link.not_ect_buffer_packets, f"{value:#04x} {mask | 3:#04x}")
        leaves.append(droppable)
    return leaves
