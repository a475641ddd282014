"""`reshard`: the saved states of a job's HookStates, for another number of ranks.

The average of the next steps must still get what the old ranks owed it: the sum of all residuals over the number of
ranks stays the same. So each new rank takes the residuals of some old ranks, times new / old number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..config import whole
from ..errors import ConfigError


def reshard(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states for `world_size` ranks from `HookState.state_dict()` of all ranks of the old job, in rank order.

    Old rank i's residual goes to new rank i modulo `world_size`; new ranks beyond begin without one. Everything else is
    that of old rank 0. Raises ConfigError for anything but states of ranks 0, 1, 2 ... with one step, policy and model,
    and for a `world_size` below 1.
    """
    if whole(world_size, 0) < 1:
        raise ConfigError(f"reshard(world_size={world_size!r}): use the new number of ranks, at least 1")
    if not isinstance(states, (list, tuple)) or not states:
        given = states if isinstance(states, (list, tuple)) else type(states).__name__
        raise ConfigError(f"reshard(states={given}): give a list of the states of all ranks of the old job")
    _check_alike(states)
    for rank, state in enumerate(states):
        saved = state["feedback"].get("rank")
        if saved not in (None, rank) or state.get("steps") != states[0].get("steps"):
            raise ConfigError(
                f"reshard: state {rank} is of rank {saved} after {state.get('steps')} steps: give the states of all "
                f"ranks of the old job in rank order, all saved after {states[0].get('steps')} steps"
            )
    of = states[0].get("world_size") or len(states)
    if of != len(states):
        raise ConfigError(f"reshard: {len(states)} states of a job with {of} ranks: give those of all its ranks")
    factor = world_size / len(states)
    return [_merged(states[0], states[rank::world_size], rank, world_size, factor) for rank in range(world_size)]


def _check_alike(states: Sequence[Any]) -> None:
    """Raises ConfigError unless all are states of HookStates, with one policy and of one model."""
    sizes: list[int] = []
    of = 0  # the state that has these sizes of parameters
    for number, state in enumerate(states):
        feedback = state.get("feedback") if isinstance(state, dict) else None
        if not isinstance(feedback, dict) or not {"kept", "sizes", "loss_scale"} <= feedback.keys():
            raise ConfigError(
                f"reshard: state {number}, of type {type(state).__name__}, is not what HookState.state_dict() of this "
                f"version returns: give that of every old rank"
            )
        if state.get("policy") != states[0].get("policy"):
            raise ConfigError(
                f"reshard: state {number} has another policy than state 0: {state.get('policy')} and "
                f"{states[0].get('policy')}; give the states of one job"
            )
        if sizes and feedback["sizes"] and feedback["sizes"] != sizes:
            raise ConfigError(
                f"reshard: state {number} is of a model of {len(feedback['sizes'])} parameters with "
                f"{sum(feedback['sizes'])} elements, state {of} of one of {len(sizes)} with {sum(sizes)}; give the "
                f"states of one job"
            )
        if sizes and feedback["sizes"] and feedback.get("orders") != states[of]["feedback"].get("orders"):
            raise ConfigError(
                f"reshard: the parameters of states {of} and {number} lie in memory in different orders, as with "
                f"channels_last in one of them; give the states of one job"
            )
        if not sizes:
            sizes, of = feedback["sizes"], number


def _merged(
    first: dict[str, Any], owners: Sequence[dict[str, Any]], rank: int, world_size: int, factor: float
) -> dict[str, Any]:
    """The state of a new rank, with the residuals of the old ranks `owners`, times `factor`."""
    kept: dict[int, list[tuple[int, Tensor, bool]]] = {}
    scale = first["feedback"]["loss_scale"]
    for owner in owners:
        feedback = owner["feedback"]
        times = factor * scale / feedback["loss_scale"]
        for number, stretches in feedback["kept"].items():
            kept.setdefault(number, []).extend((offset, values * times, *late) for offset, values, *late in stretches)
    merged = {**first, "world_size": world_size, "feedback": {**first["feedback"], "kept": kept, "rank": rank}}
    powersgd = first.get("low_rank", {}).get("powersgd")
    if powersgd is not None:
        errors: dict[int, Tensor] = {}
        for owner in owners:
            for number, error in owner["low_rank"]["powersgd"]["errors"].items():
                errors[number] = errors.get(number, 0) + error * factor
        merged["low_rank"] = {"powersgd": {**powersgd, "errors": errors}, "owner": rank}
    return merged
