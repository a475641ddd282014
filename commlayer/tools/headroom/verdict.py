"""`verdict`: the findings of a split in plain English, with the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..probe.units import time_text
from .split import Split

LEAST = 0.05
"""Share of the step below which communication is not the job's problem."""
_LATE = 0.05
"""Share of the step from which a rank is late."""
_SLOW_FIRST = 0.5
"""A slow rank that costs this share of the most that communication could win is named first: it is a fault, and fixing
it wins all that it costs. A setting rarely wins the most."""
_LATE_SHARE = 0.6
"""Share of all waits from which one rank is late, and not now this one and now that one. Two ranks wait about as long
for each other."""


def is_little(split: Split, least: float = LEAST) -> bool:
    """Whether communication is not the job's problem."""
    return split.share < least


def verdict(split: Split, least: float = LEAST) -> str:
    """One paragraph: the most to be won, and by which remedy."""
    how = "without any communication" if split.bound is split.left_out else "on commlayer, nothing else changed"
    whole = (
        f"A step takes {seconds(split.as_is.median_s)}, and {seconds(split.bound.median_s)} {how}: faster "
        f"communication could win at most {split.share:.0%}."
    )
    slow, late = _slow(split), _late(split)
    if is_little(split, least):
        advice = "Communication is not this job's problem: look at its computation, with torch.profiler for example."
        parts = [advice, whole, slow, late]
    elif _is_slow_first(split):
        parts = [whole, slow, "Begin there.", _remedy(split), late]
    else:
        parts = [whole, _remedy(split), slow, late]
    return " ".join(part for part in parts if part)


def next_command(split: Split, command: Sequence[str], least: float = LEAST) -> str:
    """The command that comes next; empty if little can be won."""
    if is_little(split, least):
        return ""
    options = "--allow compressed " if _first(split) == "bytes" else ""
    return f"commlayer tune {options}-- {shlex.join(command)}"


def _first(split: Split) -> str:
    """The remedy that wins most by itself. Ties go to those that keep the numerics."""
    remedies = {"latency": split.latency_s, "overlap": split.overlap_s or 0.0, "bytes": split.bytes_s}
    return max(remedies, key=lambda name: remedies[name])


def _remedy(split: Split) -> str:
    """The remedy that wins most by itself, in a sentence."""
    first = _first(split)
    most_s = {"latency": split.latency_s, "overlap": split.overlap_s or 0.0, "bytes": split.bytes_s}[first]
    transport_s = split.transport_s or 0.0
    most = f"{seconds(most_s)} of these {seconds(split.all_s)}"
    if first == "latency" and split.is_lossy:
        first = "loss"
    engine = split.engine
    number = 0 if engine is None else round(engine.operations)
    count = "" if engine is None else f" The job makes {number} operation{'s' * (number != 1)} in a step."
    is_slow_first = _is_slow_first(split)
    whole = f"the {seconds(split.all_s)} of communication" if is_slow_first else "it"
    link = "" if is_slow_first else " Look for a slow link first (commlayer probe)."
    text = {
        "bytes": f"Most of {whole} is bytes: fewer of them, that is compression, could win {most}.{link}",
        "latency": f"Most of {whole} is latency: fewer and larger messages could win {most} (larger buckets of DDP, "
        f"fewer collectives per step).{count}",
        "loss": f"Most of {whole} is latency, and lost packets delay small messages, too: {most}. A transport that "
        "sends them again soon helps (commlayer), and fewer messages do.",
        "overlap": f"Most of {whole} could hide behind computation: overlap with the next forward pass could "
        f"win {most}.",
    }[first]
    if transport_s >= 0.5 * split.all_s:
        why = "it answers lost packets" if split.is_lossy else "it uses the network"
        text += (
            f" commlayer without any other change wins {seconds(transport_s)} of them, by the way {why} (set "
            "COMMLAYER_INSTEAD_OF=gloo for the same command)."
        )
    return text


def _is_slow(split: Split) -> bool:
    """Whether the same rank computes longer than the others, and not now this one and now that one."""
    return split.straggler.is_same and split.straggler.longer_s >= _LATE * split.as_is.median_s


def _is_slow_first(split: Split) -> bool:
    """Whether a slow rank costs so much that it is to be fixed before any setting is changed."""
    return _is_slow(split) and split.straggler.longer_s >= _SLOW_FIRST * split.all_s


def _slow(split: Split) -> str:
    """Ranks whose computation the others wait for; empty: none."""
    if _is_slow(split):
        return (
            f"Rank {split.straggler.rank} computes {seconds(split.straggler.longer_s)} longer than the others in each "
            "step; no communication wins that: torchrun ... -m commlayer check compares how fast the ranks compute, "
            "and a profile of this rank shows the rest, such as loading its data."
        )
    if split.stragglers_s >= _LATE * split.as_is.median_s:
        return (
            f"Now one rank is the slowest and now another, by {seconds(split.stragglers_s)} in the median step; no "
            "communication wins that: look for batches of different sizes, or for cores that ranks share."
        )
    return ""


def _late(split: Split) -> str:
    """The rank that the others wait for, although it computes as fast as they do; empty: none."""
    engine = split.engine
    if engine is None or engine.late_share < _LATE_SHARE or engine.late_s < _LATE * split.as_is.median_s:
        return ""
    if _is_slow(split) and engine.late_rank == split.straggler.rank:
        return ""
    return (
        f"The other ranks wait {seconds(engine.late_s)} per step for rank {engine.late_rank}: look at its host "
        "and its link (commlayer probe)."
    )


def seconds(count: float) -> str:
    """A time in three digits."""
    if count < 0:
        return f"-{seconds(-count)}"
    return time_text(count * 1e6) if count < 0.9995 else f"{count:.3g} s"
