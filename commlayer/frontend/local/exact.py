"""`ExactSteps`: steps with the average gradient of all sites, before local steps begin, or instead of them.

Gradients travel in buckets, by the code of DDP's communication hook (`HookState`): with its codecs, residuals and
classes. Those of a plain module start while its backward pass goes on, and are averages when `backward()` returns.
Within a site, DDP or FSDP2 averages first; the sites follow in `optimizer.step()`.

    first bucket     each rank tells the others its `Head`
    end of the pass  the other buckets; which parameters have a gradient; all ranks read the heads, then the averages
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer

from ...compress.fine import Fine
from ...compress.loss_scale import LossScale
from ...errors import ConfigError
from ..gradients.hook_group import largest_of
from ..gradients.passes import Passes
from ..group.backend import CommProcessGroup
from ..work.context import AHEAD, labelled, priority
from .bucket import Bucket, buckets_of, whole_buckets_of
from .exact_state import ExactState, check_whole
from .fragment import adopt, fragments_of
from .heads import Head, Heads
from .measured import Measured
from .site import Site
from .weights import Told, Weights

MEASURED = 6
"""Exact steps before `every="auto"` decides. The first is not counted: it makes plans."""

SEARCHES = 2
"""Averages before which the job's GradScaler is looked for: some jobs make theirs after a first step."""


class ExactSteps:
    """Averages gradients, in float32 while it `measures`, and then as the policy of `state` says.

    `count`: this site's samples of a step; None: all sites have the same weight. `is_plain`: whether the model is a
    plain module, whose backward passes have hooks.
    """

    def __init__(
        self, weights: Weights, site: Site, state: ExactState, count: Callable[[], float] | None, *, is_plain: bool
    ) -> None:
        self.steps = 0
        """Exact steps of this rank, including those before a checkpoint."""
        self.averages = 0
        """Averages that this process has made: one for each step, unless a backward pass was not expected."""
        self.measures = False
        """Whether averages start after the backward pass, in float32, so that it and they can be timed."""
        self.state = state
        self._weights, self._site, self._count = weights, site, count
        self._parameters = list(weights.parameters.values())
        self._is_plain = is_plain
        self._policy = state.policy
        state.check_policy = functools.partial(check_whole, site)
        self._meet()
        self.order: list[int] | None = None
        """The parameters in the order of their gradients, by number; None: not known yet, or not used."""
        self._has_begun = False
        self._passes: Passes | None = None
        self._expected = 1  # backward passes per step
        self._told = 1  # the most passes that a rank has told in this step
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._times: dict[Tensor, int] = {}  # how often the first pass accumulated, in the order of the last times
        self._started = 0  # buckets of this average
        self._has_averages = False  # since the last backward pass
        self._scale = LossScale()
        self._ended_s = 0.0  # the end of the last step
        self._step_s: list[float] = []  # of steps without the average
        self._sent_s: list[float] = []  # of averages
        self._part_s: list[float] = []  # of averages of `_part`
        self._part: Tensor | None = None  # float32, on the host; None: this rank measures nothing

    def _meet(self) -> None:
        """Saved residuals are numbered in the model's order."""
        self.state.feedback.meet(list(self._weights.parts.values()))

    def begin(self, group: CommProcessGroup, *, share: float) -> None:
        """The training begins. `group`: that of syncs, which all ranks have made. `share`: bytes of a fragment in the
        codec of local steps, as a share of all values in float32; 0: nothing is measured."""
        self._of_syncs, self._group, self._has_begun = group, self.state.group(), True
        self._heads = self.state.heads = Heads(self._group, is_weighted=self._count is not None)
        if share:
            self._part = torch.zeros(math.ceil(share * self._values), dtype=torch.float32, device="cpu")
        self.measure(bool(share))
        if not self._is_plain:
            self._divide(self._ordered(range(len(self._parameters) - 1, -1, -1)))
            return
        if self.order is None:  # all are one bucket, as in the first step of DDP
            self._divide(whole_buckets_of(self._weights.parts, self._site))
        else:
            self._divide(self._ordered(self.order))
        self._passes = Passes(self._parameters, self._begin_pass, self._accumulated, self._end_pass)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint. Once local steps have begun, only the number of exact steps is left."""
        is_over = not self._has_begun
        return {
            "exact": self.steps,
            "gradients": None if is_over else self.state.state_dict(),
            "order": None if is_over else self.order,
            "passes": self._expected,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes over the value of `state_dict`, before `begin`, but not the policy. Raises ConfigError for the state of
        another model."""
        self.steps, self.order, self._expected = saved["exact"], saved.get("order"), saved.get("passes", 1)
        if self.order is not None and sorted(self.order) != list(range(len(self._parameters))):
            raise ConfigError(
                f"LocalSteps.load_state_dict: the state is of a model with {len(self.order)} parameters, and this one "
                f"has {len(self._parameters)}: restore the state of this model"
            )
        if saved.get("gradients") is not None:
            self.state.load_state_dict({**saved["gradients"], "policy": dataclasses.asdict(self._policy)})
            self._meet()

    def finish(self) -> None:
        """Waits for reductions of gradients on a device. Raises their error."""
        self.state.in_flight.drain()

    def abort(self) -> None:
        """Fails the operations of exact steps, here and on the others."""
        if self._has_begun:
            self._group.abort()

    def end(self) -> None:
        """Exact steps are over: lets go of the parameters and of the group."""
        if self._passes is not None:
            self._passes.remove()
        is_own = self._has_begun and self._group is not self._of_syncs
        if is_own and self._group in c10d._world.pg_map:  # else the script has destroyed all groups, an error by itself
            dist.destroy_process_group(self._group)
        self._has_begun = False
        self._divide([])

    def measure(self, measures: bool) -> None:
        """Begins or ends to measure."""
        self.measures = measures
        if not measures:
            self._part = None
        wanted = "none" if measures else self._policy.codec
        if self.state.policy.codec != wanted:
            self.state.change_policy({"codec": wanted})

    def explain(self, measured: Measured | None) -> str:
        """How gradients travel, in words. `measured`: what has let all steps stay exact; None: nothing yet."""
        codec = self.state.policy.codec
        moment = "in optimizer.step()"
        if self._is_plain:
            moment = f"{'after' if self.measures else 'beside'} the backward pass"
        words = (
            f"{self.steps} exact steps so far; gradients travel in {'float32' if codec == 'none' else codec}, {moment}"
        )
        if measured is not None:
            words = (
                f"{measured}\n{words}; all stay exact, since H* is {measured.every}. An average in float32 takes "
                f"{measured.average_s * 1e3:.3g} ms alone"
            )
        return f"{words}\n{self.state.explain()}" if codec == "auto" else words

    # ---- backward passes --------------------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        """Whether the gradients of the pass under way complete those of the step, as the step before had them."""
        return self._passes is not None and self._passes.count >= self._expected

    def _begin_pass(self) -> None:
        self._has_averages = False
        for bucket in self._buckets:
            bucket.awaited = {parameter: self._times.get(parameter, 1) for parameter in bucket.parameters}

    def _accumulated(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there: buckets that are complete start, in their order."""
        bucket = self._bucket_of[parameter]
        if bucket.is_started:
            raise ConfigError(
                f"{self._group.who}: LocalSteps: a gradient of shape {tuple(parameter.shape)} was accumulated "
                f"after its average had begun: a backward pass accumulates it more often than the first one did, "
                f"or one has failed; checkpoint with use_reentrant=False"
            )
        if not self.averages:  # all buckets start at the end of the pass
            if self._passes is not None and self._passes.count == 1:
                self._times[parameter] = self._times.pop(parameter, 0) + 1
            return
        bucket.arrived(parameter)
        while self._is_due and not self.measures and self._started < len(self._buckets):
            following = self._buckets[self._started]
            if following.awaited:
                break
            self._fill(following)
            if not self._started:
                self._tell()
            self._start(following)

    def _end_pass(self) -> None:
        if self._is_due:
            self._finish()

    def average(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Called in front of each step of the optimizer: averages what no backward pass has averaged. Where no site has
        a gradient of a parameter, it keeps None.

        Raises ConfigError for a closure, for sparse gradients, and for an optimizer that would unscale them later;
        CommError if another rank makes no more steps; and the errors of operations. So do the backward passes.
        """
        if has_closure:
            raise ConfigError("LocalSteps: exact steps with a closure would not average its gradients; leave it out")
        if self._has_averages:
            return
        for name in ("grad_scale", "found_inf"):  # GradScaler sets them on an optimizer that unscales itself
            if getattr(optimizer, name, None) is not None:
                raise ConfigError(
                    f"LocalSteps: {type(optimizer).__name__}.{name} is set: a fused optimizer with a GradScaler "
                    f"unscales within step(), but these exact steps average before it, and the scales of the ranks may "
                    f"differ; make the optimizer without fused=True"
                )
        self._finish()

    # ---- an average -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Starts the buckets that are left, and makes the averages of all of them the gradients."""
        rest = self._buckets[self._started :]
        for bucket in rest:
            self._fill(bucket)
        begin_s = time.perf_counter()  # after the copies, which wait for the device: calls only launch its work
        if not self._started:
            self._tell()
        has = self._site.agreed(lambda: self._exchange(rest))
        if self.measures:
            self._sent_s.append(time.perf_counter() - begin_s)
            if self._ended_s and self.steps:
                self._step_s.append(begin_s - self._ended_s)
            self._site.agreed(self._try)
            self._ended_s = 0.0  # a step may have several averages
        for bucket in self._buckets:
            bucket.put([has[parameter] for parameter in bucket.parameters])
        self._started, self._has_averages = 0, True
        self.averages += 1
        if self.order is None and self._is_plain:
            self._learn()

    def _fill(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(f"{self._group.who}: LocalSteps: sparse gradients; use sparse=False")
        bucket.fill(on_host=self.measures)

    def _start(self, bucket: Bucket) -> None:
        """Starts the average of the next bucket."""
        self._started += 1
        if bucket.has_shard:
            index = self._sent.index(bucket)
            bucket.start(self.state, index, is_last=index == len(self._sent) - 1)

    def _exchange(self, rest: Sequence[Bucket]) -> dict[Tensor, bool]:
        """Starts the rest, and waits for all. Returns which parameters have a gradient on any rank."""
        for bucket in rest:
            self._start(bucket)
        flags = torch.tensor(
            [float(parameter.grad is not None) for parameter in self._parameters], dtype=torch.float32, device="cpu"
        )
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with priority(AHEAD), labelled(f"exact step {self.steps}"):
            work = self._group.allreduce([flags], options)
        self._told = max(head.passes for head in self._heads.meet())
        work.wait()
        for bucket in self._buckets:
            bucket.wait()
        return dict(zip(self._parameters, map(bool, flags.tolist()), strict=True))

    def _try(self) -> None:
        """Times an average of as many bytes as a sync of local steps has, alone and with all ranks at their places."""
        assert self._part is not None  # noqa: S101  # it measures
        begin_s = time.perf_counter()
        with labelled(f"trial of exact step {self.steps}"):
            self._of_syncs.allreduce([self._part]).wait()
        self._part_s.append(time.perf_counter() - begin_s)

    def _learn(self) -> None:
        """Divides the gradients in the order in which the first rank's backward pass has made them; those that it has
        not made come last."""
        own = dict.fromkeys([*self._times, *reversed(self._parameters)])
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        order = torch.tensor([numbers[parameter] for parameter in own], dtype=torch.int64, device="cpu")
        options = BroadcastOptions()
        options.rootRank = 0
        with priority(AHEAD), labelled("order of gradients"):
            self._group.broadcast([order], options).wait()
        self.order = order.tolist()
        self._divide(self._ordered(self.order))

    def _ordered(self, numbers: Sequence[int]) -> list[Bucket]:
        """The buckets of the parameters of these numbers."""
        parts = list(self._weights.parts.items())
        return buckets_of(dict(parts[number] for number in numbers), self._site)

    def _divide(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._sent = [bucket for bucket in buckets if bucket.has_shard]
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}

    # ---- heads ------------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """An average begins: tells the others."""
        passes = 0 if self._passes is None else self._passes.count
        samples = 1.0 if self._count is None else self._count()
        scale, is_in_step = self._scale_of_gradients(), self._is_plain and not self._is_due
        self._heads.tell(Head(self.steps * self._is_plain, passes, False, samples, scale, is_in_step))

    def _scale_of_gradients(self) -> float:
        """That of the job's GradScaler; 1 in steps without hooks, which average after it has unscaled."""
        if not self._is_plain:
            return 1.0
        if self.averages < SEARCHES:
            self._scale.find_scalers()
        try:
            return self._scale.value
        except ConfigError:  # several scalers: only the job knows which one is meant
            return 1.0

    # ---- steps, and the end -----------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """The optimizer has made its step."""
        self.steps += 1
        self._expected, self._has_averages = max(self._told, 1), False
        if self._passes is not None:
            self._passes.stepped()
        self._ended_s = time.perf_counter()

    def leave(self) -> None:
        """The training ends with exact steps: all ranks take the weights of the first site, and average their buffers.
        Raises CommError if other ranks go on, and as `Weights.check_told`."""
        self._site.part()
        buffers = self._weights.flat_buffers()
        tells = self._weights.at_end()._replace(spoiled=self._weights.spoiled(buffers))
        own = Head(self.steps * self._is_plain, is_leaving=True)._replace(**tells._asdict())

        def told() -> None:
            self._heads.tell(own)
            ranks = dist.get_process_group_ranks(self._group)
            heads = zip(ranks, self._heads.meet(), strict=True)
            self._weights.check_told({rank: Told.of(head) for rank, head in heads})

        self._site.agreed(told)
        self.finish()
        fragments = fragments_of(self._parameters, 1, Fine(), self._site)
        adopt(self._of_syncs, fragments)
        self._weights.reshard()
        for fragment in fragments:
            fragment.put(fragment.shared)
        buffers = self._site.average(buffers)
        if len(buffers):
            self._of_syncs.allreduce([buffers], op=dist.ReduceOp(dist.ReduceOp.AVG)).wait()
            self._weights.put_buffers(buffers)

    @property
    def can_tell(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._step_s) >= MEASURED - 1

    @property
    def _values(self) -> int:
        """Values that this rank sends: its site's, or its shard of them."""
        return self._site.padded(sum(part.numel() for part in self._weights.parts.values())) // self._site.size

    def measured(self, value_bytes: float, fragments: int) -> Measured:
        """What these steps tell of the least number of local steps, the same on all ranks, all of which call.

        The time of a step is that of the slowest rank. That of an average is that of the rank that came last, which has
        waited for no other; of the averages as short as a sync the slowest counts, since lost packets make some longer.
        """
        step_s, sent_s = statistics.median(self._step_s), statistics.median(self._sent_s[1:])
        own = [self._values, step_s, -sent_s, -max(self._part_s[1:])]  # parts of ranks may differ by a row
        values, step_s, sent_s, part_s = largest_of(self._group, self._site.largest(own))
        return Measured.of(self._group.size(), int(values), value_bytes, -sent_s, -part_s, max(step_s, 1e-9), fragments)
