"""`elastic`: a training loop that goes on when ranks leave or die.

    with commlayer.elastic(model, optimizer, min_size=2) as job:
        for batch in job.batches(loader):
            loss(model, batch).backward()
            job.step()

`job.step()` averages the gradients of all ranks and steps the optimizer. A step is made by all ranks that live, or by
none, and then the loop gets the same batch again.

The ranks need no vote for that. An all-reduce ends on a rank when it has data of all ranks, and a rank starts that of
step s after it has made step s - 1. So when a rank dies, those that live have made s or s - 1 steps. If one of them has
made s, it still has the averages of that step, whose bits are the same on all ranks: the others get them and make it,
too. If none has, all repeat it without the dead rank.

After the last step there is no next one to fail. So all meet in a small all-reduce at the end of the context: where
that ends, all have made the last step. A rank on which it ends says so in the Store, and nobody waits for that rank.
"""

from __future__ import annotations

import inspect
import os
import secrets
import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from ...config import Config
from ...errors import ClosedError, CommError, ConfigError, MismatchError, PeerLostError
from ...transport.bootstrap import check_present
from ...transport.log import log
from ...transport.native import host_key
from ...transport.pulse import Pulse
from ...transport.survivors import BEGUN, Survivors
from ..group.backend import CommProcessGroup
from ..group.options import Options

ATTEMPTS = 16
"""The most groups that the ranks try to make after a death, before they give up."""

Batch = TypeVar("Batch")


class Job:
    """What `elastic` returns; see there. All ranks make it, and call its methods, alike."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, min_size: int) -> None:
        world: Any = dist.group.WORLD if dist.is_initialized() else None
        if not isinstance(world, CommProcessGroup):
            raise ConfigError("elastic: the job's WORLD is not one of commlayer; init_process_group('commlayer') first")
        who = f"rank {dist.get_rank()}: elastic"
        if not 1 <= min_size <= world.size():
            raise ConfigError(f"{who}(min_size={min_size}): use 1 to {world.size()}, the number of ranks")
        self._model = model if isinstance(model, DistributedDataParallel) else None
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kinds = {(parameter.dtype, parameter.device.type) for parameter in self._parameters}
        if kinds != {(torch.float32, "cpu")}:
            told = ", ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in kinds))
            raise ConfigError(f"{who}: parameters of {told or 'no type'}: it needs float32 on the CPU")
        if self._model is not None:
            if self._model.process_group is not world:
                raise ConfigError(f"{who}: the model has a process group of its own; make it without one")
            if self._model.broadcast_buffers and any(True for _ in self._model.buffers()):
                raise ConfigError(
                    f"{who}: the model broadcasts buffers; DistributedDataParallel(broadcast_buffers=False)"
                )
        if world.policy.loss_bound > 0:
            raise ConfigError(
                f"{who}: WORLD has loss_bound={world.policy.loss_bound:g}, and a step needs all contributions; make "
                f"WORLD without a loss bound"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{who}: {type(optimizer).__name__} computes gradients within its step (it needs a closure); use an "
                f"optimizer whose step() takes none"
            )
        self._module = model
        self._optimizer = optimizer
        self._min_size = min_size
        self._first = dist.get_rank()
        self._members = list(range(world.size()))
        backend, root = c10d._world.pg_map[world]
        self._backend, self._root = str(backend), root
        self._options = Options(world.policy, timeout=world.timeout)
        self._wait_s = world.timeout.total_seconds()
        self._token = ""
        self._generation = 0
        self._made = 0
        self._averages: Tensor | None = None
        self._is_leaving = False
        self._left = False
        self._is_over = False  # no closing round is due
        self._done = True
        self._calls = 0
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}
        self._pulse: Pulse | None = None
        self._timeout_s = Config.from_environment().peer_timeout_s

    def __enter__(self) -> Job:
        places: list[Any] = [None] * len(self._members)
        dist.all_gather_object(places, (host_key(), os.getpid(), secrets.token_hex(8)))
        self._token = places[0][2]  # the Store may have keys of a former life of the job
        processes = {rank: (host, process) for rank, (host, process, _) in enumerate(places)}
        self._pulse = Pulse(self._store("pulse"), self._first, processes, self._timeout_s)
        if self._model is not None:
            self._model.reducer._rebuild_buckets()  # it may be due, and is an operation of all ranks
            self._model.require_backward_grad_sync = False
        if threading.current_thread() is threading.main_thread():
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._is_over:
                self._close()
        finally:
            self._release(rests=kind is None)

    def _release(self, *, rests: bool) -> None:
        """Gives back what `__enter__` took. `rests`: DDP's model averages by itself again, in the present WORLD."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._pulse is not None:
            self._pulse.close()
        if self._model is not None:
            self._model.require_backward_grad_sync = True
            if rests and not self._left and dist.is_initialized():
                self._model._update_process_group(dist.group.WORLD)

    @property
    def steps(self) -> int:
        """How many steps have been made."""
        return self._made

    @property
    def members(self) -> list[int]:
        """The ranks that are in the job, by their numbers at its start. Their ranks in WORLD follow their order."""
        return list(self._members)

    @property
    def left(self) -> bool:
        """Whether this rank has left the job."""
        return self._left

    def leave(self) -> None:
        """Lets this rank leave at its next step, which is its last one. So does SIGTERM. Idempotent; any thread."""
        self._is_leaving = True

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`, each again until its step is made; ends early on a rank that has left.

        Raises ClosedError if the loop did not call `step` for a batch.
        """
        for batch in loader:
            self._done = False
            generator = torch.get_rng_state()
            buffers = [buffer.clone() for buffer in self._module.buffers()]
            while not self._done:
                calls = self._calls
                yield batch
                if self._calls == calls:
                    self._is_over = True
                    raise ClosedError(f"rank {self._first}: the loop did not call job.step() for its batch")
                if not self._done:
                    torch.set_rng_state(generator)
                    with torch.no_grad():
                        for buffer, before in zip(self._module.buffers(), buffers, strict=True):
                            buffer.copy_(before)
            if self._left:
                return

    def step(self) -> bool:
        """Averages the gradients, steps the optimizer, and sets the gradients to None. Returns whether the step was
        made; if not, the same batch is due again, with fewer ranks, unless this rank has left.

        A parameter that has a gradient on no rank keeps None, as without the job. Raises PeerLostError if fewer than
        `min_size` ranks are left, or the others have gone on without this one; other CommErrors if the ranks that live
        cannot make a new group.
        """
        if self._left:
            raise ClosedError(f"rank {self._first}: step() of a job that this rank has left")
        self._calls += 1
        self._is_over = True  # unless this returns
        attempted = self._made + 1
        try:
            leavers = self._average_and_step()
        except (MismatchError, ConfigError):
            raise
        except CommError as error:
            log.warning("rank %d: step %d is not made here: %s", self._first, attempted, error)
            self._end_groups()  # all others fail, too, and learn of it
            self._regroup([])
        else:
            if leavers:
                self._regroup(leavers)
        if not self._left and len(self._members) < self._min_size:
            self._close()
        self._optimizer.zero_grad()
        self._is_over = self._left
        self._done = self._left or self._made >= attempted
        return self._made >= attempted

    def _close(self) -> None:
        """Returns once all members are known to have made the same steps. Raises PeerLostError if they are too few."""
        is_closed = False
        while not is_closed:
            try:
                dist.all_reduce(torch.zeros(1))
            except (MismatchError, ConfigError):
                raise
            except CommError as error:
                log.warning("rank %d does not know whether all have made step %d: %s", self._first, self._made, error)
                self._end_groups()
                is_closed = self._regroup([])
            else:
                self._survivors().finish()
                is_closed = True
        if not self._left and len(self._members) < self._min_size:
            self._end_groups()
            raise PeerLostError(
                f"rank {self._first}: {len(self._members)} rank(s) are left ({self._members}), and min_size is "
                f"{self._min_size}: the job ends here; start it again from a checkpoint"
            )

    def _average_and_step(self) -> list[int]:
        """Makes a step; returns the members that leave after it."""
        gradients = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in self._parameters
        ]
        size = len(self._members)
        given = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        averages = torch.cat([*(gradient.flatten() for gradient in gradients), given, torch.zeros(size)])
        averages[self._members.index(self._first) - size] = float(self._is_leaving)
        dist.all_reduce(averages, op=dist.ReduceOp.AVG)
        leavers = [member for member, flag in zip(self._members, averages[-size:].tolist(), strict=True) if flag > 0]
        self._apply(averages[:-size])
        return leavers

    def _apply(self, averages: Tensor) -> None:
        """Steps the optimizer. `averages`: all gradients, and for each parameter whether any rank has one (above 0)."""
        *parts, given = averages.split([*(parameter.numel() for parameter in self._parameters), len(self._parameters)])
        for parameter, part, share in zip(self._parameters, parts, given.tolist(), strict=True):
            average = part.view_as(parameter)
            if share == 0:
                parameter.grad = None
            else:
                parameter.grad = average.clone() if parameter.grad is None else parameter.grad.copy_(average)
        self._optimizer.step()
        self._averages = averages
        self._made += 1

    def _regroup(self, leavers: Collection[int]) -> bool:
        """Makes a new WORLD of the members that live and stay, and the step that only some of them have made.

        Returns whether nothing is left to do here: this rank has left, or it is in `_close`, which another one ended.
        """
        for _ in range(ATTEMPTS):
            members = self._members
            gone = self._survivors().agree(leavers, self._wait_s)
            if gone is None:
                return True
            self._generation += 1
            if self._first in gone:
                self._go(members, gone)
                return True
            self._members = [member for member in members if member not in gone]
            log.warning("rank %d goes on with ranks %s, without %s", self._first, self._members, sorted(gone))
            self._end_groups()
            try:
                self._meet()
            except (MismatchError, ConfigError):
                raise
            except CommError as error:
                log.warning("rank %d tries again: %s", self._first, error)
                self._end_groups()
                leavers = []
            else:
                return False
        raise PeerLostError(f"rank {self._first}: no group in {ATTEMPTS} attempts; look at the other ranks' logs")

    def _go(self, members: Collection[int], gone: Collection[int]) -> None:
        """This member is among those that are gone."""
        self._left = True
        if not self._is_leaving:
            others = sorted(set(members) - set(gone))
            raise PeerLostError(
                f"rank {self._first}: rank(s) {', '.join(map(str, others))} took this rank for dead and have gone on "
                f"without it; end this process"
            )
        log.warning("rank %d has left the job after step %d", self._first, self._made)

    def _meet(self) -> None:
        """Makes the new WORLD; then all its ranks have made as many steps."""
        token = check_present.set(self._check_present)
        try:
            dist.init_process_group(
                self._backend,
                store=self._store(f"world {self._generation}"),
                rank=self._members.index(self._first),
                world_size=len(self._members),
                timeout=self._options._timeout,
                pg_options=self._options,
            )
        finally:
            check_present.reset(token)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in self._members]
        dist.all_gather(counts, torch.tensor([self._made]))
        made = [int(count) for count in counts]
        if min(made) < max(made):
            is_behind = self._made < max(made)
            held = None if is_behind else self._averages
            size = sum(parameter.numel() for parameter in self._parameters) + len(self._parameters)
            averages = torch.empty(size) if held is None else held
            dist.broadcast(averages, made.index(max(made)))
            if is_behind:
                self._apply(averages)
                log.warning("rank %d has made step %d with the averages of another rank", self._first, self._made)

    def _check_present(self) -> None:
        """Raises CommError if the new WORLD cannot be made: a member is dead, or others try again already."""
        dead = self._dead(set(self._members) - {self._first})
        if dead:
            raise PeerLostError(f"rank {self._first}: rank(s) {sorted(dead)} died while the ranks met")
        if self._store(f"agreement {self._generation}").check([BEGUN]):
            raise PeerLostError(f"rank {self._first}: another rank lost one while the ranks met")

    def _survivors(self) -> Survivors:
        """The agreement of the members of the present WORLD."""
        return Survivors(self._store(f"agreement {self._generation}"), self._first, self._members, self._dead)

    def _dead(self, watched: Collection[int]) -> set[int]:
        assert self._pulse is not None  # noqa: S101  # within the context
        return self._pulse.dead(watched)

    def _store(self, part: str) -> Any:
        return dist.PrefixStore(f"elastic/{self._token}/{part}", self._root)

    def _end_groups(self) -> None:
        """Ends all groups here, and their operations on all other ranks."""
        if dist.is_initialized():
            c10d._abort_process_group()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._is_leaving = True
        else:  # a forked child is no rank: as if this handler had never been there
            signal.signal(number, self._handlers[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)


def elastic(model: nn.Module, optimizer: torch.optim.Optimizer, *, min_size: int = 1) -> Job:
    """A context in which the job goes on when ranks leave (SIGTERM, `Job.leave()`) or die.

    `model` has the same parameters on all ranks, in float32 on the CPU; it may be in DistributedDataParallel, whose own
    averaging rests within the context. `optimizer` is any of torch, the same on all ranks. WORLD must be a group of
    commlayer, and becomes a smaller one whenever ranks go; the ranks in it are then numbered anew. The job ends with
    PeerLostError on all ranks when fewer than `min_size` are left.

    The end of the context is one operation of all ranks, which waits for all to come, up to the timeout of WORLD.

    Raises ConfigError for a `min_size` above the number of ranks, and for models, optimizers and groups that it cannot
    serve.
    """
    return Job(model, optimizer, min_size)
