"""Actions of a pipeline's ranks: computations, sends, reductions and waits, in the order in which a rank runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ..config import whole
from ..errors import ConfigError

Kind = Literal["F", "R", "B", "I", "W", "SEND_F", "SEND_B", "REDUCE", "WAIT", "UPDATE"]
COMPUTATIONS = ("F", "R", "B", "I", "W")
FREE = (
    *("UNSHARD", "RESHARD", "RECV_F", "RECV_B", "REDUCE_GRAD"),
    *("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"),  # since torch 2.15
)
"""Actions of torch that the model leaves out: receives are posted early and cost no time, a parameter gather is not
modelled, buffers of sends have room, and `with_reductions` puts the reductions where its mode wants them."""

Mode = Literal["serial", "blocking", "step", "deferred", "stale"]


class Action(NamedTuple):
    """One entry of a rank's list."""

    kind: Kind
    """F: forward. R: the forward again, whose activations the backward needs. B: full backward; I and W: its input and
    weight halves. SEND_F, SEND_B: output or input gradient to
    the neighbouring stage. REDUCE: start a bucket's reduction. WAIT: until it is done. UPDATE: optimizer step."""
    stage: int
    microbatch: int = 0
    part: int = 0
    """F, R, B, I, W: one of `parts` equal parts. REDUCE, WAIT, UPDATE: the bucket, in the order of backward."""
    parts: int = 1
    steps_ago: int = 0
    """WAIT, UPDATE: the reduction started so many steps before this one. The first steps skip those without."""

    def __str__(self) -> str:
        bucket = f"/{self.part}" if self.parts > 1 else ""
        microbatch = "" if self.kind in ("REDUCE", "WAIT", "UPDATE") else f" mb {self.microbatch}"
        return f"{self.kind} stage {self.stage}{microbatch}{bucket}"


Order = Sequence[Sequence[Action]]
"""The actions of each rank of one pipeline, by rank."""


@dataclass(frozen=True)
class Reduction:
    """The times when gradients are reduced between a pipeline's replicas, and when a rank waits for the result.

    Raises:
        ConfigError: unknown mode, or fewer than one bucket.
    """

    mode: Mode = "step"
    """serial: start after the rank's last backward, wait at once (Megatron-LM without overlap).
    blocking: start after a stage's last backward, wait at once (stock FSDP2 stages).
    step: start after a stage's last backward, wait in optimizer.step() (Fold3D, doi 10.1109/TPDS.2023.3247883).
    deferred: wait before the stage's next forward; the same parameters as `step`.
    stale: wait one step later, W(t+1) = W(t) - lr g(W(t-1)) (PipeDream-2BW, arXiv 2006.09503). Changes the numerics."""
    buckets: int = 1
    """Equal buckets of a stage. Each starts as soon as its share of the last backward has run."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode={self.mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
        if whole(self.buckets, 0) < 1:
            raise ConfigError(f"buckets={self.buckets} is not valid; use 1 to reduce a stage in one piece")


def actions_of(schedule: Any) -> list[list[Action]]:
    """The actions of a `torch.distributed.pipelining` schedule, or lists of `Action`, by rank.

    Reads `pipeline_order_with_comms` (multi-stage schedules) or `pipeline_order` (GPipe, 1F1B). The halves of an
    OVERLAP_F_B run one after the other, as in torch's default runtime.

    Raises:
        ConfigError: no order in `schedule`, or an action that the model does not know.
    """
    order = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    if order is None:
        order = schedule
    if isinstance(order, Mapping):
        order = [order[rank] for rank in sorted(order)]
    if isinstance(order, (str, bytes)) or not isinstance(order, Sequence) or not order:
        raise ConfigError(
            f"{type(schedule).__name__} has no pipeline_order; give a torch.distributed.pipelining schedule or one list"
            " of Action per rank"
        )
    return [_from_zero(list(_leaves(actions))) for actions in order]


def _from_zero(actions: list[Action]) -> list[Action]:
    """Torch 2.13's `pipeline_order` of 1F1B numbers the last rank's forwards from 1 to M; this counts them from 0."""
    forwards = [action.microbatch for action in actions if action.kind == "F"]
    if sorted(forwards) != list(range(1, len(forwards) + 1)):
        return actions
    return [a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a for a in actions]


def _leaves(actions: Iterable[Any]) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Action):
            yield action
        elif action is not None:
            yield from _from_torch(action)


def _from_torch(action: Any) -> Iterator[Action]:
    parts = getattr(action, "sub_actions", None)
    if parts:
        yield from _leaves(parts)
        return
    kind: Any = getattr(getattr(action, "computation_type", None), "value", None)
    if kind in FREE:
        return
    if kind not in get_args(Kind):
        raise ConfigError(f"action {action!r} is unknown to the model; it knows {', '.join(get_args(Kind))}")
    yield Action(kind, action.stage_index, action.microbatch_index or 0)


def with_reductions(order: Order, reduction: Reduction) -> list[list[Action]]:
    """`order` with the reductions, waits and optimizer steps of `reduction`."""
    return [_reduced(list(actions), reduction) for actions in order]


def _reduced(actions: list[Action], reduction: Reduction) -> list[Action]:
    first = {a.stage: i for i, a in reversed(list(enumerate(actions))) if a.kind == "F"}
    last = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
    produced = sorted(last, key=last.__getitem__)
    steps_ago = {"deferred": 1, "stale": 2}.get(reduction.mode, 0)
    result: list[Action] = []
    for index, action in enumerate(actions):
        if steps_ago and first.get(action.stage) == index and action.stage in last:
            result += _gated(action, reduction.buckets, steps_ago)
        elif reduction.mode != "serial" and last.get(action.stage) == index:
            result += _reducing(action, reduction)
        else:
            result.append(action)
    if reduction.mode == "serial":
        result += [action for stage in produced for action in _buckets("REDUCE", stage, reduction.buckets)]
    if reduction.mode in ("serial", "step"):
        result += [action for stage in produced for action in _buckets("WAIT", stage, reduction.buckets)]
    if not steps_ago:
        result += [Action("UPDATE", stage) for stage in produced]
    return result


def _gated(forward: Action, buckets: int, steps_ago: int) -> Iterator[Action]:
    """The stage's first forward; each part waits for its own bucket. Backward produced the front bucket last."""
    for part in range(buckets):
        bucket = buckets - 1 - part
        yield Action("WAIT", forward.stage, 0, bucket, buckets, steps_ago)
        yield Action("UPDATE", forward.stage, 0, bucket, buckets, steps_ago)
        yield forward._replace(part=part, parts=buckets)


def _reducing(backward: Action, reduction: Reduction) -> Iterator[Action]:
    """The stage's last backward; the reduction of a bucket starts after its part."""
    for part in range(reduction.buckets):
        yield backward._replace(part=part, parts=reduction.buckets)
        yield Action("REDUCE", backward.stage, 0, part, reduction.buckets)
        if reduction.mode == "blocking":
            yield Action("WAIT", backward.stage, 0, part, reduction.buckets)


def _buckets(kind: Kind, stage: int, buckets: int) -> list[Action]:
    return [Action(kind, stage, 0, part, buckets) for part in range(buckets)]


def peak_activations(actions: Iterable[Action], bytes_of: Mapping[int, float] | None = None) -> float:
    """The most activations that a rank keeps at once: stages x micro-batches, or bytes given those of each stage.

    A forward keeps a stage's activations of one micro-batch until its B or W ends. A rank runs its list in order, so
    the peak does not depend on times.
    """
    live = peak = 0.0
    for action in actions:
        size = 1.0 if bytes_of is None else bytes_of[action.stage]
        if action.kind == "F" and action.part == 0:
            live += size
            peak = max(peak, live)
        elif action.kind in ("B", "W") and action.part == action.parts - 1:
            live -= size
    return peak
