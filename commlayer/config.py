"""Settings of a job: `Config` of the process, from COMMLAYER_* variables, and `Policy` of a group or a hook.

Each field is a row: its name, type or `Kind` (unit, range, parser, remedy), meaning and default. Parsing, checks and
the tables of docs/settings.md come from the rows. No other module reads COMMLAYER_ variables.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .errors import ConfigError

Algorithm = Literal["auto", "direct", "ring"]
Treatment = Literal["feedback", "rescale", "zero"]

PRIORITIES = 8
"""Priority classes of the engine: 0 is the most urgent, PRIORITIES - 1 the least."""

LOSS_BOUND_MAX = 0.5
"""The largest loss bound: the share of a message's packets that may be missing."""

LOSS_BOUND_LEAST = 1e-6
"""The smallest loss bound above 0."""

POWERSGD = "powersgd:"
"""Begins the codecs whose names end with a rank."""

POWERSGD_RANK_MAX = 1024

TOPK = "topk:"
"""Begins the codecs whose names end with a share."""

TOPK_SHARE_MAX = 0.5


def number(value: object) -> float:
    """A real number of any type, as numpy's, as a float. NaN if it is not a number."""
    if not isinstance(value, (numbers.Real, Decimal)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer larger than any float, a signalling NaN
        return math.nan


def whole(value: object, otherwise: int) -> int:
    """A whole number of any type as an int. `otherwise` if it is not a whole number."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else otherwise


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a setting takes."""

    unit: str
    """Unit and range, as docs/settings.md shows them."""
    remedy: str
    """The end of an error: "use 0 or 1"."""
    plain: Callable[[Any], Any]
    """Returns the value in its plain type: settings are compared, saved and sent. None for a bad value."""
    read: Callable[[str], object] = str.lower
    """Returns what the text of a variable stands for, for `plain` to judge."""

    def check(self, value: object, what: str) -> Any:
        """Returns the plain value. Raises ConfigError, which begins with `what`, for a bad one."""
        found = self.plain(value)
        if found is None:
            raise ConfigError(f"{what}: {self.remedy}")
        return found


def _numbers(unit: str, least: float, most: float, span: str, *, zero: bool = False, is_whole: bool = False) -> Kind:
    """Numbers from `least` to `most`, and 0 with `zero`; `span` says so in words."""

    def plain(value: object) -> float | None:
        found = whole(value, -1) if is_whole else number(value)
        return found if least <= found <= most or (zero and found == 0) else None

    def read(text: str) -> object:
        try:
            return int(text) if is_whole else float(text)
        except ValueError:
            return text

    return Kind(f"{unit}, {span}", f"use a {'whole ' * is_whole}number, {span} ({unit})", plain, read)


def _words(words: Sequence[str]) -> Kind:
    known = ", ".join(f"`{word}`" for word in words)
    return Kind(known, f"use one of {', '.join(words)}", lambda value: value if value in words else None)


def _codecs(words: Sequence[str]) -> Kind:
    """The words, `powersgd:RANK` and `topk:SHARE`."""
    kind = _words((*words, f"{POWERSGD}RANK", f"{TOPK}SHARE"))
    rank, share = "[1-9][0-9]{0,3}", r"[0-9]*\.?[0-9]+(?:e-[0-9]{1,2})?"

    def plain(value: object) -> object:
        named = re.fullmatch(f"{POWERSGD}({rank})|{TOPK}({share})", value) if isinstance(value, str) else None
        if named and named[1]:
            return value if int(named[1]) <= POWERSGD_RANK_MAX else None
        return value if value in words or (named and 0 < float(named[2]) <= TOPK_SHARE_MAX) else None

    remedy = (
        f"{kind.remedy}, where RANK is a whole number from 1 to {POWERSGD_RANK_MAX}, and SHARE a number above 0 and up "
        f"to {TOPK_SHARE_MAX}"
    )
    return dataclasses.replace(kind, remedy=remedy, plain=plain)


def _names(value: object) -> tuple[str, ...] | None:
    good = isinstance(value, (tuple, list)) and all(isinstance(name, str) and name.strip("^") for name in value)
    return tuple(value) if good else None  # type: ignore[arg-type]  # mypy forgets what is good


def _range(value: object, least: int, most: int) -> tuple[int, ...] | None:
    """The first and the last of a range within these limits; empty: there is none."""
    if not isinstance(value, (tuple, list)):
        return None
    ends = tuple(whole(each, -1) for each in value)
    return ends if not ends or (len(ends) == 2 and least <= ends[0] <= ends[1] <= most) else None


_FLAG = Kind(
    "bool",
    "use 0 or 1 (in Python: False or True)",
    lambda value: value if isinstance(value, bool) else None,
    lambda text: {"0": False, "1": True}.get(text, text),
)
_NAME = Kind("name", "use a name, as verbs", lambda value: value if isinstance(value, str) else None)
_PATH = Kind("path", "use the path of a file", lambda value: value if isinstance(value, str) else None, read=str)
_REPLACED = Kind("`gloo`", "use gloo, or nothing", lambda value: value if value in ("", "gloo") else None)
_NAMES = Kind(
    *("names", "use a comma list of names, as eth0,eth1 or ^docker0", _names),
    read=lambda text: [name.strip() for name in text.split(",")],
)
_PORT_RANGE = Kind(
    "first-last, 1024 to 65535",
    "use a range of UDP ports between 1024 and 65535, as 20000-20100",
    lambda value: _range(value, 1024, 65535),
    lambda text: [int(each) if each.isdecimal() else each for each in text.split("-")] if len(text) < 12 else text,
)
_FOLDER = Kind("folder", "use the path of a folder", lambda value: value if isinstance(value, str) else None, str)
_SIGNAL = Kind("`usr1`, `usr2`", "use usr1 or usr2", lambda value: value if value in ("", "usr1", "usr2") else None)
_PORT = _numbers("port", 1024, 65535, "0 (none), or 1024 to 65535", zero=True, is_whole=True)
_SOCKETS = _numbers("sockets", 1, 8, "1 to 8", is_whole=True)
_SECONDS = _numbers("seconds", 0.1, 86400, "0.1 to 86400")
_SECONDS_OR_NEVER = _numbers("seconds", 0.1, 86400, "0 (never), or 0.1 to 86400", zero=True)
_PACKET = _numbers("bytes", 576, 65535, "0 (automatic), or 576 to 65535", zero=True, is_whole=True)
CLASS = _numbers("class", 0, PRIORITIES - 1, f"0 (most urgent) to {PRIORITIES - 1}", is_whole=True)
_STEPS = _numbers("steps", 0, 10**9, "0 to 1000000000", is_whole=True)
_CODEC = _codecs(("none", "f16", "bf16", "int8", "int4-int8", "int4", "sign", "auto"))
_BLOCKS = _numbers("share of blocks", 0, math.nextafter(1, 0), "0 to less than 1")
_LOSS_SPAN = f"0 (no loss), or {LOSS_BOUND_LEAST:f} to {LOSS_BOUND_MAX}"
LOSS_BOUND = _numbers("share of packets", LOSS_BOUND_LEAST, LOSS_BOUND_MAX, _LOSS_SPAN, zero=True)

COMMON = "all ranks of a job must have the same"
"""Marks a row: ranks that differ cannot talk to each other."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting."""

    name: str
    default: object
    kind: Kind
    meaning: str
    is_common: bool


@functools.cache
def rows(settings: Any) -> tuple[Row, ...]:
    """The settings in a class of this module: `Annotated[type, Kind where the type does not tell, meaning, COMMON]`."""
    hints = get_type_hints(settings, include_extras=True)
    return tuple(_row(field, *get_args(hints[field.name])) for field in dataclasses.fields(settings))


def _row(field: dataclasses.Field[Any], hint: object, *about: Any) -> Row:
    if hint is bool:
        about = (_FLAG, *about)
    elif get_origin(hint) is Literal:
        about = (_words(get_args(hint)), *about)
    kind, meaning, *marks = about
    return Row(field.name, field.default, kind, meaning, COMMON in marks)


def _check(settings: Any, kind: Any, name_of: Callable[[str, object], str]) -> None:
    """Checks the fields of `kind` and makes them plain; `name_of` names a field and its value in errors."""
    for row in rows(kind):
        value = getattr(settings, row.name)
        object.__setattr__(settings, row.name, row.kind.check(value, name_of(row.name, value)))


_PREFIX = "COMMLAYER_"


def variable(name: str) -> str:
    """The environment variable of a field of Config."""
    return _PREFIX + name.upper()


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the process's engine. Every rank of a job should run with the same ones."""

    ifname: Annotated[
        tuple[str, ...],
        _NAMES,
        "network interfaces to use: a comma list of names or patterns (`eth*`); `^name` excludes one. Unset, or with "
        "exclusions alone: every interface that is up and has an address, but virtual and VPN ones (see "
        "[deploy.md](deploy.md#network-interfaces))",
    ] = ()
    wire: Annotated[
        Literal["udp", "ofi"],
        "how packets travel between hosts: `udp` uses the kernel's sockets, `ofi` libfabric's datagram endpoints (RDMA "
        "and cloud NICs)",
        COMMON,
    ] = "udp"
    ofi_provider: Annotated[
        str, _NAME, "with `ofi`: libfabric's provider: udp, verbs or efa. Unset: libfabric's first", COMMON
    ] = ""
    ports: Annotated[
        int,
        _SOCKETS,
        "with `udp`: sockets per interface. The n-th socket here and the n-th socket of the peer are a path, so that a "
        "fabric that chooses links by port (ECMP) uses several. Two processes have 8 paths at most",
    ] = 1
    port_range: Annotated[
        tuple[int, ...],
        _PORT_RANGE,
        "with `udp`: the UDP ports to use, as `20000-20100`, for firewalls. Each process takes the first free ones: "
        "`COMMLAYER_PORTS` of each interface, so a host needs `COMMLAYER_PORTS` times its processes. Unset: the kernel "
        "chooses. See [deploy.md](deploy.md#ports-and-firewalls)",
    ] = ()
    shm: Annotated[bool, "1: ranks of one host exchange data through shared memory; 0: through the network"] = True
    peer_timeout_s: Annotated[float, _SECONDS, "a peer is lost after this much silence; see [faults.md](faults.md)"] = (
        3.0
    )
    auth: Annotated[
        Literal["full", "header", "off"],
        "the part of a packet that the job's key authenticates: all, all but tensor data, or nothing; "
        "see [security.md](security.md)",
        COMMON,
    ] = "full"
    secret_file: Annotated[
        str,
        _PATH,
        "a file with a secret of at least 16 bytes, the same on every host (`head -c 32 /dev/urandom`): a program that "
        "can read the Store, but not the file, cannot join the job. Unset: the key is as secret as the Store",
    ] = ""
    dscp: Annotated[
        bool,
        "1: packets carry their priority as DSCP, and those that may be lost are not ECN-capable; the engine answers "
        "ECN marks. For switches configured for it",
    ] = False
    mtu: Annotated[
        int,
        _PACKET,
        "largest IP packet to send. Automatic: the smallest MTU of the interfaces in use (loopback counts only where "
        "it is the only one, as 9000). Ranks may differ: two ranks send each other the size that both can",
    ] = 0

    disable: Annotated[
        bool,
        "1: the backend is plain gloo, and the hook a plain all-reduce: tells whether commlayer is the cause of a "
        "problem. See [deploy.md](deploy.md#without-commlayer)",
        COMMON,
    ] = False
    stream_wait: Annotated[
        bool,
        "with CUDA, 1: `wait()` lets the stream wait, where the driver can; 0: it blocks the calling thread. See "
        "[cuda.md](cuda.md)",
    ] = True
    stall_s: Annotated[
        float,
        _SECONDS_OR_NEVER,
        "a warning follows when a collective has waited this long: it names the ranks that have not called it, and "
        "those say where they are; see [hang.md](hang.md)",
    ] = 30.0
    flight_dir: Annotated[
        str,
        _FOLDER,
        "folder for the flight record and the Python stacks of each process, written when a group fails and at the end "
        "of the process; see [hang.md](hang.md). Unset: they are not written",
    ] = ""
    flight_signal: Annotated[
        str,
        _SIGNAL,
        "signal on which the process writes its flight record and its stacks, into the folder of "
        "`COMMLAYER_FLIGHT_DIR` or the current one, and goes on. A handler that the process has already stays",
    ] = ""
    metrics_port: Annotated[
        int,
        _PORT,
        "TCP port with the counters for Prometheus (`/metrics`), plus `LOCAL_RANK`; on all interfaces, for anybody who "
        "reaches them. 0: none",
    ] = 0
    log: Annotated[
        Literal["off", "info", "debug"],
        "`info`: the start of each group, dead paths, fallbacks to gloo and the end of the job on stderr; `debug`: "
        "rates of paths, too. See [log.md](log.md)",
    ] = "off"

    instead_of: Annotated[
        str,
        _REPLACED,
        "`gloo`: where a script asks torch for a group of gloo, it gets one of commlayer, without a change. See "
        "[trainers.md](trainers.md)",
    ] = ""
    deterministic: Annotated[
        bool,
        "1: groups made without `Options` have `Policy(deterministic=True)`: the same inputs give the same bits in "
        "every run. For trainers that make the groups themselves",
    ] = False

    def __post_init__(self) -> None:
        _check(self, Config, lambda name, value: f"{variable(name)}={value}")
        if self.ofi_provider and self.wire != "ofi":
            what = f"{variable('ofi_provider')}={self.ofi_provider}"
            raise ConfigError(f"{what}: only libfabric has providers; set COMMLAYER_WIRE=ofi, or no provider")
        if self.ports > 1 and self.wire != "udp":
            what = f"{variable('ports')}={self.ports}"
            raise ConfigError(f"{what}: libfabric has no ports; set COMMLAYER_WIRE=udp, or COMMLAYER_PORTS=1")
        if self.port_range and self.wire != "udp":
            what = f"{variable('port_range')}={self.port_range[0]}-{self.port_range[1]}"
            raise ConfigError(f"{what}: libfabric chooses its ports; set COMMLAYER_WIRE=udp, or no range")

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> Config:
        """Reads the COMMLAYER_* variables; an empty variable counts as unset.

        Raises ConfigError, which names the variable, its value and the remedy; also for a COMMLAYER_* variable that
        does not exist, because a misspelt setting would be ignored on one rank only.
        """
        environ = os.environ if environ is None else environ
        known = {variable(row.name): row for row in rows(Config)}
        values = {}
        for name, text in ((name, value.strip()) for name, value in environ.items() if name.startswith(_PREFIX)):
            if text and name not in known:
                raise ConfigError(f"{name}={text}: there is no such setting; known: {', '.join(known)}")
            if text:
                row = known[name]
                values[row.name] = row.kind.check(row.kind.read(text), f"{name}={text}")
        return Config(**values)

    @staticmethod
    def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
        """Whether COMMLAYER_DISABLE is set; without a look at the other variables, for every bucket."""
        text = (os.environ if environ is None else environ).get(variable("disable"), "").strip()
        return bool(text) and bool(_FLAG.check(_FLAG.read(text), f"{variable('disable')}={text}"))

    def common(self) -> dict[str, object]:
        """The settings, by variable, that all ranks of a job must have the same: ranks that differ cannot talk."""
        return {variable(row.name): getattr(self, row.name) for row in rows(Config) if row.is_common}

    def choose_interfaces(self, existing: Sequence[str]) -> list[str]:
        """The existing interfaces that `ifname` selects, in the order given.

        Raises ConfigError, which lists the interfaces of this host, if none matches.
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
    """How one group, or one communication hook, wants its operations done. The same on every rank."""

    priority: Annotated[
        int,
        CLASS,
        "packets of a lower class go first through the whole engine, and its operations in shared memory. Beside "
        "classes 0 and 1 bulk keeps shorter queues, which costs it 1 to 2 % of the link",
    ] = 4
    deterministic: Annotated[
        bool,
        "reduce in a fixed order: the same inputs give the same bits in every run. Replicas agree in any case. Not "
        "with a `loss_bound`",
    ] = False
    algorithm: Annotated[
        Algorithm,
        "all-reduce between hosts: `direct` sends every shard to its owner (two network steps), `ring` passes shards "
        "around (least traffic per link), `auto` chooses by size and world. `ring` not with a `loss_bound`",
    ] = "auto"
    loss_bound: Annotated[
        float,
        LOSS_BOUND,
        "share of each message that may be missing, in sums and averages of floating-point numbers between hosts; "
        "all else is reliable",
    ] = 0.0
    treatment: Annotated[
        Treatment,
        "what happens to lost contributions. `feedback` adds them to the next step's gradient; only the hook can: "
        "other operations of such a group lose nothing. `rescale` takes the mean of the others, `zero` counts "
        "them as 0",
    ] = "feedback"
    protect_share: Annotated[
        float,
        _BLOCKS,
        "blocks of the gradient with the largest elements, never lost; in the hook, with every treatment",
    ] = 0.0

    codec: Annotated[
        str,
        _CODEC,
        "representation of gradients between hosts, in the hook and in `compress_fsdp`. `f16` and `bf16` add up in "
        "float32. `int8` sends 1.03 bytes per value. `int4-int8` sends contributions in 4 bits and sums in 8. `int4` "
        "sends both in 4 bits and keeps rounding errors for the next step. `sign` sends 1 bit and keeps them, too; not "
        "for Adam. `powersgd:RANK` sends factors of matrices, `topk:SHARE` the largest values. `auto` measures and "
        "chooses, in the hook. See [compression.md](compression.md)",
    ] = "none"
    exact_steps: Annotated[
        int,
        _STEPS,
        "steps at the start of a training that `sign`, `powersgd` and `topk` send in bf16: compression hurts most "
        "there",
    ] = 100
    allow_state: Annotated[
        bool, "whether `auto` may choose a codec that keeps rounding errors, if over a quarter of the step is waiting"
    ] = False
    residual: Annotated[
        Literal["f32", "bf16"], "how a codec that keeps rounding errors stores them: in 4 or in 2 bytes per parameter"
    ] = "f32"

    def __post_init__(self) -> None:
        _check(self, Policy, lambda name, value: f"Policy({name}={value!r})")
        if self.loss_bound and self.deterministic:
            raise ConfigError("Policy(deterministic=True): losses are random; use loss_bound=0, or leave it out")
        if self.loss_bound and self.algorithm == "ring":
            raise ConfigError("Policy(algorithm='ring'): a ring adds up losses; use 'direct' with a loss_bound")
        if self.codec != "none" and self.algorithm == "ring":
            raise ConfigError(
                f"Policy(codec={self.codec!r}, algorithm='ring'): a ring would round at every hop; use 'auto' or "
                f"'direct' with a codec"
            )


def check_loss_bound(share: object, what: str) -> float:
    """A loss bound as a float. Raises ConfigError, which begins with `what`, for anything else."""
    return float(LOSS_BOUND.check(share, what))
