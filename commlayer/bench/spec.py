"""What to measure: everything a rank needs to know, as data that travels to the rank's process as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..emulate.scenario import Scenario

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
    "barrier",
)
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
OP_NAMES = ("sum", "product", "min", "max")


@dataclass(frozen=True)
class BackendSpec:
    """A torch.distributed backend, and the TCP congestion control its connections are opened with."""

    name: str
    tcp_cc: str | None = None

    @classmethod
    def parse(cls, text: str) -> BackendSpec:
        """From "gloo" or "gloo/cubic". Raises ValueError."""
        name, slash, tcp_cc = text.strip().partition("/")
        if not name or (slash and not tcp_cc):
            raise ValueError(f"backend {text!r}: expected a name such as gloo, or gloo/cubic for a congestion control")
        return cls(name, tcp_cc or None)

    def __str__(self) -> str:
        return f"{self.name}/{self.tcp_cc}" if self.tcp_cc else self.name


def expand_tcp_cc(backends: list[BackendSpec], algorithms: list[str]) -> list[BackendSpec]:
    """Replaces "gloo", the backend that uses TCP, by one "gloo/<algorithm>" per algorithm."""
    expanded: list[BackendSpec] = []
    for backend in backends:
        plain_gloo = backend.name == "gloo" and backend.tcp_cc is None
        expanded += [BackendSpec("gloo", name) for name in algorithms] if plain_gloo and algorithms else [backend]
    return expanded


@dataclass(frozen=True)
class Spec:
    """One bench run."""

    backends: tuple[BackendSpec, ...]
    """The first one is the baseline of the ratios."""
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
    """How often the backends take turns."""
    timeout_s: float = 300.0
    imports: tuple[str, ...] = ()
    """Modules to import in every rank, for backends that register themselves when imported."""
    json_path: str | None = None
    scenario: Scenario | None = None
    """The emulated network, when ranks run in network namespaces."""
    command: tuple[str, ...] = ()

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
        if self.scenario is None and any(backend.tcp_cc for backend in self.backends):
            raise ValueError(
                "a congestion control is set per network namespace: add --netns or --scenario, or drop the /name"
            )

    def to_json(self) -> str:
        scenario = None if self.scenario is None else self.scenario.table
        return json.dumps({**dataclasses.asdict(self), "scenario": scenario})

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["backends"] = tuple(BackendSpec(**backend) for backend in fields["backends"])
        for name in ("sizes", "imports", "command"):
            fields[name] = tuple(fields[name])
        if fields["scenario"] is not None:
            fields["scenario"] = Scenario.from_table(fields["scenario"])
        return cls(**fields)
