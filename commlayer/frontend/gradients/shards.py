"""`Shards`: averages in two levels, for `HookState(within=group)`.

The ranks of a host reduce-scatter each bucket by the group that they were given, as NCCL's, so each of them has a shard
of the host's mean. The shards are averaged between the hosts by commlayer, with codecs, losses and residuals. Then the
ranks of the host gather them. With L ranks per host, each rank moves 1/L of the bytes between the hosts.

    hook of each bucket        reduce-scatter within the host; submits the reduction of the shard
    hook of the last bucket    waits for all shards; all ranks agree whether the step counts; all-gathers

The all-gathers come last because all ranks of a host must call the collectives of a group in one order, and the shards
of a host are ready in any order. A rank without its shard must not leave the others in an all-gather: so all ranks tell
each other first whether they have theirs.

A residual is of a part of a parameter, and stays on the rank that had this part in its shard. DDP may regroup its
buckets; then the part may belong to another rank. So a residual outside of the shard is added before the
reduce-scatter, which brings it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...compress.codec import Form, codec_of
from ...compress.feedback import Added
from ...config import Policy
from ...errors import CommError, ConfigError
from ..group.backend import CommProcessGroup
from ..work.context import AHEAD, labelled, priority
from .between import FACTORS, FAULTS, between
from .commit import Commit, Settled
from .gradient import Reduction, reduce_gradient
from .hook_group import is_usable, largest_of, plain_all_gather, plain_reduce_scatter
from .low_rank import LowRank
from .reducer import real
from .samples import weigh

if TYPE_CHECKING:
    from .gradient import Place
    from .hook_state import HookState


@dataclasses.dataclass
class Bucket:
    """A bucket of this step, whose shard is being averaged."""

    place: Place
    buffer: Tensor
    whole: Tensor
    """The buffer, or memory with the same values and a tail, so that all shards have the same size."""
    shard: Tensor
    averaged: Future[Tensor]
    """The average of the shard, without the tail."""
    done: Future[Tensor]
    """The future that DDP waits for."""


class Shards:
    """The buckets of one HookState with `within`."""

    def __init__(self) -> None:
        self.per_host = 1
        """Ranks of a host. Gradients are divided by this before they are added up."""
        self._rank = 0
        self._within: Any = None
        self._whole: CommProcessGroup | None = None
        self._between: CommProcessGroup | None = None
        self._commit = Commit(held=True)
        self._open: list[Bucket] = []
        self._errors: list[BaseException] = []
        """Those of this step's operations."""
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._layouts: dict[int, list[Tensor]] = {}
        """The parameters of each bucket in the step before."""

    def reduce(self, state: HookState, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket of dense gradients over all ranks, in its own memory. All ranks call it.

        Raises ConfigError for groups that are not the hosts of the ranks, see `between`; and the error of an operation,
        which all ranks raise, with the reason on those where it failed.
        """
        if bucket.index() == 0:
            self._begin(state)
        buffer, parameters = bucket.buffer(), bucket.parameters()
        place = state.enter(parameters, bucket.index(), is_last=bucket.is_last())
        starts = [int(gradient.storage_offset() - buffer.storage_offset()) for gradient in bucket.gradients()]
        size = -(-len(buffer) // self.per_host)
        begin, end = (min(rank * size, len(buffer)) for rank in (self._rank, self._rank + 1))
        weigh(buffer, state.weight / self.per_host)
        strays = state.feedback.add_to(buffer, parameters, starts, outside=(begin, end))
        whole = buffer
        if len(buffer) != size * self.per_host:
            whole = self._kept(place.index, "whole", buffer, size * self.per_host)
            whole[: len(buffer)] = buffer
            whole[len(buffer) :] = 0
        shard = self._kept(place.index, "shard", buffer, size)
        self._within_host(lambda: plain_reduce_scatter(real(shard), real(whole), group=self._within))
        inside = [
            i for i, parameter in enumerate(parameters) if starts[i] < end and starts[i] + parameter.numel() > begin
        ]
        averaged = self._average(
            state,
            place,
            shard[: end - begin],
            [parameters[i] for i in inside],
            [starts[i] - begin for i in inside],
            strays,
            self._is_regrouped(place.index, parameters),
        )
        done: Future[Tensor] = Future(devices=[] if buffer.is_cpu else [buffer.device])
        self._open.append(Bucket(place, buffer, whole, shard, averaged, done))
        if place.is_last:
            self._finish(state)
        return done

    def _begin(self, state: HookState) -> None:
        """Called before the first bucket of a step. Makes the group between the hosts the first time, and after it has
        gone."""
        who = state.group().who
        self._fail_open(CommError(f"{who}: this step ended before the hook of its last bucket"))
        self._commit, self._errors = Commit(held=True), []
        whole, within = state.group(), state.within
        if self._whole is not whole or self._within is not within or not is_usable(self._between):
            made = between(whole, within, state.policy, fault=FACTORS if _is_of_whole(state) else 0)
            assert within is not None  # noqa: S101  # `between` has found a group
            self._whole, self._within, self._between = whole, within, made
            self.per_host, self._rank = within.size(), within.rank()
            self._layouts = {}

    def _average(
        self,
        state: HookState,
        place: Place,
        shard: Tensor,
        parameters: list[Tensor],
        starts: list[int],
        strays: Added,
        regrouped: bool,
    ) -> Future[Tensor]:
        """Starts the average between the hosts."""
        assert self._between is not None  # noqa: S101  # of `_begin`
        shared: Reduction = dataclasses.replace(
            state.reduction(),
            group=self._between,
            memory=self._memory,
            commit=self._commit,
            low_rank=LowRank(),
            weight=1.0,
            is_whole=False,
            failed=self._errors.append,
        )
        policy = state.policy
        if regrouped:  # a lost contribution may be on its way, which must not be lost again: its rank is not this one
            policy, shared.tolerance = dataclasses.replace(policy, loss_bound=0.0), None
        if len(shard):
            return reduce_gradient(shard, parameters, policy, shared, starts=starts, place=place, strays=strays)
        done: Future[Tensor] = Future(devices=[] if shard.is_cpu else [shard.device])
        self._commit.enter(is_last=place.is_last)
        change = (lambda: state.feedback.spend(strays)) if strays.stretches else None
        self._commit.settle(Settled([], change, lambda: shard, done))
        return done

    def _is_regrouped(self, index: int, parameters: list[Tensor]) -> bool:
        """Whether a bucket has other parameters than in the step before, or none is known."""
        before = self._layouts.get(index)
        self._layouts[index] = parameters
        return before is None or list(map(id, before)) != list(map(id, parameters))

    def _finish(self, state: HookState) -> None:
        """Completes the futures of all buckets, in the hook of the step's last bucket."""
        try:
            self._commit.conclude(lambda failed, finite: self._agree(failed=failed, finite=finite))
            for bucket in self._open:
                averaged = bucket.averaged.value()
                own = bucket.shard[: len(averaged)]
                if own.data_ptr() != averaged.data_ptr():
                    own.copy_(averaged)
                self._within_host(self._gather_of(bucket))
                if bucket.whole is not bucket.buffer:
                    bucket.buffer.copy_(bucket.whole[: len(bucket.buffer)])
                if state.tolerance is not None:
                    state.tolerance.observe(bucket.place.step, bucket.place.index, bucket.buffer)
        except Exception as error:
            self._fail_open(error)
            raise
        for bucket in self._open:
            bucket.done.set_result(bucket.buffer)
        self._open = []

    def _gather_of(self, bucket: Bucket) -> Callable[[], object]:
        return lambda: plain_all_gather(real(bucket.whole), real(bucket.shard), group=self._within)

    def _agree(self, *, failed: bool, finite: bool) -> bool:
        """Whether the averages are finite on all ranks. Raises an error on all ranks if an operation failed on one."""
        # If a rank has died, this raises, and names that one: the peer of an operation may only have gone after it.
        overflows, culprit = self._tell(failed=failed, finite=finite)
        if self._errors:
            raise self._errors[0]
        if culprit is not None:
            raise CommError(
                f"{self._who()}: HookState(within=...): an operation of this step failed on rank {culprit}; its error "
                f"has the reason"
            )
        return not overflows

    def _tell(self, *, failed: bool, finite: bool) -> tuple[bool, int | None]:
        """Whether there are infinite averages on any rank, and a rank of the job on which an operation failed."""
        whole = self._whole
        assert whole is not None  # noqa: S101  # of `_begin`
        with priority(AHEAD), labelled("within"):
            overflows, culprit = largest_of(whole, [not finite, failed * (1 + whole.rank())])
        return overflows > 0, dist.get_global_rank(whole, int(culprit) - 1) if culprit else None

    def _who(self) -> str:
        return "" if self._whole is None else self._whole.who

    def _within_host(self, collective: Callable[[], object]) -> None:
        """Runs a collective of the host. If a rank has died, the error says which one: gloo knows only a socket."""
        try:
            collective()
        except CommError:
            raise
        except RuntimeError as error:
            self._tell(failed=True, finite=False)
            raise CommError(
                f"{self._who()}: HookState(within=...): a collective of the group {self._within.group_name!r} failed: "
                f"{error}"
            ) from error

    def _fail_open(self, error: Exception) -> None:
        """Fails the futures of buckets that are not complete."""
        buckets, self._open = self._open, []
        for bucket in buckets:
            bucket.done.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type

    def _kept(self, index: int, use: str, like: Tensor, size: int) -> Tensor:
        """Memory of `size` values like those of `like`, which bucket `index` owns until its next step."""
        memory = self._memory.get((index, use))
        if memory is None or (len(memory), memory.dtype, memory.device) != (size, like.dtype, like.device):
            memory = self._memory[index, use] = like.new_zeros(size)
        return memory


def check_within(policy: Policy) -> None:
    """Raises ConfigError for a policy that needs whole buckets."""
    if needs_whole(policy):
        raise ConfigError(f"HookState(Policy(codec={policy.codec!r}), within=...): {FAULTS[FACTORS]}")


def _is_of_whole(state: HookState) -> bool:
    """Whether the policy, or a restored state, needs whole buckets."""
    return needs_whole(state.policy) or bool((state.low_rank.state_dict()["powersgd"] or {}).get("errors"))


def needs_whole(policy: Policy) -> bool:
    """Whether a codec of the policy needs whole buckets, not shards."""
    return policy.codec == "auto" or codec_of(policy.codec).form is Form.LOW_RANK
