"""`Site`: the ranks between which the gradients of a step are averaged; `peers_of`: those of one place in all sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import AbortedError, CommError, ConfigError, MismatchError, OperationTimeoutError
from ..gradients.fsdp import sharded_modules
from ..gradients.hook_group import plain_all_gather
from ..group.backend import CommProcessGroup
from ..group.split import group_among
from ..group.told import divided
from .meeting import LOST, is_on_all
from .parting import Parting

ResultT = TypeVar("ResultT")


class Site:
    """A site of one rank, of the ranks of DistributedDataParallel's group, or of those of `fully_shard`'s mesh.

    Ranks of a site that hold the same values are replicas: all ranks with DDP, those of a column of the mesh with HSDP.
    Each replica sends its shard of a fragment to its peers, the ranks of the same place in the other sites, and the
    replicas gather the shards: a value crosses the slow links once, whatever the number of ranks per site.

    `ranks`: those of the site, by place. `groups`: the dimensions along which it is connected. `replicas`: one of the
    groups, or None. `device`: that of the tensors that pass these groups.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        groups: Sequence[dist.ProcessGroup] = (),
        replicas: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ranks, self.groups, self.replicas = ranks, groups, replicas
        self.rank, self.size = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
        self._device = torch.device(device)
        self._own: CommProcessGroup | None = None
        self._parting: Parting | None = None

    @staticmethod
    def of(model: nn.Module) -> Site:
        """That of a model. Parameters that FSDP2 has gathered are sharded again."""
        if isinstance(model, DistributedDataParallel):
            group = model.process_group
            return Site(dist.get_process_group_ranks(group), [group], group, next(model.parameters()).device)
        sharded = sharded_modules(model)
        for module in sharded:
            module.reshard()
        meshes: Any = (parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh"))
        mesh = next(meshes, None) if sharded else None
        if mesh is None:
            return Site([dist.get_rank()])
        groups = mesh.get_all_groups()
        return Site(mesh.mesh.flatten().tolist(), groups, groups[0] if len(groups) > 1 else None, mesh.device_type)

    def padded(self, values: int) -> int:
        """The least number of values from `values` on of which all replicas have the same share."""
        return -(-values // self.size) * self.size

    def shard(self, values: Tensor) -> Tensor:
        """This replica's shard of a flat tensor of padded length."""
        length = values.numel() // self.size
        return values[self.rank * length : (self.rank + 1) * length]

    def gather(self, shard: Tensor) -> Tensor:
        """The shards of all replicas in one tensor on the CPU. All replicas call."""
        if self.replicas is None or self.size == 1:
            return shard
        mine = shard.to(self._device)
        gathered = torch.empty(mine.numel() * self.size, dtype=mine.dtype, device=self._device)
        plain_all_gather(gathered, mine, group=self.replicas)
        return gathered.cpu()

    def total(self, value: float) -> float:
        """The sum of the ranks' values. All ranks call."""
        return self._reduced([value], dist.ReduceOp.SUM)[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' values, one by one. All ranks call."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def average(self, values: Tensor) -> Tensor:
        """The average of the ranks' values, on the CPU. All ranks call."""
        if len(self.ranks) == 1 or not len(values):
            return values
        total = values.to(self._device, copy=True)
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total.cpu() / len(self.ranks)

    @property
    def place(self) -> int:
        """That of this rank."""
        return 0 if len(self.ranks) == 1 else self.ranks.index(dist.get_rank())

    def separate(self, timeout: timedelta | None) -> None:
        """From now on, `told` and `agreed` have a group of their own: a thread of each rank may call, and the engine
        finds the death of a rank. All ranks call, and have a WORLD."""
        if len(self.ranks) == 1:
            return
        made = group_among(sorted(self.ranks), "the ranks of a site", timeout=timeout)
        assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
        self._own = made

    def set_timeout(self, timeout: timedelta) -> None:
        """That of its operations."""
        if self._own is not None:
            self._own.set_timeout(timeout)

    def close(self) -> None:
        """Leaves that group. Idempotent."""
        self.unwatch()
        own, self._own = self._own, None
        if own is not None:
            dist.destroy_process_group(own)

    def stop(self) -> None:
        """Ends its operations, here and on the other ranks."""
        if self._own is not None:
            self._own.abort()

    def told(self, own: Any) -> list[Any]:
        """`own` of each rank, by place. All ranks call."""
        found = {self.place: own}
        for group in self.groups if self._own is None else [self._own]:
            told: list[Any] = [None] * group.size()
            dist.all_gather_object(told, found, group=group)
            found = {place: each for theirs in told for place, each in theirs.items()}
        return [found[place] for place in range(len(self.ranks))]

    def agreed(self, call: Callable[[], ResultT]) -> ResultT:
        """The result of `call`, which exchanges values with other sites. If it raises on a rank of this site, all its
        ranks raise an error of one kind: the others would wait for it where the site gathers. `shares` is true of
        these errors. All ranks call."""
        if len(self.ranks) == 1:
            return call()
        own: Exception | None = None
        try:
            result = call()
        except Exception as error:
            if self.shares(error):
                raise  # they have agreed on it within `call`
            own = error
        try:
            has_failed = self.has_any(own is not None)
        except Exception as error:
            if own is None:
                raise
            if _is_passing(own) and isinstance(error, OperationTimeoutError):
                raise error from own  # the other sites go on; this one fails for another reason
            raise own from error
        if not has_failed:
            return result
        shown = own if own is None or isinstance(own, CommError) else _fault(own)
        faults = [fault for fault in self.told(shown) if fault is not None]
        gravest = min(faults, key=lambda fault: (_is_passing(fault), isinstance(fault, AbortedError)))
        failed = own if own is not None and _kind_of(own) == _kind_of(gravest) else gravest
        raise _on_site(failed)

    def done(self, do: Callable[[], Any]) -> list[Any]:
        """What `do` returns on each rank, by place. If it raises on one, all raise, as `agreed`. All ranks call."""
        return self.told(self.agreed(do))

    def shares(self, error: BaseException) -> bool:
        """Whether all ranks of this site raise this error, or one like it."""
        return len(self.ranks) == 1 or bool(vars(error).get("is_on_site"))

    def abort(self, error: BaseException) -> None:
        """Ends the operations of the site's ranks after this error, unless they raise it, too. Only groups of
        commlayer tell the others; those of other backends wait until their timeout."""
        if self.shares(error):
            return
        self.stop()
        for group in self.groups:
            if group.size() > 1 and isinstance(group, CommProcessGroup):
                group.abort()

    def has_any(self, flag: bool) -> bool:
        """Whether a rank has this flag. All ranks call, each as often as `agreed` and `told`."""
        if self._own is None:
            return bool(self.largest([float(flag)])[0])
        found = torch.tensor([float(flag)], dtype=torch.float32, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._own)
        return bool(found[0])

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if len(self.ranks) == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=self._device)
        for group in self.groups:
            dist.all_reduce(reduced, op, group=group)
        return [float(value) for value in reduced.tolist()]

    # ---- the end of the loops ----

    def watch(self, store: Any, numbers: Sequence[int], steps: int, model: nn.Module, silence_s: float) -> None:
        """The loops begin, after so many steps: from now on, one that ends earlier than the others is found. `store`,
        `model`, `silence_s`: as of a `Parting`. `numbers`: those of the ranks, for errors."""
        self.unwatch()
        if len(self.ranks) > 1:
            part = dist.PrefixStore(f"parting of {numbers[0]}", store)
            own = numbers[self.place]
            self._parting = Parting(part, numbers, own, steps, model, self._give_up, silence_s)

    def stepped(self, steps: int) -> None:
        """This rank has made so many steps. Raises MismatchError if another one has left before."""
        if self._parting is None:
            return
        if self._parting.is_failed and (found := self._parting.error()) is not None:
            raise _on_site(found)
        self._parting.stepped(steps)

    def part(self) -> None:
        """This rank makes no more steps. All ranks call; if one makes further steps instead, all raise
        MismatchError."""
        if self._parting is None:
            return
        try:
            self._parting.leave(self.told)
        except MismatchError as error:
            raise _on_site(error) from error.__cause__

    def parted(self, error: BaseException) -> CommError | None:
        """The error of all ranks, in place of one that this rank has found as it waited for another one that has ended
        its loop; None: that is not so."""
        is_own = isinstance(error, ConfigError) or not isinstance(error, RuntimeError)
        if self._parting is None or is_own or self.shares(error) or (found := self._parting.error()) is None:
            return None
        return _on_site(found)

    def unwatch(self) -> None:
        """Ends the thread of `watch`. Idempotent."""
        if self._parting is not None:
            self._parting.close()

    def _give_up(self) -> None:
        """Ends the operations of this rank with the others, which one of them does not make. gloo's go on until the
        process of that one ends."""
        self.stop()
        for group in self.groups:
            if group.size() > 1:
                group.abort()


ErrorT = TypeVar("ErrorT", bound=BaseException)


def _on_site(error: ErrorT) -> ErrorT:
    """Marks an error that all ranks of the site raise."""
    vars(error)["is_on_site"] = True
    return error


def _fault(error: Exception) -> CommError:
    found = CommError(f"{type(error).__name__}: {error}")
    vars(found)["is_fault"] = True
    return found


def is_fault(error: BaseException) -> bool:
    """Whether ranks of a site share this error because one of them had an error that is not commlayer's."""
    return bool(vars(error).get("is_fault"))


def _kind_of(error: BaseException) -> tuple[type[BaseException], bool]:
    return type(error), is_on_all(error)


def _is_passing(error: BaseException) -> bool:
    """Whether the other sites may go on after it, and this one with them."""
    return isinstance(error, LOST) and not is_on_all(error)


def peers_of(site: Site) -> list[int]:
    """The ranks of WORLD that have this rank's place in their sites, this one included. All ranks of WORLD call.

    Raises ConfigError, with the same text on all, unless each rank is in one site, all sites have equally many ranks,
    and there are several of them or they have one rank each.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(site.ranks))
    sites, is_equal = divided(told)
    if not is_equal:
        raise ConfigError(
            f"LocalSteps: the sites have the ranks {', '.join(map(str, sites))}: all have equally "
            f"many, and each rank is in one site; these are the ranks of DistributedDataParallel's process_group=, or "
            f"of fully_shard's mesh=, and a rank alone where the model has neither"
        )
    if len(sites) == 1 and len(told) > 1:
        raise ConfigError(
            "LocalSteps: all ranks average their gradients in each step, so they are one site, which has nobody to "
            "exchange weights with; give DistributedDataParallel(process_group=) or fully_shard(mesh=) the ranks of "
            "one site"
        )
    return [ranks[site.ranks.index(dist.get_rank())] for ranks in sites]
