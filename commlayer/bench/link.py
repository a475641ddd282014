"""The emulated link: what was asked for, and the best any transport could get out of it."""

from __future__ import annotations

from dataclasses import dataclass

ETHERNET_HEADER_BYTES = 14
IP_UDP_HEADER_BYTES = 28


@dataclass(frozen=True)
class Link:
    """Each host's connection to the switch. Both directions are alike."""

    rate_bps: float | None = None
    """Bits per second and NIC, counted on Ethernet frames without FCS, as HTB counts; None: not shaped."""
    loss: float = 0.0
    """Probability that a host drops an arriving IP packet, TCP and UDP alike."""
    buffer_packets: int = 256
    """Queue in front of the link, at the host and at the switch port (a shallow commodity switch has about this)."""
    offloads: bool = False
    """Segmentation offloads. Off by default: a lost or queued 64 KB super-packet would count as one packet."""
    nics: int = 1
    """NICs per host, each with its own switch and rate."""
    mtu: int = 1500

    def __post_init__(self) -> None:
        if self.rate_bps is not None and self.rate_bps <= 0:
            raise ValueError(f"rate_bps {self.rate_bps}: expected > 0, or None for no shaping")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss {self.loss}: expected a probability, 0 <= loss < 1 (1 % is 0.01)")
        if self.buffer_packets < 1:
            raise ValueError(f"buffer_packets {self.buffer_packets}: expected at least 1")
        if not 1 <= self.nics <= 250:
            raise ValueError(f"nics {self.nics}: expected 1 to 250")

    @property
    def payload_gb_s(self) -> float | None:
        """Best possible rate of UDP payload, in GB/s over all NICs; None when the link is not shaped.

        This is what busbw is compared to: an ideal all-reduce sends 2(n-1)/n of the data through each host's link.
        """
        if self.rate_bps is None:
            return None
        payload_share = (self.mtu - IP_UDP_HEADER_BYTES) / (self.mtu + ETHERNET_HEADER_BYTES)
        return self.nics * self.rate_bps * payload_share / 8e9
