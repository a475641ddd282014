"""`elastic`: a training loop that goes on when ranks leave, die or join.

    with commlayer.elastic(model, optimizer, min_size=2) as job:
        loader = DataLoader(dataset, batch_sampler=job.sampler(dataset, 64))
        for batch in loader:
            loss(model, batch).backward()
            job.step()

`job.step()` averages the gradients of all ranks and steps the optimizer. A step is made by all ranks that live, or by
none, and then the loop gets the same batch again.

The ranks need no vote for that. An all-reduce ends on a rank when it has data of all ranks. A rank starts those of step
s after it has made step s - 1, and makes it when they have ended. So when a rank dies, those that live have made s or
s - 1 steps. If one of them has made s, it still has the averages of that step, whose bits are the same on all ranks:
the others get them and make it, too. If none has, all repeat it without the dead rank.

After the last step there is no next one to fail. So all meet in a small all-reduce at the end of the context: where
that ends, all have made the last step. A rank on which it ends says so in the Store, and nobody waits for that rank.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Hashable, Iterable, Iterator, Sized
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ...config import Config
from ...errors import ClosedError, CommError, ConfigError, MismatchError, PeerLostError
from ...scheduler.deferred import check_whole
from ...transport.log import log
from ..gradients.fsdp import sharded_modules
from ..group.newcomers import difference
from ..group.state import State
from .averages import Averages
from .contribution import Contribution
from .membership import ExcludedError, Membership
from .overlap import Overlap
from .replica import CODECS, DifferingError, Replica
from .sampler import Sampler
from .suited import check_model, check_norm, check_stepped, check_trained, check_world, reshard, row_of, size_of

Batch = TypeVar("Batch")


class Job:
    """What `elastic` returns; see there. All ranks make it, and call its methods, alike."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        min_size: int,
        schedule: LRScheduler | None,
        join: dist.Store | None,
        clip_norm: float | None,
        codec: str,
        overlap: bool,
    ) -> None:
        outermost = getattr(model, "_orig_mod", model)  # of torch.compile
        world = check_world(outermost, min_size, joins=join is not None)
        who = "elastic(join=...)" if world is None else f"rank {dist.get_rank()}: elastic"
        row = row_of(outermost, who, joins=join is not None)
        if row is None:
            check_model(outermost, world, who)
        check_stepped(optimizer, who)
        check_whole(optimizer, model.parameters(), who)
        if schedule is not None:
            check_stepped(schedule, who)
        self._model = outermost if isinstance(outermost, DistributedDataParallel) else None
        self._optimizer = optimizer
        self._min_size = min_size
        self._store = join
        self._state = State(model, optimizer, schedule)
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._averaged = frozenset(self._trained)
        check_trained(optimizer, self._averaged, who)
        self._averages = Averages(self._trained, check_norm(clip_norm, who))
        self._is_in_row, self._row_size = row is not None, 1 if row is None else row.size()
        self._overlaps = overlap and row is None  # FSDP2 gives gradients to parameters without calling hooks
        self._overlap: Overlap | None = None
        if codec not in CODECS:
            raise ConfigError(f"{who}(codec={codec!r}): use one of {', '.join(CODECS)}")
        self._codec = codec
        self._replica = Replica(
            self._state,
            self._averages,
            codec,
            functools.partial(reshard, sharded_modules(outermost)),
            (lambda: 0) if row is None or row.size() == 1 else row._get_sequence_number_for_group,
        )
        self._membership = Membership(self._replica, world, Config.from_environment().peer_timeout_s, row)
        self._is_over = join is not None  # no closing round is due
        self._done = True
        self._is_computing = False
        """Whether the loop has a batch."""
        self._calls = self._calls_before = 0
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Job:
        self._membership.begin()
        if self._store is None:
            self._catch_signal()
        if self._model is not None:
            self._model.reducer._rebuild_buckets()  # it may be due, and is an operation of all ranks
            self._model.require_backward_grad_sync = False
        if self._overlaps:
            self._overlap = Overlap(self._trained, self._contribution, self._kind_of_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._is_over:
                self._end_together()
            elif not isinstance(error, CommError) or isinstance(error, ConfigError):
                self._give_up(error)
            elif self._is_in_row:
                self._lose_row(error)
        finally:
            self._release(rests=kind is None)

    def _end_together(self) -> None:
        """`_close`. If that fails, the other ranks of the row need not wait for this one in their forward pass."""
        try:
            self._close()
        except BaseException as error:
            if self._is_in_row and isinstance(error, CommError):
                self._lose_row(error)
            elif self._is_in_row:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException | None) -> None:
        """This rank makes no more steps after an error of its own: the others do not wait until its process ends."""
        membership = self._membership
        if error is None:
            return
        if not membership.is_joined:
            membership.end_row()
        elif not membership.has_left and not membership.has_ended:
            membership.withdraw(error)

    def _lose_row(self, error: CommError) -> None:
        """After an error, the other rows go on without this one. If it was raised outside of `step`, as by a collective
        of FSDP2, and another rank of the row is gone, raises PeerLostError instead."""
        is_known = self._is_over or isinstance(error, MismatchError)
        text = "" if is_known else self._membership.world.loss(error)
        self._give_up(error)
        if text:
            raise PeerLostError(text) from error

    def _release(self, *, rests: bool) -> None:
        """Gives back what `__enter__` took. `rests`: DDP's model averages by itself again, in the present WORLD."""
        if self._overlap is not None:
            self._overlap.remove()
        self._release_signal()
        self._membership.close()
        if self._model is not None:
            self._model.require_backward_grad_sync = True
            if rests and not self._membership.has_left and dist.is_initialized():
                self._model._update_process_group(dist.group.WORLD)

    @property
    def steps(self) -> int:
        """How many steps have been made in this context; at a process that has joined, in the job."""
        return max(self._replica.made, 0)

    @property
    def norm(self) -> float:
        """The norm of all averages of the latest step, before they were clipped; NaN without `clip_norm`."""
        return self._averages.norm

    @property
    def members(self) -> list[int]:
        """The ranks that are in the job, by their numbers at its start; those that joined have the numbers above. Their
        ranks in WORLD follow their order, unless FSDP2 shards the model: then each row keeps its WORLD."""
        return list(self._membership.world.members)

    @property
    def left(self) -> bool:
        """Whether this rank has left the job."""
        return self._membership.has_left

    def leave(self) -> None:
        """Lets this rank leave at its next step, which is its last one. So does SIGTERM. Idempotent; any thread."""
        self._membership.leaves = True

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`, each again until its step is made; ends early on a rank that has left. With
        `sampler`, iterate over the loader itself.

        Raises ClosedError if the loop did not call `step` for a batch.
        """
        if self._replica.sampler is not None:
            raise ClosedError(f"rank {self.number}: batches() of a job with a sampler: loop over the loader itself")
        for batch in loader:
            is_made = False
            while not is_made:
                self._begin()
                yield batch
                self._end()
                is_made = self._done
            if self._membership.has_left:
                return

    def sampler(
        self, dataset: Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0, by_speed: bool = True
    ) -> Sampler:
        """Batches of `batch_size` samples of all ranks together, shared anew when ranks go or come; each epoch has each
        sample once. For `DataLoader(dataset, batch_sampler=job.sampler(dataset, 64))` without worker processes, or for
        a loop over the indices themselves. All ranks call it alike, once. A process that joins (`elastic(join=...)`)
        does so here, and returns when it has the state.

        `by_speed`: the shares follow the measured speeds; else they are equal. The gradients of a rank, of the mean
        over its share, count in proportion to the share: the average is that over the batch.

        Raises ConfigError for a dataset without a length, and if the ranks call with different arguments or train
        different models; ClosedError at a second call, or if the job ends before this process has joined.
        """
        who = f"rank {self.number}" if self._membership.is_joined else "elastic(join=...)"
        if self._replica.sampler is not None:
            raise ClosedError(f"{who}: the job has a sampler already; each loop over that one is an epoch")
        row_size = self._row_size

        def check() -> int:
            self._state.check(f"{who}: job.sampler()")
            return size_of(dataset, batch_size, seed, row_size, f"{who}: job.sampler()")

        samples = self._membership.done_by_row(check)
        sampler = Sampler(self, samples, batch_size, shuffle=shuffle, seed=seed, by_speed=by_speed, row_size=row_size)
        own = {"min_size": self._min_size, "clip_norm": self._averages.clip_norm, "codec": self._codec}
        division = {"the ranks of a row": row_size, "fully_shard": "used" if self._is_in_row else "not used"}
        settings = {**division, **self._state.settings(), **sampler.settings(), **own}
        self._replica.sampler = sampler
        if self._store is not None:
            self._join(self._store, settings)
            return sampler
        told = self._membership.world.tell("sampler", settings)
        first = next(iter(told))
        for number, theirs in told.items():
            if text := difference(told[first], theirs, f"on rank {first}", f"on rank {number}"):
                raise ConfigError(f"job.sampler(): {text}; use the same on all ranks")
        self._membership.open(settings)
        return sampler

    def step(self) -> bool:
        """Averages the gradients, steps the optimizer, and sets the gradients to None. Returns whether the step was
        made; if not, the same batch is due again, with other ranks, unless this rank has left.

        A parameter that has a gradient on no rank keeps None, as without the job. Raises PeerLostError if fewer than
        `min_size` ranks are left, or the others have gone on without this one; other CommErrors if the ranks that live
        cannot make a new group.
        """
        if self._membership.has_left:
            raise ClosedError(f"rank {self.number}: step() of a job that this rank has left")
        check_trained(self._optimizer, self._averaged, f"rank {self.number}: job.step()")
        world, replica = self._membership.world, self._replica
        self._calls += 1
        self._is_over, self._is_computing = True, False  # over, unless this returns
        attempted = replica.made + 1
        weight = replica.weight(len(world.members))
        try:
            goes_on = not replica.listening or self._ask_all(is_step=not replica.is_listening)
            invites = goes_on and self._membership.invite()
            begun, leaves = None if self._overlap is None else self._overlap.contribution, self._membership.leaves
            if leaves:
                world.tell_leaving()
            heard = replica.average(world, weight, begun, leaves=leaves, invites=invites) if goes_on else {}
        except DifferingError as error:
            self._membership.row_fails(failed=False)
            if world.own in error.members:
                self._membership.withdraw(error)
                raise
            log.error("rank %d goes on without rank(s) %s: %s", self.number, sorted(error.members), error)
            self._membership.regroup(error.members)
        except (MismatchError, ConfigError):
            raise
        except CommError as error:
            log.warning("rank %d: step %d is not made here: %s", self.number, attempted, error)
            world.end()  # all others fail, too, and learn of it
            self._membership.row_fails(failed=True)
            self._membership.regroup([])
        else:
            asking = world.whole([member for member, each in heard.items() if each.leaves > 0])
            leavers = self._leavers([member for member in heard if member in asking])
            has_failed = self._row_fails(leaves=world.own in leavers)
            if replica.is_stepped_together:
                raise ConfigError(
                    f"rank {world.own}: {type(self._optimizer).__name__}.step() has called collectives of the row "
                    f"{world.row}: a rank that makes a step by itself, after a death or as it joins, would wait for "
                    f"the others of its row; use an optimizer that steps each element by itself, such as AdamW"
                )
            if has_failed:
                told = f"has made step {attempted}" if goes_on else "knows that the job ends"
                log.warning("rank %d %s, and another rank of its row does not know it", self.number, told)
                world.end()
            elif not goes_on:
                self._close(is_told=True)
            if leavers or has_failed or any(each.invites > 0 for each in heard.values()):
                self._membership.regroup(leavers)
        if not self._membership.has_left and len(self._membership.computing) < self._min_size:
            self._close()
        if self._overlap is not None:
            self._overlap.stepped()
        self._optimizer.zero_grad()
        for parameter in self._trained:  # the optimizer may lack some, whose next gradients would be added to averages
            parameter.grad = None
        self._is_over = self._membership.has_left
        self._done = self._membership.has_left or replica.made >= attempted
        return replica.made >= attempted

    def _row_fails(self, *, leaves: bool) -> bool:
        """Whether another rank of this row has not made the step that this one has. `leaves`: the row leaves after
        it, and its other ranks may have ended already."""
        try:
            return self._membership.row_fails(failed=False)
        except PeerLostError as error:
            if not leaves or self._membership.world.loss(error.__cause__):
                raise
            return False

    def _leavers(self, asking: list[int]) -> list[int]:
        """Those that leave now. One that has the state stays until one that will not leave has it."""
        computing, awaiting = set(self._membership.computing), self._replica.listening - set(asking)
        if awaiting and computing <= set(asking):
            staying = self._membership.world.whole(self._membership.computing[:1])
            return [each for each in asking if each not in staying]
        return asking

    def _contribution(self) -> Contribution | None:
        """What the backward pass of a batch fills; None for a pass of anything else."""
        return self._replica.begin(self._membership.world) if self._is_computing else None

    def _kind_of_step(self) -> Hashable:
        """That on which the number of backward passes may depend."""
        sampler = self._replica.sampler
        return tuple(self._membership.world.members), None if sampler is None else sampler.count

    # ---- what a sampler needs (`sampler.Loop`) ----

    @property
    def number(self) -> int:
        """The number of this rank in `members`."""
        return self._membership.world.own

    @property
    def _rows(self) -> list[list[int]]:
        return self._membership.world.rows(self._membership.computing)

    def _begin(self) -> None:
        """The loop gets a batch."""
        self._calls_before, self._done, self._is_computing = self._calls, False, True
        self._state.keep()

    def _end(self) -> None:
        """The loop asks for the next one. If the step of the last one was not made, it finds all as before it."""
        if self._calls == self._calls_before:
            self._is_over = True
            raise ClosedError(
                f"rank {self.number}: the loop did not call job.step() for its batch. Each batch is a step: gradients "
                f"of several ones cannot be gathered. If the loop does call it, a DataLoader with workers has taken "
                f"batches in advance: use num_workers=0"
            )
        if not self._done:
            self._state.restore()

    # ---- the end ----

    def _close(self, *, is_told: bool = False) -> None:
        """Returns once all members are known to have made the same steps. Raises PeerLostError if they are too few.
        `is_told`: `_ask_all` has said that no rank steps."""
        is_closed, membership = False, self._membership
        membership.is_closing = True
        while not is_closed:
            newcomers = set(self._replica.listening) if membership.computing else set()
            try:
                if not newcomers:
                    membership.world.conclude()
                elif not is_told and self._ask_all(is_step=False):
                    raise MismatchError(f"rank {self.number}: its loop has ended, and that of another rank goes on")
            except (MismatchError, ConfigError):
                raise
            except CommError as error:
                steps = self._replica.made
                log.warning("rank %d does not know whether all have made step %d: %s", self.number, steps, error)
                membership.world.end()
                is_closed = membership.regroup([])
            else:
                if newcomers:
                    is_closed = membership.regroup(newcomers)  # WORLD is for those that have the state
                else:
                    membership.world.survivors().finish()
                    is_closed = True
            is_told = False
        self._membership.has_ended = True
        left = self._membership.computing
        if not self.left and len(left) < self._min_size:
            self._membership.world.end()
            raise PeerLostError(
                f"rank {self.number}: {len(left)} rank(s) are left ({left}), and min_size is {self._min_size}: the job "
                f"ends here; start it again from a checkpoint"
            )

    def _ask_all(self, *, is_step: bool) -> bool:
        """Whether any rank steps. While one listens, all ask before a step: it cannot know when the loops end."""
        flag = torch.tensor([float(is_step)], dtype=torch.float32, device="cpu")
        self._membership.world.total(flag)
        return bool(flag.item() > 0)

    def _join(self, store: dist.Store, settings: dict[str, Any]) -> None:
        """Returns when this rank has the state, or has left."""
        while True:
            self._membership.join(store, settings)
            self._catch_signal()
            try:
                while self._replica.is_listening and not self.left:
                    self.step()
            except ExcludedError as error:
                if self._membership.leaves:
                    self._membership.withdraw(error)
                    raise
                self._membership.ask_again(error)
                self._release_signal()  # it ends the process, as while that asked for the first time
            except BaseException as error:
                self._membership.withdraw(error)  # else the others wait for this process as long as it lives
                raise
            else:
                self._is_over = self.left
                return

    def _catch_signal(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._handlers:
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)

    def _release_signal(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._membership.leaves = True
        else:  # a forked child is no rank: as if this handler had never been there
            signal.signal(number, self._handlers[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    min_size: int = 1,
    schedule: LRScheduler | None = None,
    join: dist.Store | None = None,
    clip_norm: float | None = None,
    codec: str = "none",
    overlap: bool = True,
) -> Job:
    """A context in which the job goes on when ranks leave (SIGTERM, `Job.leave()`) or die, and takes new ones.

    `model` has the same parameters on all ranks, in float32 on the CPU; it may be in DistributedDataParallel, whose own
    averaging rests within the context. Or FSDP2 shards it within rows of ranks (`fully_shard(model,
    mesh=mesh["shards"])`): each row has all of it, and goes as a whole when one of its ranks dies or leaves. WORLD then
    stays. `optimizer` is any of torch, the same on all ranks. `schedule` of its learning
    rate is stepped by the job after each step. WORLD must be a group of commlayer, and becomes another one whenever
    ranks go or come; the ranks in it are then numbered anew. The job ends with PeerLostError on all ranks when fewer
    than `min_size` ranks are left; on the other ranks of a row, also when one of its ranks has died.

    `join`: this process joins the job that uses this Store, with `Job.sampler`. It has no WORLD; or FSDP2 shards the
    model within a WORLD of a row's own, and the row joins as a whole. `clip_norm`: the
    averages are clipped to this norm before the optimizer steps, as by `torch.nn.utils.clip_grad_norm_`. `codec`:
    "bf16" halves what gradients send between hosts. `overlap`: gradients travel while the backward pass makes the
    others, from the second step on; so the loop must not change them between the backward pass and `step`. With False
    all travel in `step`.

    The end of the context is one operation of all ranks, which waits for all to come, up to the timeout of WORLD.

    Raises ConfigError for a `min_size` above the number of ranks, a `clip_norm` that is no number above 0, another
    `codec`, and for models, optimizers and groups that it cannot serve.
    """
    return Job(model, optimizer, min_size, schedule, join, clip_norm, codec, overlap)
