"""`Weights`: the tensors of a model that the sites share, and those that must stay as they are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...compress.values import is_finite
from ...errors import CommError, ConfigError
from ...scheduler.deferred import check_whole
from ..gradients.fsdp import averages_replicas, sharded_modules
from ..group.parts import part_of
from ..work.odd import odd_ones
from .fragment import digest_of
from .meeting import on_all

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default

BUFFERS = (None, "average", "own")
"""The values of `LocalSteps(buffers=...)`."""


class Told(NamedTuple):
    """What a rank tells the others of tensors that are not sent."""

    fixed: int = 0
    """A checksum of those that must stay as they are; 0: the rank makes further steps."""
    changed: int = 0
    """The number of the first of them that has changed, from 1 on; 0: none has."""
    spoiled: int = 0
    """The number of the first averaged buffer whose values are not finite, from 1 on; 0: all are."""

    @classmethod
    def of(cls, head: Any) -> Told:
        """What a head tells, which has fields of the same names: heads travel as plain numbers."""
        return cls(head.fixed, head.changed, head.spoiled)


class Weights:
    """Parameters that the optimizer changes, and buffers. All others are watched: a change of them is an error, since
    the sites would no longer have the same model.

    Buffers are found by their names each time, because a model may put another tensor in the place of one.
    Parameters of FSDP2 are not gathered here; each rank shares its part of them. Raises ConfigError for models and
    optimizers that local steps cannot serve.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, buffers: str | None) -> None:
        self.net = model.module if isinstance(model, DistributedDataParallel) else model
        self._who = f"LocalSteps({type(self.net).__name__})"
        self._sharded = sharded_modules(model)
        self._check_kind(model, optimizer)
        self._optimizer = optimizer
        self.rank: int | None = None
        """The number of this process, for errors."""
        owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = dict(self.net.named_parameters())  # tied parameters once
        self._check_owned(owned, set(named.values()))
        self.parameters = {
            name: parameter for name, parameter in named.items() if parameter in owned and parameter.requires_grad
        }
        """The parameters that sites share, by name, in the model's order."""
        self.parts = {parameter: part_of(parameter) for parameter in self.parameters.values()}
        """What stands for this rank's part of each, where values do not count: FSDP2 may move them to other memory."""
        for name, parameter in self.parameters.items():
            self._check_parameter(name, parameter)
            if self._sharded:
                self._check_sharded(name, parameter)
        floats = {name: buffer for name, buffer in self.net.named_buffers() if buffer.is_floating_point()}
        if buffers is None:
            self._check_buffers()
        self._averaged = {name: _kind(buffer) for name, buffer in floats.items()} if buffers == "average" else {}
        starts = {name: _flat(floats[name]) for name in self._averaged}
        self._infinite = {name: start.clone() for name, start in starts.items() if not is_finite(start)}
        self._frozen = {name: tensor for name, tensor in named.items() if name not in self.parameters}
        fixed = self._frozen | (floats if buffers is None else {})
        self._seen = {name: (tensor, tensor._version) for name, tensor in fixed.items()}
        self._fixed = {name: (_kind(tensor), digest_of(tensor)) for name, tensor in fixed.items()}
        """What must stay as it is."""
        self._owned = len(owned)

    def _check_kind(self, model: nn.Module, optimizer: Optimizer) -> None:
        # Classes are told by their names: to import them takes a second.
        kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        refused = (
            ("FullyShardedDataParallel" in kinds, "FullyShardedDataParallel (FSDP1)"),
            (bool(self._sharded) and self.net is not model, "DistributedDataParallel around fully_shard"),
            (
                not self._sharded and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()),
                "parameters that are DTensors, without fully_shard",
            ),
            ("DataParallel" in kinds, "DataParallel"),
            ("ScriptModule" in kinds, "TorchScript"),
        )
        for is_so, kind in refused:
            if is_so:
                raise ConfigError(
                    f"{self._who}: {kind}: local steps take plain modules, DistributedDataParallel and fully_shard; "
                    f"use one of these"
                )
        if averages_replicas(model):
            raise ConfigError(
                f"{self._who}: compress_fsdp(replicate=...) averages its gradients over ranks that its mesh does not "
                f"have; give fully_shard a mesh of two dimensions, (replicas, shards), with all ranks of the site"
            )
        check_whole(optimizer, model.parameters(), self._who)

    def _check_owned(self, owned: set[Tensor], own: set[Tensor]) -> None:
        if not owned & own:
            raise ConfigError(f"{self._who}: the optimizer has no parameter of the model; give it model.parameters()")
        if others := owned - own:
            raise ConfigError(
                f"{self._who}: the optimizer has {len(others)} parameters of other modules, which the sites would not "
                f"share; put all of them into one module"
            )

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        kind = parameter.dtype
        if kind == torch.float64:
            raise ConfigError(
                f"{self._who}: the parameter {name!r} is torch.float64: shared weights and corrections are float32; "
                f"convert the model by float()"
            )
        if kind != torch.float32:
            raise ConfigError(
                f"{self._who}: the parameter {name!r} is {kind}: corrections of the sites are far below its precision, "
                f"and would be lost; keep weights in float32, with torch.autocast for the computation"
            )
        if parameter.layout != torch.strided or not _is_dense(part_of(parameter)):
            raise ConfigError(f"{self._who}: the parameter {name!r} is not dense in memory; call contiguous() on it")

    def _check_sharded(self, name: str, parameter: Any) -> None:
        """Raises ConfigError unless FSDP2 averages the gradients of a parameter over all ranks of the site."""
        if not hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"{self._who}: the parameter {name!r} is not sharded, and others are: FSDP2 does not average its "
                f"gradients within the site; call fully_shard for the whole model, too, without ignored_params"
            )
        *others, last = parameter.placements
        if len(others) > 1 or not all(other.is_replicate() for other in others) or not last.is_shard():
            raise ConfigError(
                f"{self._who}: the parameter {name!r} has the placements {parameter.placements}: local steps take "
                f"those of fully_shard alone, on one mesh dimension (shards) or two (replicas, shards)"
            )
        first: Any = next(iter(self.parameters.values()))
        if parameter.device_mesh != first.device_mesh:
            raise ConfigError(
                f"{self._who}: the parameter {name!r} is sharded over another mesh than the first one; call "
                f"fully_shard with one mesh, whose ranks are the site"
            )

    def _check_buffers(self) -> None:
        for name, module in self.net.named_modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                raise ConfigError(
                    f"{self._who}: {type(module).__name__} {name!r} changes its buffers running_mean and running_var: "
                    f"choose LocalSteps(buffers='average'), or buffers='own' for each rank's own"
                )

    def reshard(self) -> None:
        """The shards are about to change: whatever FSDP2 has gathered of them is dropped."""
        for module in self._sharded:
            module.reshard()

    # ---- what must not change ---------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """Raises ConfigError if something has changed that the sites do not share. Reads only those tensors that torch
        says were written: it does not say so of writes through `.data`."""
        for name, tensor in self._fixed_now().items():
            before, version = self._seen[name]
            if tensor is before and tensor._version == version:
                continue
            if tensor is None or not self._is_as_before(name, tensor):
                raise ConfigError(f"rank {self.rank}: {self._who}: {self._change_of(name)}")
            self._seen[name] = tensor, tensor._version  # the same values again, as DDP writes buffers
        _ = self.buffers  # raises if one has another form
        if sum(len(group["params"]) for group in self._optimizer.param_groups) != self._owned:
            raise ConfigError(
                f"rank {self.rank}: {self._who}: the optimizer has other parameters; make a new LocalSteps then"
            )
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                raise ConfigError(
                    f"rank {self.rank}: {self._who}: {name!r} was frozen; make a new LocalSteps after such a change"
                )

    def at_end(self) -> Told:
        """What this rank tells, once it makes no more steps. Reads all that must stay as it is."""
        changed, digest = 0, 0
        for number, (name, tensor) in enumerate(self._fixed_now().items(), 1):
            own = 0 if tensor is None else digest_of(tensor)
            digest = zlib.crc32(f"{digest} {own}".encode())
            if not changed and (tensor is None or (_kind(tensor), own) != self._fixed[name]):
                changed = number
        return Told(digest + (1 << 32), changed)

    def check_told(self, told: Mapping[int, Told]) -> None:
        """Raises the same error on all ranks: CommError for an averaged buffer that is not finite, and ConfigError if
        what must stay as it is differs between those that make no more steps. `told`: by rank, the same on all."""
        for rank, each in told.items():
            if each.spoiled:
                text = (
                    f"rank {self.rank}: {self._who}: the buffer {list(self._averaged)[each.spoiled - 1]!r} of rank "
                    f"{rank} is not finite; the sites must not average it: restore a checkpoint on all ranks, with a "
                    f"lower learning rate or a GradScaler, or choose LocalSteps(buffers='own')"
                )
                raise on_all(CommError(text), rank)
        ranks = [rank for rank, each in told.items() if each.fixed]
        if odd := odd_ones([told[rank].fixed for rank in ranks]):
            # All began with the same, so it has changed on one that differs from the others, or on most.
            rank = next(rank for rank in [*(ranks[at] for at in odd), *ranks] if told[rank].changed)
            name = list(self._fixed)[told[rank].changed - 1]
            text = f"rank {self.rank}: {self._who}: on rank {rank}, {self._change_of(name)}"
            raise on_all(ConfigError(text), rank)

    def _fixed_now(self) -> dict[str, Tensor | None]:
        found = self._buffers_now() if len(self._frozen) < len(self._fixed) else {}
        return {name: self._frozen.get(name, found.get(name)) for name in self._fixed}

    def _is_as_before(self, name: str, tensor: Tensor) -> bool:
        return self._fixed[name] == (_kind(tensor), digest_of(tensor))

    def _change_of(self, name: str) -> str:
        return (
            f"{name!r} has changed, which the sites do not share: its optimizer is another one, or it was frozen at "
            f"the start, or it is a buffer (LocalSteps(buffers='average') or 'own')"
        )

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def _buffers_now(self) -> dict[str, Tensor]:
        return dict(self.net.named_buffers(remove_duplicate=False))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Floating-point buffers that the sites average, by name. Raises ConfigError if one has another form than it
        had at the start."""
        if not self._averaged:
            return {}
        found = self._buffers_now()
        for name, kind in self._averaged.items():
            if name not in found or _kind(found[name]) != kind:
                now = "is gone" if name not in found else f"has become {' '.join(map(str, _kind(found[name])))}"
                raise ConfigError(
                    f"rank {self.rank}: {self._who}: the buffer {name!r} was {' '.join(map(str, kind))} when `with` "
                    f"began, and {now}, so the sites cannot average it: keep its shape, dtype and device, as by "
                    f"copy_(), or choose LocalSteps(buffers='own')"
                )
        return {name: found[name] for name in self._averaged}

    def flat_buffers(self) -> Tensor:
        """The buffers that the sites average, one after the other, float32 on the CPU."""
        parts = [_flat(buffer) for buffer in self.buffers.values()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")

    def spoiled(self, values: Tensor) -> int:
        """The number of the first buffer in these values, which are like `flat_buffers`, that is not finite, from 1 on;
        0: all are. Infinite values of the start are no fault, as those of masks."""
        if is_finite(values):
            return 0
        parts = values.split([math.prod(shape) for shape, _, _ in self._averaged.values()])
        for number, (name, part) in enumerate(zip(self._averaged, parts, strict=True), 1):
            wrong = ~part.isfinite()
            if name in self._infinite:
                wrong &= part != self._infinite[name]
            if wrong.any():
                return number
        return 0

    def put_buffers(self, values: Tensor) -> None:
        """Replaces the buffers by these, which are like `flat_buffers`."""
        buffers = self.buffers
        parts = values.split([buffer.numel() for buffer in buffers.values()])
        with torch.no_grad():
            for buffer, part in zip(buffers.values(), parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    # ---- for the ranks to compare -----------------------------------------------------------------------------------

    def shapes(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name."""
        shared = {**self.parameters, **self.buffers}
        return {name: _form(tensor) for name, tensor in shared.items()}

    def digests(self) -> dict[str, int]:
        """A checksum of every tensor that must be equal on all ranks at the start."""
        shared = {**self.parameters, **self.buffers}
        return {name: digest_of(tensor) for name, tensor in shared.items()} | self.fixed_digests()

    def fixed_digests(self) -> dict[str, int]:
        """A checksum of every tensor that is equal on all ranks at any time, as of the start."""
        return {name: digest for name, (_, digest) in self._fixed.items()}


def _flat(buffer: Tensor) -> Tensor:
    return buffer.detach().float().cpu().flatten()


def _kind(tensor: Tensor) -> tuple[list[int], torch.dtype, torch.device]:
    return list(tensor.shape), tensor.dtype, tensor.device


def _form(tensor: Any) -> list[Any]:
    """Shape, strides and dtype; of a sharded parameter those of the whole, and how the ranks of the site share it."""
    form = [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]
    return [*form, str(tensor.placements), list(tensor.device_mesh.shape)] if hasattr(tensor, "placements") else form
