"""Checks on entry: messages come from programs with the job's key, which may be of another version, or hostile."""

from __future__ import annotations

import json
import math
from typing import Any

SAMPLE_MAX_BYTES = 64 << 10
"""A sample of 8 paths has 1 to 4 KB; interfaces and hooks have no limit of their own."""

TEXT_MAX = 256
"""Characters of a name."""

NUMBER_MAX = 2**63

_FLOW = dict.fromkeys(("bytes_s", "sent", "lost", "received", "queue_us", "round_trip_us", "dead"), float)
_HOOK = {"steps": int, "loss_bound": float, "codec": str, "priority": int, "uncounted_bytes": float}
_SAMPLE = {
    **dict.fromkeys(("rank", "world", "pid", "number"), int),
    **dict.fromkeys(
        ("time", "interval_s", "steps", "exposed_s", "late_s", "lags_s", "oldest_s", "failed", "queue_us"), float
    ),
    **dict.fromkeys(("sent_bytes_s", "received_bytes_s", "shared_bytes_s"), float),
    **dict.fromkeys(("packets", "lost", "retransmitted", "forgiven_bytes"), float),
    "host": str,
    "step": (int, None),
    **dict.fromkeys(("step_s", "exposed_step_s", "late_step_s"), (float, None)),
    "lags": [[int]],
    "paused": [str],
    "hooks": [_HOOK],
    "interfaces": [{"interface": str, **_FLOW}],
    "paths": [{"peer": int, "path": int, "interface": str, "remote": str, **_FLOW}],
}
"""The fields that a sample must have; it may have more."""


def read(text: bytes) -> Any:
    """The JSON of a message. Raises ValueError, also for numbers that no float can hold and for endless nesting."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def check_sample(text: bytes, rank: int, world: int) -> None:
    """Raises ValueError unless this is the sample of that rank, in a job of `world` ranks."""
    if len(text) > SAMPLE_MAX_BYTES:
        raise ValueError(f"a sample of {len(text)} bytes; it may have {SAMPLE_MAX_BYTES}")
    found = read(text)
    if not isinstance(found, dict):
        raise ValueError("a sample is an object")
    wrong = [name for name, shape in _SAMPLE.items() if name not in found or not _fits(found[name], shape)]
    if wrong:
        raise ValueError(f"a sample whose {wrong[0]} is not that of this version")
    if (found["rank"], found["world"]) != (rank, world):
        raise ValueError(f"a sample of rank {found['rank']} of {found['world']}, sent as rank {rank} of {world}")
    if any(len(lag) != 2 for lag in found["lags"]):
        raise ValueError("lags are pairs of a rank and microseconds")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is no number")
    return value


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(name in value and _fits(value[name], shape[name]) for name in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(item, shape[0]) for item in value)
    if isinstance(shape, tuple):
        return any(_fits(value, form) for form in shape)
    return _is_plain(value, shape)


def _is_plain(value: Any, shape: Any) -> bool:
    """Whether it is an int, a float (or an int), a short text that a terminal can show, or None."""
    if shape is None:
        return value is None
    if shape is str:
        return isinstance(value, str) and len(value) <= TEXT_MAX and value.isprintable()
    kinds = (int, float) if shape is float else (int,)
    return isinstance(value, kinds) and abs(value) < NUMBER_MAX
