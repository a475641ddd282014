"""Settings of a job: `Config` of the process, `Policy` of a group or a hook, `Ddp` of unchanged scripts.

They come from code, COMMLAYER_* variables, the job's file (`config_file.py`) and defaults, in this order. Each field is
a row: its name, type or `Kind` (unit, range, parser, remedy), meaning and default. Parsing, checks and the tables of
docs/settings.md come from the rows. No other module reads COMMLAYER_ variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import commlayer_environment

from . import config_file
from .errors import ConfigError
from .kind import ADDRESS, FLAG, FOLDER, HOST, NAMES, PATH, PORT_RANGE, Kind, number, numbers, text, whole
from .policy import (
    CLASS,
    LOSS_BOUND_MAX,
    POWERSGD,
    PRIORITIES,
    TOPK,
    Algorithm,
    Policy,
    Treatment,
    check_loss_bound,
)
from .setting import COMMON, Found, Section, changed, check, find, made, rows

__all__ = [  # all that other folders may use of settings
    "CLASS",
    "LOSS_BOUND_MAX",
    "POWERSGD",
    "PRIORITIES",
    "SECTIONS",
    "TOPK",
    "Algorithm",
    "Config",
    "Ddp",
    "Found",
    "Policy",
    "Treatment",
    "changed",
    "check_loss_bound",
    "ddp_of_job",
    "made_of",
    "number",
    "of_job",
    "path_of_file",
    "policy_of_groups",
    "policy_of_job",
    "rows",
    "shared",
    "sources",
    "variable",
    "whole",
]

_NAME = text("name", "use a name, as verbs")
_REPLACED = Kind("`gloo`", "use gloo, or nothing", lambda value: value if value in ("", "gloo") else None)
_SIGNAL = Kind("`usr1`, `usr2`", "use usr1 or usr2", lambda value: value if value in ("", "usr1", "usr2") else None)
_PORT = numbers("port", 1024, 65535, "0 (none), or 1024 to 65535", also=(0,), is_whole=True)
_SOCKETS = numbers("sockets", 1, 8, "1 to 8", is_whole=True)
_THREADS = numbers("threads", 1, 2, "1 or 2", is_whole=True)
_SECONDS = numbers("seconds", 0.1, 86400, "0.1 to 86400")
_SECONDS_OR_NEVER = numbers("seconds", 0.1, 86400, "0 (never), or 0.1 to 86400", also=(0,))
_PACKET = numbers("bytes", 576, 65535, "0 (automatic), or 576 to 65535", also=(0,), is_whole=True)
_CREDIT_SPAN = "0 (off), 1 (derived), or 16384 to 1073741824"
_CREDIT = numbers("bytes", 16384, 1 << 30, _CREDIT_SPAN, also=(0, 1), is_whole=True)
_PINNED = numbers("bytes", 1 << 20, 1 << 50, "0 (automatic), or 1048576 and more", also=(0,), is_whole=True)
_PREFIX = "COMMLAYER_"

PROCESS = "process"
"""The section of Config in a file of settings."""


def variable(name: str, section: str = PROCESS) -> str:
    """The environment variable of a setting, by its name and section: of Config, COMMLAYER_PORTS; of Policy,
    COMMLAYER_POLICY_CODEC."""
    return _PREFIX + (name if section == PROCESS else f"{section}_{name}").upper()


_DISABLE = variable("disable")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the process's engine. Every rank of a job should run with the same ones."""

    ifname: Annotated[
        tuple[str, ...],
        NAMES,
        "network interfaces to use: a comma list of names or patterns (`eth*`); `^name` excludes one. Unset, or with "
        "exclusions alone: every interface that is up and has an address, but virtual and VPN ones (see "
        "[deploy.md](deploy.md#network-interfaces))",
    ] = ()
    wire: Annotated[
        Literal["udp", "ofi"],
        "how packets travel between hosts: `udp` uses the kernel's sockets, `ofi` libfabric's datagram endpoints (RDMA "
        "and cloud NICs; experimental)",
        COMMON,
    ] = "udp"
    ofi_provider: Annotated[
        str, _NAME, "with `ofi`: libfabric's provider: udp, verbs or efa. Unset: libfabric's first", COMMON
    ] = ""
    ports: Annotated[
        int,
        _SOCKETS,
        "with `udp`: sockets per interface. The n-th socket here and the n-th socket of the peer are a path of their "
        "own, so that a fabric that chooses links by port (ECMP) uses several. Two processes have 8 paths at most",
    ] = 1
    port_range: Annotated[
        tuple[int, ...],
        PORT_RANGE,
        "with `udp`: the UDP ports to use, as `20000-20100`, for firewalls. Each process takes the first free ones, "
        "`COMMLAYER_PORTS` on each interface: a host needs as many ports as processes, times `COMMLAYER_PORTS`, times "
        "`COMMLAYER_THREADS`. Unset: "
        "the kernel chooses. See [deploy.md](deploy.md#ports-and-firewalls)",
    ] = ()
    threads: Annotated[
        int,
        _THREADS,
        "2: a second thread, with sockets of its own, carries half of each all-reduce, broadcast and reduce of 1 MiB "
        "or more that may lose nothing, in groups of several hosts with one rank each. For fast networks, and hosts "
        "with two idle cores. See [engine.md](engine.md#two-threads)",
        COMMON,
    ] = 1
    shm: Annotated[bool, "1: ranks of one host exchange data through shared memory; 0: through the network"] = True
    peer_timeout_s: Annotated[
        float,
        _SECONDS,
        "another process that was silent for so long counts as dead; see [faults.md](faults.md)",
    ] = 3.0
    auth: Annotated[
        Literal["full", "header", "off"],
        "the part of a packet that the job's key authenticates: all of it, all but tensor data, or nothing; "
        "see [security.md](security.md)",
        COMMON,
    ] = "full"
    secret_file: Annotated[
        str,
        PATH,
        "a file with a secret of at least 16 bytes, the same on every host (`head -c 32 /dev/urandom`): a program that "
        "can read the Store, but not the file, cannot join the job. Unset: the key is as secret as the Store",
    ] = ""
    dscp: Annotated[
        bool,
        "1: packets carry their priority as DSCP, and the engine slows down at ECN marks; packets that may be lost "
        "(`loss_bound`) are not ECN-capable. For switches that are configured for these classes",
    ] = False
    credit_bytes: Annotated[
        int,
        _CREDIT,
        "experimental: between hosts, a receiver tells its senders how much each may send, so that no more than this "
        "is on its way to its host. 1: the engine derives the number from the rates and round trips of its links. "
        "Meant for many senders to one port of switches with short buffers, above 10 Gbit/s; an all-to-all gets "
        "slower, on links of up to 1 Gbit/s by 4 to 53 %. 0: off. See [fabric.md](fabric.md#receiver-credit)",
        COMMON,
    ] = 0
    mtu: Annotated[
        int,
        _PACKET,
        "largest IP packet to send. Automatic: the smallest MTU of the interfaces in use (loopback counts only where "
        "it is the only one, as 9000). Ranks may differ: two ranks send each other the size that both can",
    ] = 0

    disable: Annotated[
        bool,
        "1: turns commlayer off: the backend is plain gloo, and the hook a plain all-reduce. So you learn whether "
        "commlayer is the cause of a problem. See [deploy.md](deploy.md#without-commlayer)",
        COMMON,
    ] = False
    stream_wait: Annotated[
        Literal["auto", "1", "0"],
        "with CUDA, 1: `wait()` lets the stream wait, where the driver can; 0: it blocks the calling thread. auto: 1, "
        "but 0 with CUDA_DEVICE_MAX_CONNECTIONS=1 or CUDA_LAUNCH_BLOCKING=1. See [cuda.md](cuda.md#how-it-works)",
    ] = "auto"
    pinned_bytes: Annotated[
        int,
        _PINNED,
        "with a GPU: the most pinned memory that a group's collectives in flight use. Above it, a collective blocks "
        "until others have ended; sends and receives never block. Automatic: an eighth of the host's memory, divided "
        "by the ranks of the host (`LOCAL_WORLD_SIZE`). See [cuda.md](cuda.md#memory)",
    ] = 0
    stall_s: Annotated[
        float,
        _SECONDS_OR_NEVER,
        "after how long a wait of a collective, a send or a receive a warning comes, which names the ranks that have "
        "not called it, or the matching one, and the lines of code where they are; see [hang.md](hang.md)",
    ] = 30.0
    flight_dir: Annotated[
        str,
        FOLDER,
        "folder for the flight record and the Python stacks of each process, which are written when a group fails and "
        "at the end of the process, and which only its user can read; see [hang.md](hang.md). Unset: no files",
    ] = ""
    flight_signal: Annotated[
        str,
        _SIGNAL,
        "signal at which the process writes its flight record and its stacks into the folder of "
        "`COMMLAYER_FLIGHT_DIR`, or the current one, and goes on. A handler of the script's own stays, and nothing is "
        "written then",
    ] = ""
    metrics_port: Annotated[
        int,
        _PORT,
        "the counters for Prometheus are at TCP port `COMMLAYER_METRICS_PORT` + `LOCAL_RANK`, path `/metrics`; whoever "
        "reaches the port can read them. 0: no port",
    ] = 0
    metrics_host: Annotated[
        str,
        HOST,
        "address of this host on which that port listens. By default only programs of this host reach it; `0.0.0.0` "
        "or `::` opens it on all addresses",
    ] = "127.0.0.1"
    top: Annotated[
        str,
        ADDRESS,
        "TCP address at which rank 0 collects samples of all ranks for `commlayer top`; reading them takes the job's "
        "key. A port alone: on the host of `MASTER_ADDR`. Needs pyzmq. See [top.md](top.md). Unset: no samples",
        COMMON,
    ] = ""
    log: Annotated[
        Literal["off", "info", "debug"],
        "`info` logs to stderr the start of each group, dead paths, operations that gloo runs, and the end of the job; "
        "`debug` also the rates of paths. See [log.md](log.md)",
    ] = "off"

    instead_of: Annotated[
        str,
        _REPLACED,
        "`gloo`: where the unchanged script asks torch for a group of gloo, it gets one of commlayer. See "
        "[trainers.md](trainers.md)",
    ] = ""
    deterministic: Annotated[
        bool,
        "1: groups made without `Options` have `Policy(deterministic=True)`: the same inputs give the same bits in "
        "every run. For trainers that make the groups themselves",
    ] = False

    def __post_init__(self) -> None:
        check(self, Config, lambda name, value: f"{variable(name)}={value}")
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
        """The settings of the COMMLAYER_* variables, otherwise those of the job's file.

        Raises ConfigError, which names variable or file, value and remedy; also for a COMMLAYER_* variable that does
        not exist, because a misspelt setting would be ignored on one rank only.
        """
        return of_job(environ)[PROCESS]  # type: ignore[no-any-return]

    @staticmethod
    def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
        """Whether COMMLAYER_DISABLE is set; without a look at the other settings, for every bucket."""
        environ = os.environ if environ is None else environ
        text = environ.get(_DISABLE, "").strip()
        if text:
            return bool(FLAG.check(FLAG.read(text), f"{_DISABLE}={text}"))
        file = config_file.of_job(environ)
        if not file.path:
            return False
        row = next(row for row in rows(Config) if row.name == "disable")
        found = Section(PROCESS, file.path, file.sections.get(PROCESS, {})).found(row)
        return found is not None and bool(found.value)

    def top_address(self, environ: Mapping[str, str] | None = None) -> str:
        """`top` as host:port; empty if it is unset."""
        if not self.top or ":" in self.top:
            return self.top
        return f"{(os.environ if environ is None else environ).get('MASTER_ADDR', '127.0.0.1')}:{self.top}"

    def streams_wait(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether streams wait, as far as `stream_wait` has a say. With `auto` they do not in the two modes of CUDA
        whose checks have run on a GPU twice only, where docs/cuda.md asks for ten times."""
        environ = os.environ if environ is None else environ
        if self.stream_wait != "auto":
            return self.stream_wait == "1"
        return all(environ.get(name) != "1" for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"))

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
class Ddp:
    """Changes to the DistributedDataParallel models of a script that does not make them itself; see unchanged.py."""

    hook: Annotated[
        bool, "commlayer's hook, with the policy of `[policy]`, for models without a communication hook of the script"
    ] = False
    overlap: Annotated[
        bool,
        "`commlayer.overlap` for them, which includes the hook: gradients travel during the next forward pass, and "
        "results stay as they are. See [overlap.md](overlap.md)",
    ] = False
    staleness: Annotated[
        int,
        numbers("steps", 0, 1, "0 or 1", is_whole=True),
        "with `overlap`. 1: each step uses the gradients of the step before, which changes the results",
    ] = 0
    bucket_mb: Annotated[
        float,
        numbers("MiB", 0.1, 4096, "0 (DDP's own), or 0.1 to 4096", also=(0,)),
        "`bucket_cap_mb` of models to which the script gives none",
    ] = 0.0

    def __post_init__(self) -> None:
        check(self, Ddp, lambda name, value: f"{variable(name, 'ddp')}={value}")
        if self.staleness and not self.overlap:
            raise ConfigError("staleness=1 needs overlap: set both, or staleness=0")


SECTIONS: dict[str, Any] = {PROCESS: Config, "policy": Policy, "ddp": Ddp}
"""The sections of a file of settings."""


def _meant(given: str, known: Mapping[str, str]) -> str:
    """A question after a name that resembles this one; empty: none does. `known`: names by what they resemble."""
    return "".join(f"did you mean {known[near]}? " for near in difflib.get_close_matches(given, known, 1))


def sources(file: config_file.ConfigFile, environ: Mapping[str, str]) -> dict[str, dict[str, Found]]:
    """The value of every setting, and its source, by section and name.

    Raises ConfigError for bad values, and for sections, entries and COMMLAYER_* variables that do not exist.
    """
    by_section = {section: [row.name for row in rows(kind)] for section, kind in SECTIONS.items()}
    known = [variable(name, section) for section, names in by_section.items() for name in names]
    known.append(config_file.VARIABLE)
    short = {name.upper(): variable(name, section) for section, names in by_section.items() for name in names}
    inside = commlayer_environment.TRIAL  # commlayer's own, no setting
    for name, given in environ.items():
        if name.startswith(_PREFIX) and given.strip() and name not in (*known, inside):
            meant = _meant(name.removeprefix(_PREFIX), {each.removeprefix(_PREFIX): each for each in known} | short)
            raise ConfigError(f"{name}={given.strip()}: there is no such setting; {meant}known: {', '.join(known)}")
    for section, entries in file.sections.items():
        if section not in SECTIONS:
            shown = ", ".join(f"[{section}]" for section in SECTIONS)
            raise ConfigError(f"{file.path}: [{section}]: there is no such section; use {shown}")
        for name in entries:
            if name not in by_section[section]:
                names = by_section[section]
                home = next((other for other, others in by_section.items() if name in others), None)
                meant = _meant(name, dict(zip(names, names, strict=True)))
                remedy = f"it belongs into [{home}]" if home else f"{meant}known: {', '.join(names)}"
                raise ConfigError(f"{file.path}: [{section}] {name}: there is no such setting; {remedy}")
    return {
        section: find(
            kind,
            environ,
            functools.partial(variable, section=section),
            Section(section, file.path, file.sections.get(section, {})),
        )
        for section, kind in SECTIONS.items()
    }


def of_job(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings of this process, by section: variables count more than the job's file. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    return made_of(sources(config_file.of_job(environ), environ))


def made_of(found: Mapping[str, Mapping[str, Found]]) -> dict[str, Any]:
    """The settings with these values, by section. Raises ConfigError if they contradict each other."""
    return {section: made(kind, found[section]) for section, kind in SECTIONS.items()}


def policy_of_job() -> Policy:
    """The policy of hooks to which code gives none. Raises ConfigError as `Config.from_environment` does."""
    return of_job()["policy"]  # type: ignore[no-any-return]


def policy_of_groups(config: Config) -> Policy:
    """The policy of groups to which code gives none. Codec and losses are for gradients: a group also carries counters
    and metrics. Raises ConfigError."""
    given = policy_of_job()
    deterministic = config.deterministic or given.deterministic
    return Policy(given.priority, deterministic, given.algorithm, yields=given.yields)


def ddp_of_job() -> Ddp:
    """The changes to models. Raises ConfigError."""
    return of_job()["ddp"]  # type: ignore[no-any-return]


def shared() -> dict[str, str]:
    """The settings of models that are not the defaults, in words: all ranks of a job must have the same, or their
    gradients would differ."""
    found = {}
    for section, settings in of_job().items():
        given = changed(settings, type(settings))
        if given and section != PROCESS:
            name = f"[{section}] (commlayer.toml or {variable('*', section)})"
            found[name] = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return found


def path_of_file() -> str:
    """The file of settings that this process reads; empty: there is none. Raises ConfigError."""
    return config_file.of_job(os.environ).path
