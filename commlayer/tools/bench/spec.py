"""The description of a bench run, which each rank's process gets as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...config import Policy
from ..emulate import tcp
from ..emulate.scenario import Scenario
from .papers import policy_of
from .sizes import format_size, parse_size

COLLECTIVE_NAMES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "sendrecv",
    "pingpong",
    "window",
    "barrier",
    "gradients",
)
CAST_NAMES = ("float16", "bfloat16")

TIMEOUT_LIMIT_S = 7 * 86400.0
APART_LIMIT_MS = 60e3

USUAL = Policy()
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
OP_NAMES = ("sum", "product", "min", "max")


@dataclass(frozen=True)
class BackendSpec:
    """A torch.distributed backend and its settings."""

    name: str
    tcp_cc: str | None = None
    """TCP congestion control of its connections."""
    cast: str | None = None
    """Type of gradients on the wire, as with DDP's compression hooks; None: their own."""
    chunks: int = 1
    """Number of concurrent operations that gradients are cut into."""
    beside_bytes: int = 0
    """Size of the all-reduces that run beside it, in another group of the same backend, at lowest priority. 0: none."""
    policy: Policy = USUAL
    """Policy of commlayer's group."""

    def __post_init__(self) -> None:
        if self.cast not in (None, *CAST_NAMES):
            raise ValueError(f"backend {self.name!r}: cast={self.cast}: expected one of {', '.join(CAST_NAMES)}")
        if self.tcp_cc is not None and not tcp.is_name(self.tcp_cc):
            raise ValueError(f"backend {self.name!r}: {self.tcp_cc!r}: expected a congestion control such as cubic")
        if self.chunks < 1:
            raise ValueError(f"backend {self.name!r}: chunks={self.chunks}: expected at least 1")
        if self.policy != USUAL and self.name != "commlayer":
            raise ValueError(f"backend {self.name!r}: only commlayer has a policy: leave its settings out")

    @classmethod
    def parse(cls, text: str) -> BackendSpec:
        """Parses a name such as "gloo", "gloo/cubic", "gloo/bbr:cast=float16:chunks=4" or
        "commlayer:loss_bound=0.01:treatment=rescale".

        Besides `cast`, `chunks` and `beside` (a size) the settings are those of commlayer's `Policy` and, for the
        papers' rule, `partial_results`. Raises ValueError.
        """
        what, *settings = text.strip().split(":")
        name, slash, tcp_cc = what.partition("/")
        if not name or (slash and not tcp_cc):
            raise ValueError(f"backend {text!r}: expected a name such as gloo, or gloo/cubic for a congestion control")
        own: dict[str, Any] = {}
        policy: dict[str, Any] = {}
        seen: set[str] = set()
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in _SETTINGS and key not in _POLICY_SETTINGS:
                known = ", ".join([*_SETTINGS, *_POLICY_SETTINGS])
                raise ValueError(f"backend {text!r}: {setting!r}: expected a setting such as chunks=4; known: {known}")
            if key in seen:
                raise ValueError(f"backend {text!r}: {setting!r}: {key} is there already: give it once")
            seen.add(key)
            try:
                if key in _SETTINGS:
                    field, read = _SETTINGS[key]
                    own[field] = read(value)
                else:
                    policy[key] = _POLICY_SETTINGS[key](value)
            except ValueError as error:
                raise ValueError(f"backend {text!r}: {setting!r}: {error}") from None
        return cls(name, tcp_cc or None, **own, policy=policy_of(policy))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> BackendSpec:
        """Inverse of `dataclasses.asdict`."""
        return cls(**{**fields, "policy": policy_of(fields["policy"])})

    @property
    def is_plain(self) -> bool:
        """Whether every collective can use it: only `gradients` can be cast, cut or lost."""
        return self.cast is None and self.chunks == 1 and self.policy.loss_bound == 0

    def __str__(self) -> str:
        """The text that `parse` reads."""
        parts = [f"{self.name}/{self.tcp_cc}" if self.tcp_cc else self.name]
        parts += [f"cast={self.cast}"] * (self.cast is not None)
        parts += [f"chunks={self.chunks}"] * (self.chunks > 1)
        parts += [f"beside={format_size(self.beside_bytes)}"] * (self.beside_bytes > 0)
        for key in _POLICY_SETTINGS:
            usual = getattr(USUAL, key, False)
            value = getattr(self.policy, key, usual)
            parts += [f"{key}={value}"] * (value != usual)
        return ":".join(parts)


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("expected True or False")
    return text == "True"


_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "cast": ("cast", str),
    "chunks": ("chunks", int),
    "beside": ("beside_bytes", parse_size),
}
_POLICY_SETTINGS: dict[str, Callable[[str], Any]] = {
    "priority": int,
    "loss_bound": float,
    "treatment": str,
    "partial_results": _flag,
}


def expand_tcp_cc(backends: list[BackendSpec], algorithms: list[str]) -> list[BackendSpec]:
    """Replaces "gloo", the backend that uses TCP, by one "gloo/<algorithm>" per algorithm."""
    expanded: list[BackendSpec] = []
    for backend in backends:
        plain_gloo = backend.name == "gloo" and backend.tcp_cc is None
        variants = [dataclasses.replace(backend, tcp_cc=name) for name in algorithms]
        expanded += variants if plain_gloo and algorithms else [backend]
    return expanded


@dataclass(frozen=True)
class Spec:
    """One bench run."""

    backends: tuple[BackendSpec, ...]
    """Ratios are over the first one."""
    sizes: tuple[int, ...]
    """Bytes of the whole array."""
    collective: str = "all_reduce"
    dtype: str = "float32"
    op: str = "sum"
    iters: int = 20
    """Timed iterations per round."""
    warmup: int = 2
    """Untimed iterations at the start of each round; the first of them is checked."""
    rounds: int = 5
    """Number of turns of each backend."""
    apart_ms: float = 0.0
    """The time for which each rank sleeps before an iteration."""
    barrier: bool = False
    """Whether a barrier of the backend, which is not timed, comes before each iteration."""
    timeout_s: float = 300.0
    imports: tuple[str, ...] = ()
    """Modules that every rank imports; they may register backends."""
    json_path: str | None = None
    scenario: Scenario | None = None
    """The emulated network, if ranks run in network namespaces."""
    command: tuple[str, ...] = ()
    ready_path: str | None = None
    """A file: rank 0 creates it after the set-up, and the launcher removes it when the stress has begun."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("collective", self.collective, COLLECTIVE_NAMES),
            ("dtype", self.dtype, DTYPE_NAMES),
            ("op", self.op, OP_NAMES),
        ):
            if value not in known:
                raise ValueError(f"{what} {value!r}: expected one of {', '.join(known)}")
        if not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError(f"backends {', '.join(map(str, self.backends))!r}: expected at least one, each once")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes {self.sizes}: expected at least one, in bytes, each > 0")
        if min(self.iters, self.warmup, self.rounds) < 1:
            raise ValueError(
                f"iters {self.iters}, warmup {self.warmup}, rounds {self.rounds}: expected at least 1 of each"
            )
        if not 0 <= self.apart_ms <= APART_LIMIT_MS:
            raise ValueError(f"apart {self.apart_ms:g}: expected 0 to {APART_LIMIT_MS:g} milliseconds")
        if not 0 < self.timeout_s <= TIMEOUT_LIMIT_S:
            raise ValueError(
                f"timeout {self.timeout_s}: expected more than 0, up to {TIMEOUT_LIMIT_S:.0f} seconds (a week)"
            )
        special = [str(backend) for backend in self.backends if not backend.is_plain]
        if special and self.collective != "gradients":
            raise ValueError(f"backend {special[0]!r}: cast, chunks and loss_bound are for the collective gradients")
        if self.collective == "gradients" and (self.op != "sum" or self.dtype not in ("float32", "float64")):
            raise ValueError(f"{self.op} of {self.dtype}: gradients are sums of float32 or float64")
        if self.scenario is None and any(backend.tcp_cc for backend in self.backends):
            raise ValueError(
                "a congestion control is set per network namespace: add --netns or --scenario, or drop the /name"
            )

    @property
    def may_lose(self) -> bool:
        """Whether the results of a backend may lack contributions."""
        return any(backend.policy.loss_bound > 0 for backend in self.backends)

    def to_json(self) -> str:
        scenario = None if self.scenario is None else self.scenario.table
        return json.dumps({**dataclasses.asdict(self), "scenario": scenario})

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["backends"] = tuple(BackendSpec.from_fields(backend) for backend in fields["backends"])
        for name in ("sizes", "imports", "command"):
            fields[name] = tuple(fields[name])
        if fields["scenario"] is not None:
            fields["scenario"] = Scenario.from_table(fields["scenario"])
        return cls(**fields)
