"""`commlayer tune --parallelism FILE`: which parallelism the cluster and model of a TOML file can carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...errors import ConfigError
from ...planner import Link, Links, Parallelisms, Prediction, Rank, Transformer, parallelism
from .. import toml_file
from ..emulate.rate import parse_rate
from ..headroom.verdict import seconds

VERSION = 1
"""The version of the JSON's form."""
_MODEL = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(Transformer)}
_LINK = {"rate": True, "latency_us": False}
_NEEDED = {
    "model": "[model] is absent; add it, with the fields of commlayer.planner.Transformer",
    "between": '[between] is absent; add it, with the link of each host: rate = "10G"',
    "host": "[[host]] is absent; add it, once for each kind of host: speed_tflops = 60, memory_gib = 24",
}
_HOST = {"count": False, "ranks": False, "speed_tflops": True, "memory_gib": True}


@dataclass(frozen=True)
class Question:
    """The contents of the file."""

    model: Transformer
    hosts: list[list[Rank]]
    links: Links

    @classmethod
    def read(cls, path: Path) -> Question:
        """Raises ConfigError naming the file, the key, the value and the remedy."""
        return toml_file.read(path, cls.of)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Question:
        """Raises ConfigError."""
        for name, remedy in _NEEDED.items():
            if name not in content:
                raise ConfigError(remedy)
        _check(content, "the file", {"model": True, "within": False, "between": True, "host": True})
        _check(content["model"], "[model]", _MODEL)
        if not isinstance(content["host"], list):
            raise ConfigError("[host] is one table; write [[host]], once for each kind of host")
        hosts = []
        for place, host in enumerate(content["host"]):
            _check(host, f"[[host]] {place}", _HOST)
            numbers = {key: _number(f"[[host]] {place}", key, value) for key, value in host.items()}
            rank = Rank(1e12 * numbers["speed_tflops"], numbers["memory_gib"] * 2**30)
            for key in ("count", "ranks"):
                if not float(numbers.get(key, 1)).is_integer() or numbers.get(key, 1) < 1:
                    raise ConfigError(f"[[host]] {place}: {key}={host[key]} is no whole number of at least 1")
            hosts += [[rank] * int(numbers.get("ranks", 1)) for _ in range(int(numbers.get("count", 1)))]
        if "within" not in content and any(len(host) > 1 for host in hosts):
            raise ConfigError("[within] is absent, and a host has several ranks; give the rate of their links")
        between = _link("between", content["between"])
        within = _link("within", content["within"]) if "within" in content else between
        return cls(Transformer(**content["model"]), hosts, Links(within, between))

    def answer(self) -> Parallelisms:
        """Raises ConfigError."""
        return parallelism(self.model, self.hosts, self.links)


def _check(table: Any, where: str, known: Mapping[str, bool]) -> None:
    """Raises ConfigError on keys that are unknown, and needed ones that are absent."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {table!r} is no table; write its keys below [name]")
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is unknown; the keys are {', '.join(known)}")
    for key, is_needed in known.items():
        if is_needed and key not in table:
            raise ConfigError(f"{where}: {key} is absent; it is needed")


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key}={value!r} is no number")
    return value


def _link(name: str, table: Any) -> Link:
    _check(table, f"[{name}]", _LINK)
    rate = table["rate"]
    rate_bps = parse_rate(rate) if isinstance(rate, str) else _number(f"[{name}]", "rate", rate)
    return Link(rate_bps, 1e-6 * _number(f"[{name}]", "latency_us", table.get("latency_us", 0)))


def table(found: Parallelisms) -> dict[str, Any]:
    """Plain values, for JSON; times in seconds."""
    return {
        "version": VERSION,
        "tried": found.tried,
        "best": _row(found.best),
        "frontier": [_row(prediction) for prediction in found.frontier],
        "families": [
            {"name": family.name, "reason": family.reason, "best": None if family.best is None else _row(family.best)}
            for family in found.families
        ],
    }


def _row(prediction: Prediction) -> dict[str, Any]:
    return {
        "family": prediction.layout.family,
        "layout": str(prediction.layout),
        "layers": list(prediction.layers),
        "microbatches": list(prediction.microbatches),
        "step_s": prediction.step_s,
        "parts_s": prediction.parts,
        "memory_bytes": prediction.memory_bytes,
        "received_bytes": prediction.received_bytes,
        "messages": prediction.messages,
    }


def show(found: Parallelisms, out: Console) -> None:
    """Prints the frontier, and a sentence for each parallelism."""
    rows = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("step", "memory", "received", "messages"):
        rows.add_column(column, justify="right", no_wrap=True)
    rows.add_column("layout: all that nothing else beats in step and memory", overflow="fold")
    for prediction in found.frontier:
        figures = (
            seconds(prediction.step_s),
            _size(prediction.memory_bytes),
            _size(prediction.received_bytes),
            str(prediction.messages),
        )
        style = "bold" if prediction is found.best else None
        rows.add_row(*figures, f"{prediction.layout.family}: {prediction.layout}", style=style)
    out.print(rows)
    out.print(f"\nBytes and messages are those of a rank and a step. {found.tried} layouts were compared:\n")
    for family in found.families:
        out.print(f"- {family}")
    out.print("\nA prediction with ideal overlap, not a measurement: docs/parallelism.md has the model and its limits.")


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
