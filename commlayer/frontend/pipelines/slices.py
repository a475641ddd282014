"""`slices`: a schedule whose stages work on slices of sequences, so that few sequences fill a pipeline.

    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    commlayer.pipeline.slices(schedule, [512, 512, 512, 512])
    schedule.step(tokens, target=targets)                            # the training loop is unchanged

`scheduler.pipelines.sliced` has the order, `SlicedStage` the computations, `HandOver` the messages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import whole
from ...dynamo import untraced
from ...errors import ConfigError, MismatchError
from ...scheduler.actions import Action, actions_of
from ...scheduler.pipelines import sliced
from ..work.context import priority
from .hand_over import URGENT, Form, HandOver, check_form
from .measure import stages_of
from .replaced import Replaced
from .sliced_stage import WHO, SlicedStage, fault_of

AHEAD = 4
"""The next computations of a rank whose inputs it has begun to receive."""

UNTAGGED = ("nccl", "ucc")
"""Backends that ignore the tags of messages."""


@untraced
def slices(schedule: Any, lengths: Iterable[int]) -> Sliced:
    """From now on the schedule's steps compute each sequence in slices of `lengths` tokens. All its ranks call it.

    A causal stage computes a slice from the keys and values of the slices before, so stage s works on slice i while
    stage s + 1 works on slice i - 1 (TeraPipe, arXiv 2102.07988). With M micro-batches of n equal slices, the bubble of
    p stages falls from (p - 1) / (M + p - 1) to (p - 1) / (M n + p - 1) of the step. Losses and gradients are those of
    whole sequences, but for rounding: backward passes run in reverse, and the gradients of keys and values of all later
    slices are added up before a slice's own.

    `schedule` is one of torch.distributed.pipelining with whole backward passes: GPipe, 1F1B, LoopedBFS,
    Interleaved1F1B or `pipeline.schedule`. It keeps its order of micro-batches: a forward pass becomes those of the
    slices, a backward pass theirs in reverse. The module of a stage is called as `module(inputs, past=past)`, and
    returns a pair: its output, and the slice's keys and values, as tensors in any tuples, lists and dicts. `past` has
    those of each earlier slice of these sequences, in order; the module concatenates them, and finds the slice's first
    position in their lengths. Inputs and outputs have sequences in dimension 0 and tokens in dimension 1; outputs for
    other stages are of float32, float64, bfloat16 or float16. `loss_fn` gets the outputs of whole sequences, once per
    micro-batch.

    `step` takes one tensor on the first stage, and `target` on the last. Returns a handle with `remove`. Call
    `pipeline.attach` after it.

    Raises ConfigError for arguments and stages with which results would change, on the rank that has them, and
    MismatchError on the others: modules without `past`, dropout, BatchNorm, parameters of two stages, lengths that
    differ between ranks. `step` raises ConfigError under `no_grad`, and for sequences of another length.
    """
    stages = stages_of(schedule)
    given, fault = _lengths(lengths)
    fault = fault or _fault_of(schedule, stages)
    _agree(stages[0].group, given, fault)
    return Sliced(schedule, stages, given)


class Sliced:
    """What `slices` returns."""

    def __init__(self, schedule: Any, stages: Sequence[Any], lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        """The slices of a sequence, in tokens."""
        self._schedule = schedule
        self._microbatches = int(schedule._n_microbatches)
        self._stages = {stage.stage_index: SlicedStage(stage, self.lengths) for stage in stages}
        self._starts = (0, *itertools.accumulate(self.lengths))
        self._hand_over = HandOver(stages, self._microbatches * len(self.lengths))
        self._order = sliced(actions_of(schedule)[stages[0].group_rank], len(self.lengths))
        self._last = {action.stage: place for place, action in enumerate(self._order) if action.kind == "B"}
        self._forms: dict[int, Form] = {}
        """The form of the inputs of stages in this step: those of this rank, and those that it has told."""
        self._inputs: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self._ends: dict[int, list[Tensor]] = {}
        """By micro-batch, the outputs of the last stage, with the gradients of the loss."""
        self._losses: dict[int, Tensor] = {}
        self._loss_options: dict[str, Any] = {}
        self._outputs: dict[int, Tensor] | None = None
        self._replaced = Replaced()
        self._replaced.put(schedule, "step", self.step)

    def remove(self) -> None:
        """From now on the schedule works on whole sequences again. Raises ConfigError while `attach` is in force."""
        if vars(self._schedule).get("step", self.step) != self.step:
            raise ConfigError(f"{WHO}: remove() of its handle: call remove() of attach's handle first")
        self._replaced.restore()

    def step(
        self,
        *args: Tensor,
        target: Tensor | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Replaces `schedule.step`, with its arguments: a step on [sequences, tokens, ...]. Returns the outputs of the
        last stage, without a graph; on other ranks None."""
        has_backward = bool(self._schedule._has_backward)
        for own in self._stages.values():
            own.stage.has_backward = has_backward
            own.begin()
        self._ends.clear()
        self._losses.clear()
        self._forms.clear()
        self._outputs = {} if return_outputs else None
        self._loss_options = loss_kwargs or {}
        given = {name: value for name, value in kwargs.items() if value is not None or name not in SPLIT}
        self._check(args, given, target, has_backward=has_backward)
        self._inputs = args[0].chunk(self._microbatches) if args else ()
        self._targets = () if target is None else target.chunk(self._microbatches)
        order = self._order if has_backward else [action for action in self._order if action.kind == "F"]
        with priority(URGENT), torch.set_grad_enabled(has_backward):
            for place, action in enumerate(order):
                self._receive(order[place : place + AHEAD])
                if action.kind == "F":
                    self._forward(action)
                else:
                    self._backward(action)
                    if self._last[action.stage] == place:
                        scale = self._microbatches if self._schedule.scale_grads else 1
                        self._stages[action.stage].stage.perform_reduce_grad(scale)
            self._hand_over.end()
        if losses is not None and self._losses:
            losses[:] = [self._losses[microbatch] for microbatch in range(self._microbatches)]
        outputs = (
            torch.cat([self._outputs[microbatch] for microbatch in sorted(self._outputs)]) if self._outputs else None
        )
        self._outputs, self._inputs, self._targets = None, (), ()
        return outputs

    def _receive(self, actions: Sequence[Action]) -> None:
        """Begins to receive the inputs of computations whose form is known; those of the first are needed now."""
        for number, action in enumerate(actions):
            stage, unit = self._stages[action.stage], action.microbatch
            source = action.stage - 1 if action.kind == "F" else action.stage + 1
            is_end = stage.stage.is_first if action.kind == "F" else stage.stage.is_last
            if is_end or not self._hand_over.is_remote(source):
                continue
            direction: Any = action.kind
            if self._hand_over.is_expected(direction, action.stage, unit):
                continue
            microbatch, index = divmod(unit, len(self.lengths))
            if action.kind == "F":
                if action.stage not in self._forms:
                    if number:
                        continue
                    self._forms[action.stage] = self._hand_over.hear(action.stage)
                memory = self._forms[action.stage].empty(self.lengths[index], torch.device(stage.stage.device))
            elif stage.has_run(microbatch, index):
                memory = torch.empty_like(stage.output(microbatch, index), memory_format=torch.contiguous_format)
            else:
                continue
            self._hand_over.expect(direction, action.stage, unit, source, memory)

    def _forward(self, action: Action) -> None:
        stage, unit = self._stages[action.stage], action.microbatch
        microbatch, index = divmod(unit, len(self.lengths))
        if stage.stage.is_first:
            inputs = self._inputs[microbatch].narrow(1, self._starts[index], self.lengths[index])
        else:
            inputs = self._hand_over.take("F", stage.number, unit)
        try:
            output = stage.forward(microbatch, index, inputs)
            if not stage.stage.is_last:
                check_form(output, stage.who)
        except ConfigError:
            if stage.number + 1 not in self._forms:
                self._hand_over.refuse(stage.number)
            raise
        if stage.stage.is_last:
            self._end(microbatch, index, output)
            return
        if stage.number + 1 not in self._forms:
            form = self._forms[stage.number + 1] = Form.of(output)
            self._hand_over.announce(stage.number + 1, form)
        self._hand_over.send("F", stage.number + 1, unit, output)

    def _end(self, microbatch: int, index: int, output: Tensor) -> None:
        """Keeps an output of the last stage; after the last slice, computes the loss of the whole sequences."""
        ends = self._ends.setdefault(microbatch, [])
        ends.append(output.detach().requires_grad_(output.requires_grad))
        if index + 1 < len(self.lengths):
            return
        whole_output = torch.cat(ends, 1)
        if self._outputs is not None:
            self._outputs[microbatch] = whole_output.detach()
        loss_fn = self._schedule._loss_fn
        if loss_fn is not None and self._targets:
            self._losses[microbatch] = loss_fn(whole_output, self._targets[microbatch], **self._loss_options)

    def _backward(self, action: Action) -> None:
        stage, unit = self._stages[action.stage], action.microbatch
        microbatch, index = divmod(unit, len(self.lengths))
        gradient: Tensor | None
        if stage.stage.is_last:
            if index + 1 == len(self.lengths):
                self._losses[microbatch].backward()
                self._losses[microbatch] = self._losses[microbatch].detach()
            gradient = self._ends[microbatch].pop().grad
        else:
            gradient = self._hand_over.take("B", stage.number, unit)
        found = stage.backward(microbatch, index, gradient)
        if found is not None:
            self._hand_over.send("B", stage.number - 1, unit, found)

    def _check(self, args: Sequence[Any], kwargs: dict[str, Any], target: Tensor | None, *, has_backward: bool) -> None:
        """Raises ConfigError for arguments of a step that slices cannot take, after the later stages have been told."""
        is_first, is_last = (any(getattr(own.stage, name) for own in self._stages.values()) for name in ENDS)
        tokens = self._starts[-1]
        fault = ""
        if has_backward and not torch.is_grad_enabled():
            fault = "step() under no_grad has no backward pass; call eval(), or leave no_grad out"
        elif kwargs:
            fault = f"step({', '.join(kwargs)}=...): slices have no keyword arguments; give one tensor"
        elif len(args) != is_first:
            fault = f"step() got {len(args)} inputs; give {int(is_first)} tensor on this rank"
        elif is_last and has_backward and target is None:
            fault = "step() got no target; give the last stage target=..."
        for name, value in (("input", args[0] if args else None), ("target", target if is_last else None)):
            if fault or value is None:
                continue
            if value.dim() < 2 or value.size(1) != tokens:
                fault = (
                    f"slices of {list(self.lengths)} tokens are {tokens}, and the {name} has shape "
                    f"{list(value.shape)}; give [sequences, {tokens}, ...], or other lengths"
                )
            elif value.size(0) % self._microbatches:
                fault = f"{value.size(0)} sequences of the {name} are no multiple of {self._microbatches} micro-batches"
        if fault:
            self._refuse()
            raise ConfigError(f"rank {dist.get_rank()}: {WHO}: {fault}")

    def _refuse(self) -> None:
        """Tells the later stages that this rank refuses the step, and hears whether an earlier stage refuses it."""
        stage = self._stages[self._order[0].stage]
        if not stage.stage.is_first:
            with contextlib.suppress(MismatchError):
                self._hand_over.hear(stage.number)
                self._hand_over.refuse(stage.number)
            return
        self._hand_over.refuse(stage.number)


ENDS = ("is_first", "is_last")
SPLIT = ("arg_mbs", "kwarg_mbs", "target_mbs")
"""Inputs that the caller has split, which torch 2.15's `eval` gives to `step` as None."""


def passes_of(schedule: Any) -> int:
    """The backward passes of each stage in a step of the schedule."""
    owner = getattr(vars(schedule).get("step"), "__self__", None)
    return int(schedule._n_microbatches) * (len(owner.lengths) if isinstance(owner, Sliced) else 1)


def _lengths(given: Iterable[int]) -> tuple[list[int], str]:
    """The lengths, and their fault."""
    try:
        plain = list(given)
    except TypeError:
        return [], f"lengths={given!r}: give a list of lengths in tokens"
    lengths = [whole(length.item() if isinstance(length, Tensor) else length, 0) for length in plain]
    if not lengths or min(lengths) < 1:
        return [], f"lengths={plain}: give whole numbers of at least 1 token"
    return lengths, ""


def _fault_of(schedule: Any, stages: Sequence[Any]) -> str:
    """Why the schedule and its stages on this rank cannot work on slices, with the remedy; empty: they can."""
    if isinstance(getattr(vars(schedule).get("step"), "__self__", None), Sliced):
        return "the schedule has slices already; call remove() of their handle first"
    halves = {action.kind for actions in actions_of(schedule) for action in actions} - {"F", "B"}
    if halves & {"I", "W"}:
        return (
            f"{type(schedule).__name__} runs backward passes in halves; use ScheduleGPipe, Schedule1F1B, "
            f"ScheduleLoopedBFS, ScheduleInterleaved1F1B or pipeline.schedule"
        )
    if dist.get_backend(stages[0].group) in UNTAGGED:
        return "messages between stages need tags; make the group of the stages with the backend commlayer or gloo"
    owner: dict[Tensor, int] = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if owner.setdefault(parameter, stage.stage_index) != stage.stage_index:
                return (
                    f"stages {owner[parameter]} and {stage.stage_index} share parameter {name!r}, as a head tied to "
                    f"the embedding; give each stage its own"
                )
        fault = fault_of(stage)
        if fault:
            return f"stage {stage.stage_index}: {fault}"
    return ""


def _agree(group: Any, lengths: Sequence[int], fault: str) -> None:
    """All ranks refuse what one of them cannot do."""
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (list(lengths), fault), group=group)
    who = f"rank {dist.get_rank()}: {WHO}"
    if fault:
        raise ConfigError(f"{who}: {fault}")
    for rank, (theirs, their_fault) in enumerate(heard):
        if their_fault:
            raise MismatchError(f"{who}: rank {rank} of the pipeline refuses it: {their_fault}")
        if theirs != heard[0][0]:
            raise MismatchError(
                f"{who}: rank {rank} of the pipeline has lengths={theirs}, and rank 0 has lengths={heard[0][0]}; give "
                f"all ranks the same"
            )
