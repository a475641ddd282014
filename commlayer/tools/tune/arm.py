"""`Arm`: settings that a trial runs the job with; as variables of the environment, and as a file of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import SECTIONS, rows, variable

KEEPS_ERRORS = ("int4",)
"""Codecs of the space that keep rounding errors for the next step."""


@dataclass(frozen=True)
class Arm:
    """The settings that differ from those of the job as it is. An arm without any is the default."""

    codec: str = "none"
    loss_bound: float = 0.0
    overlap: bool = False
    staleness: int = 0
    bucket_mb: float = 0.0
    """0: the job's own."""
    ports: int = 1
    replaces_gloo: bool = False
    """Whether groups of gloo become commlayer's."""

    @property
    def is_default(self) -> bool:
        """Whether the job runs as it is."""
        return self == Arm()

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings, by section and name, without those of the job as it is."""
        needs_hook = (self.codec != "none" or self.loss_bound > 0) and not self.overlap
        found: dict[str, dict[str, Any]] = {
            "process": {"instead_of": "gloo" if self.replaces_gloo else "", "ports": self.ports},
            "policy": {"codec": self.codec, "loss_bound": self.loss_bound},
            "ddp": {
                "hook": needs_hook,
                "overlap": self.overlap,
                "staleness": self.staleness,
                "bucket_mb": self.bucket_mb,
            },
        }
        return {
            section: changed
            for section, entries in found.items()
            if (changed := {name: value for name, value in entries.items() if value != _default(section, name)})
        }

    @property
    def environment(self) -> dict[str, str]:
        """The settings as variables."""
        return {
            variable(name, section): str(int(value)) if isinstance(value, bool) else str(value)
            for section, entries in self.settings.items()
            for name, value in entries.items()
        }

    @property
    def needs(self) -> frozenset[str]:
        """The changes of the numerics that somebody must allow."""
        asked = {"compressed": self.codec != "none", "lossy": self.loss_bound > 0, "stale": self.staleness > 0}
        return frozenset(name for name, is_so in asked.items() if is_so)

    def __str__(self) -> str:
        parts = [f"codec {self.codec}"] if self.codec != "none" else []
        parts += [f"loss bound {self.loss_bound:g}"] if self.loss_bound else []
        parts += ["overlap" + ", 1 step stale" * self.staleness] if self.overlap else []
        parts += [f"buckets of {self.bucket_mb:g} MiB"] if self.bucket_mb else []
        parts += [f"{self.ports} sockets per NIC"] if self.ports > 1 else []
        if not parts and self.replaces_gloo:
            return "commlayer instead of gloo"
        return "; ".join(parts) or "the job as it is"


def _default(section: str, name: str) -> object:
    return next(row.default for row in rows(SECTIONS[section]) if row.name == name)


def toml(sections: Mapping[str, Mapping[str, Any]], head: Mapping[str, str]) -> str:
    """The text of a file of settings. `head` has a comment for some entries, by name."""
    lines = []
    for section, entries in sections.items():
        lines.append(f"[{section}]")
        for name, value in entries.items():
            lines += [f"# {line}" for line in head.get(name, "").splitlines()]
            lines.append(f"{name} = {_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    """A value in TOML: strings, numbers, flags and lists of these are as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
