"""What a job can set: `Config` for the process, from COMMLAYER_* variables, and `Policy` for a group or a hook.

No other module reads the environment.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from .errors import ConfigError

Algorithm = Literal["auto", "direct", "ring"]
Congestion = Literal["delay", "fixed"]
Auth = Literal["header", "full", "off"]
Wire = Literal["udp", "ofi"]
Treatment = Literal["feedback", "rescale", "zero"]
LogLevel = Literal["debug", "info", "warning", "error"]

PRIORITIES = 8
"""Priority classes of the engine: 0 is the most urgent, PRIORITIES - 1 the least."""

LOSS_BOUND_MAX = 0.5
"""Largest loss bound: the share of a message's packets that may be missing."""

LOSS_BOUND_LEAST = 1e-6
"""No bound above 0 is smaller: the engine counts in parts per million."""

DEADLINE_LIMIT_S = 86400.0
"""The longest deadline that ends."""

RATE_LEAST_BPS, RATE_LIMIT_BPS = 10**3, 10**12
"""Of the fixed congestion control: 1K to 1000G."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the process's engine. Every rank of a job should run with the same ones."""

    ifname: tuple[str, ...] = ()
    """COMMLAYER_IFNAME: network interfaces to use, as a comma list of names or patterns (`eth*`). `^name` excludes.
    Empty: every usable interface."""
    wire: Wire = "udp"
    """COMMLAYER_WIRE: how packets between hosts travel. `udp` uses the kernel's sockets, `ofi` libfabric's datagram
    endpoints (RDMA and cloud NICs)."""
    ofi_provider: str = ""
    """COMMLAYER_OFI_PROVIDER: with `ofi`, libfabric's provider, as udp, verbs or efa. Empty: libfabric's first."""
    ports: int = 1
    """COMMLAYER_PORTS: UDP sockets per network interface, 1 to 8. Each pair of them, one here and one on the peer, is a
    path of its own, with a source port of its own: fabrics that choose links by port (ECMP) then carry the packets of
    two hosts over several links, and the load goes where it arrives first. Two processes have 8 paths at most."""
    shm: bool = True
    """COMMLAYER_SHM: whether ranks of one host exchange data through shared memory. Off (0), all use UDP."""
    algorithm: Algorithm = "auto"
    """COMMLAYER_ALGORITHM: the all-reduce between hosts. `direct` sends every shard to its owner (two network
    steps), `ring` passes shards around (least traffic per link), `auto` chooses by size and world."""
    segment_bytes: int = 0
    """COMMLAYER_SEGMENT_BYTES: unit of pipelining within a collective, in bytes. 0: the default of the plans."""
    congestion: Congestion = "delay"
    """COMMLAYER_CONGESTION: congestion control. `delay` follows queueing delay, `fixed` sends
    at `rate_bps`."""
    rate_bps: int = 0
    """COMMLAYER_RATE_BPS: with `fixed`, what this process sends per path, in bits per second, 1K to 1000G; else 0."""
    peer_timeout_s: float = 3.0
    """COMMLAYER_PEER_TIMEOUT_S: a peer that has been silent this long, in seconds, is lost."""
    auth: Auth = "header"
    """COMMLAYER_AUTH: what of a packet the job's key authenticates. `header`: everything but the tensors' bytes;
    `full`: those, too; `off`: nothing. All ranks must have the same. See docs/security.md."""
    mark: bool = False
    """COMMLAYER_MARK: whether packets carry their priority as DSCP, and their right to be lost as ECN bits (those that
    may be are not ECN-capable), for switches that are set up for it; and whether the marks of switches are answered.
    Off (0), the IP header says nothing."""
    mtu: int = 0
    """COMMLAYER_MTU: largest IP packet to send, in bytes. 0: the smallest MTU among the interfaces in use. Two ranks
    send each other what both can."""
    log: LogLevel = "warning"
    """COMMLAYER_LOG: what to log: debug, info, warning or error."""

    def __post_init__(self) -> None:
        for name, (is_good, plain, remedy) in _TYPES.items():  # only who calls Config has other ones
            value = getattr(self, name)
            if not is_good(value):
                raise ConfigError(f"Config({name}={value!r}): use {remedy}")
            object.__setattr__(self, name, plain(value))  # whatever type a number came in
        _check(self.algorithm in get_args(Algorithm), "algorithm", self.algorithm, _one_of(Algorithm))
        _check(self.congestion in get_args(Congestion), "congestion", self.congestion, _one_of(Congestion))
        _check(self.auth in get_args(Auth), "auth", self.auth, _one_of(Auth))
        _check(self.wire in get_args(Wire), "wire", self.wire, _one_of(Wire))
        remedy = "only libfabric has providers: set COMMLAYER_WIRE=ofi, or no provider"
        _check(self.wire == "ofi" or not self.ofi_provider, "ofi_provider", self.ofi_provider, remedy)
        _check(1 <= self.ports <= 8, "ports", self.ports, "use 1 to 8 sockets per interface")
        remedy = "libfabric's endpoints have no ports to choose: set COMMLAYER_WIRE=udp, or COMMLAYER_PORTS=1"
        _check(self.ports == 1 or self.wire == "udp", "ports", self.ports, remedy)
        _check(self.log in get_args(LogLevel), "log", self.log, _one_of(LogLevel))
        _check(
            self.segment_bytes == 0 or 4096 <= self.segment_bytes <= 1 << 30,
            "segment_bytes",
            self.segment_bytes,
            "use 0 (the default) or a number of bytes from 4K to 1G",
        )
        _check(self.segment_bytes % 64 == 0, "segment_bytes", self.segment_bytes, "use a multiple of 64")
        if self.congestion == "fixed":
            good = RATE_LEAST_BPS <= self.rate_bps <= RATE_LIMIT_BPS
            remedy = "the fixed congestion control needs a rate, as 200M: use 1K to 1000G bits per second"
            _check(good, "rate_bps", self.rate_bps, remedy)
        else:
            remedy = "only the fixed congestion control has a rate: set COMMLAYER_CONGESTION=fixed, or no rate"
            _check(self.rate_bps == 0, "rate_bps", self.rate_bps, remedy)
        _check(0.1 <= self.peer_timeout_s <= 86400, "peer_timeout_s", self.peer_timeout_s, "use 0.1 to 86400 seconds")
        _check(
            self.mtu == 0 or 576 <= self.mtu <= 65535,
            "mtu",
            self.mtu,
            "use 0 (automatic) or 576 to 65535 bytes",
        )

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> Config:
        """Reads the COMMLAYER_* variables; an empty variable counts as unset.

        Raises ConfigError naming the variable, its value and what it may be; also for a COMMLAYER_* variable that
        does not exist, since a misspelt setting would otherwise be ignored on one rank only.
        """
        environ = os.environ if environ is None else environ
        present = {name: value.strip() for name, value in environ.items() if name.startswith(_PREFIX) and value.strip()}
        for name in present:
            _check(name in _READERS, name, present[name], f"there is no such setting; known: {', '.join(_READERS)}")
        values = {name.removeprefix(_PREFIX).lower(): _READERS[name](name, text) for name, text in present.items()}
        return Config(**values)  # type: ignore[arg-type]  # each reader returns its field's type

    def common(self) -> dict[str, object]:
        """What every rank of a job must have the same, by variable: else they cannot talk, or run other plans."""
        return {_PREFIX + name.upper(): getattr(self, name) for name in _COMMON}

    def choose_interfaces(self, existing: Sequence[str]) -> list[str]:
        """Those of the existing interfaces that `ifname` selects, in the order given.

        Raises ConfigError listing what exists when there is no match.
        """
        wanted = [pattern for pattern in self.ifname if not pattern.startswith("^")]
        unwanted = [pattern[1:] for pattern in self.ifname if pattern.startswith("^")]
        chosen = [
            name
            for name in existing
            if (not wanted or any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted))
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in unwanted)
        ]
        if self.ifname and not chosen:
            raise ConfigError(
                f"COMMLAYER_IFNAME={','.join(self.ifname)} matches no usable network interface; "
                f"this host has {', '.join(existing) or 'none'}"
            )
        return chosen


@dataclasses.dataclass(frozen=True)
class Policy:
    """What one group, or one communication hook, wants from its operations. The same on every rank."""

    priority: int = 4
    """Class of service, 0 (most urgent) to 7: packets of a lower number go first through the whole engine."""
    deterministic: bool = False
    """Reduce in a fixed order: the same inputs give the same bits in every run. (Replicas agree in any case.)"""
    algorithm: Algorithm | None = None
    """All-reduce between hosts for these operations; None: as the process's Config says."""
    loss_bound: float = 0.0
    """Share of a message's packets that may be missing, 0 (nothing is ever lost) or 0.000001 to 0.5, in sums and
    averages of floating-point numbers between hosts. Everything else is reliable in any case."""
    treatment: Treatment = "feedback"
    """What becomes of contributions that were lost. `feedback`: they are added to the next step's gradient; only the
    communication hook can, so other operations of such a group lose nothing. `rescale`: the mean of what arrived.
    `zero`: they count as nothing, as in the papers. With `feedback` under AMP, set `HookState.loss_scale` to
    `GradScaler.get_scale()` before each backward: what waits for the next step has the scale of its own."""
    protect_share: float = 0.0
    """Share of the gradient's blocks, those with the largest elements, that is never lost, 0 to less than 1; with every
    treatment, where the communication hook sends them."""
    deadline_s: float | None = None
    """After so many seconds, up to 86400, an operation waits no more for packets that stall and are within the bound.
    None: a deadline that follows the latest operations of the same shape; infinity: none."""

    def __post_init__(self) -> None:
        priority = whole(self.priority, -1)
        if not 0 <= priority < PRIORITIES:
            raise ConfigError(
                f"Policy(priority={self.priority!r}): use a whole number, 0 (most urgent) to {PRIORITIES - 1}"
            )
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"Policy(deterministic={self.deterministic!r}): use True or False")
        if self.algorithm is not None and self.algorithm not in get_args(Algorithm):
            raise ConfigError(f"Policy(algorithm={self.algorithm!r}): {_one_of(Algorithm)}")
        if self.treatment not in get_args(Treatment):
            raise ConfigError(f"Policy(treatment={self.treatment!r}): {_one_of(Treatment)}")
        bound = check_bound(self.loss_bound, f"Policy(loss_bound={self.loss_bound!r})")
        share = number(self.protect_share)
        if not 0 <= share < 1:
            raise ConfigError(f"Policy(protect_share={self.protect_share!r}): use a number, 0 to less than 1")
        deadline_s = None if self.deadline_s is None else number(self.deadline_s)
        if deadline_s is not None and not (0 < deadline_s <= DEADLINE_LIMIT_S or deadline_s == math.inf):
            raise ConfigError(
                f"Policy(deadline_s={self.deadline_s!r}): use more than 0, up to {DEADLINE_LIMIT_S:.0f} seconds, "
                f"infinity, or None"
            )
        # plain numbers, whatever type they came in: a policy is compared, saved and sent
        kept = {"priority": priority, "loss_bound": bound, "protect_share": share, "deadline_s": deadline_s}
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if self.loss_bound and self.deterministic:
            raise ConfigError(
                "Policy(deterministic=True): use loss_bound=0 with it, or no order: what is lost is chance"
            )
        if self.loss_bound and self.algorithm == "ring":
            raise ConfigError("Policy(algorithm='ring'): use 'direct' with a loss_bound: a ring adds losses up")


def number(value: object) -> float:
    """A real number of any type, as numpy's, as a float; NaN where it is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.nan


def whole(value: object, otherwise: int) -> int:
    """A whole number of any type as an int; `otherwise` where it is none."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else otherwise


def check_bound(bound: object, what: str) -> float:
    """`bound`, a share of packets that may be lost, as a float. Raises ConfigError, beginning with `what`, if it is
    none."""
    share = number(bound)
    if not (share == 0 or LOSS_BOUND_LEAST <= share <= LOSS_BOUND_MAX):
        real = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
        kind = "" if real else f"a number, not a {type(bound).__name__}: "
        raise ConfigError(
            f"{what}: use {kind}0 (nothing is lost) to {LOSS_BOUND_MAX}; the least above 0 is {LOSS_BOUND_LEAST:f}"
        )
    return share


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_names(value: object) -> bool:
    good = isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)
    return good and all(name.strip("^") for name in value)  # type: ignore[attr-defined]  # mypy forgets what is good


_TYPES: dict[str, tuple[Callable[[Any], bool], Callable[[Any], object], str]] = {
    "ifname": (_are_names, tuple, "a tuple of names, as ('eth0',) or ('^docker0',)"),
    "ofi_provider": (lambda value: isinstance(value, str), str, "a name, as 'verbs', or ''"),
    "ports": (_is_whole, int, "a whole number of sockets"),
    "shm": (_is_flag, bool, "True or False"),
    "segment_bytes": (_is_whole, int, "a whole number of bytes"),
    "rate_bps": (_is_whole, int, "a whole number of bits per second"),
    "peer_timeout_s": (_is_real, number, "a number of seconds"),
    "mark": (_is_flag, bool, "True or False"),
    "mtu": (_is_whole, int, "a whole number of bytes"),
}
"""Of each field of Config that is no choice among words: its check, what makes it plain, and what to use."""

_PREFIX = "COMMLAYER_"
_COMMON = ("wire", "ofi_provider", "auth", "algorithm", "segment_bytes")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_RATES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def _check(good: bool, name: str, value: object, remedy: str) -> None:
    if not good:
        variable = name if name.startswith(_PREFIX) else _PREFIX + name.upper()
        raise ConfigError(f"{variable}={value}: {remedy}")


def _one_of(choice: object) -> str:
    return f"use one of {', '.join(get_args(choice))}"


def _names(variable: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    _check(
        all(name.strip("^") for name in names), variable, text, "use a comma list of names, as eth0,eth1 or ^docker0"
    )
    return names


def _flag(variable: str, text: str) -> bool:
    _check(text in ("0", "1"), variable, text, "use 0 or 1")
    return text == "1"


def _word(variable: str, text: str) -> str:  # noqa: ARG001  # the readers have one signature
    return text.lower()


def _number(units: Mapping[str, int]) -> Callable[[str, str], int]:
    def read(variable: str, text: str) -> int:
        unit = text[-1].upper() if text[-1].isalpha() else ""
        digits = text[: len(text) - len(unit)]
        good = digits.isascii() and digits.isdigit() and len(digits) < 19 and unit in units
        _check(
            good,
            variable,
            text,
            f"use a whole number of up to 18 digits, with {', '.join(u for u in units if u) or 'no unit'}",
        )
        return int(digits) * units[unit]

    return read


def _seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text}: use a number of seconds") from None


_READERS: dict[str, Callable[[str, str], object]] = {
    "COMMLAYER_IFNAME": _names,
    "COMMLAYER_WIRE": _word,
    "COMMLAYER_OFI_PROVIDER": _word,
    "COMMLAYER_PORTS": _number({"": 1}),
    "COMMLAYER_SHM": _flag,
    "COMMLAYER_ALGORITHM": _word,
    "COMMLAYER_SEGMENT_BYTES": _number(_UNITS),
    "COMMLAYER_CONGESTION": _word,
    "COMMLAYER_RATE_BPS": _number(_RATES),
    "COMMLAYER_PEER_TIMEOUT_S": _seconds,
    "COMMLAYER_AUTH": _word,
    "COMMLAYER_MARK": _flag,
    "COMMLAYER_MTU": _number({"": 1}),
    "COMMLAYER_LOG": _word,
}
