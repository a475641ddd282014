"""`Layout`: the tensors of a state, and their places in one block of memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, MismatchError

State = torch.nn.Module | Mapping[str, Tensor]
"""A model, or its tensors by name."""

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

WIDTHS = (8, 4, 2, 1)
"""Bytes of a value, in the order in which values lie in memory: a region for each."""

TOLD = 3
"""Differences that an error names."""


class Region(NamedTuple):
    """Values of one width, which lie together."""

    width: int
    offset: int
    """Bytes."""
    values: int
    """Their number."""


class Entry(NamedTuple):
    """One tensor of a state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same: int
    """The number of an earlier entry with the same memory, as tied weights have; -1: none."""


def width_of(dtype: str) -> int:
    """Bytes of the numbers of which a tensor of this type is made: a complex one has two."""
    return DTYPES[dtype].itemsize // (2 if DTYPES[dtype].is_complex else 1)


def tensors_of(state: State) -> dict[str, Tensor]:
    """The tensors of a state by name: parameters and persistent buffers of a model, without the prefixes of DDP and of
    torch.compile. Reading them makes the optimizer steps that `commlayer.overlap` has deferred.

    Raises ConfigError for another object, for an entry that is no dense tensor, or whose values have an unknown type,
    and for one of a model's state_dict() that is a copy: what is written into it does not reach the model.
    """
    own: set[int] | None = None
    if isinstance(state, torch.nn.Module):
        module: torch.nn.Module = getattr(state, "_orig_mod", state)
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        module = getattr(module, "_orig_mod", module)
        found: Mapping[str, Any] = module.state_dict()
        own = {
            _storage(tensor) for tensor in (*module.parameters(), *module.buffers()) if tensor.layout == torch.strided
        }
    elif isinstance(state, Mapping):
        found = state
    else:
        raise ConfigError(
            f"{type(state).__name__}: publish and apply take a model (nn.Module), or a dict of tensors by name"
        )
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or hasattr(tensor, "device_mesh"):
            raise ConfigError(
                f"{name} is {type(tensor).__name__}: publish and apply take dense, whole tensors; pass a dict of "
                f"those, as torch's get_model_state_dict(full_state_dict=True) makes it of a sharded model"
            )
        if tensor.dtype not in NAME_OF or tensor.is_meta:
            raise ConfigError(
                f"{name} is a tensor of {tensor.dtype} on {tensor.device}; use one of {', '.join(DTYPES)}"
            )
        if own is not None and tensor.numel() and _storage(tensor) not in own:
            raise ConfigError(
                f"{name} of the model's state_dict() is neither a parameter nor a buffer, but a copy, as an extra "
                f"state is, or what FSDP makes of its shards: pass a dict of tensors, and load them yourself"
            )
    return {name: tensor.detach() for name, tensor in found.items()}


class Layout:
    """Where the values of a state lie: first those of 8 bytes, then of 4, 2 and 1. Of each, complex ones come first, as
    torch wants them at a multiple of their size, and else the order is that of the state."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self.offsets: list[int] = [0] * len(self.entries)
        """Bytes before each tensor."""
        self.regions: list[Region] = []
        at = 0
        for width in WIDTHS:
            first = at
            own = [number for number, entry in enumerate(self.entries) if entry.same < 0]
            own = [number for number in own if width_of(self.entries[number].dtype) == width]
            for number in sorted(own, key=lambda number: -DTYPES[self.entries[number].dtype].itemsize):
                entry = self.entries[number]
                self.offsets[number] = at
                at += DTYPES[entry.dtype].itemsize * _product(entry.shape)
            if at > first:
                self.regions.append(Region(width, first, (at - first) // width))
        for number, entry in enumerate(self.entries):
            if entry.same >= 0:
                self.offsets[number] = self.offsets[entry.same]
        self.bytes = at
        self.text = json.dumps([list(entry) for entry in self.entries]).encode()
        self.fingerprint = hashlib.blake2s(self.text, digest_size=16).hexdigest()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """That of these tensors."""
        entries: list[Entry] = []
        seen: dict[Any, int] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else number
            same = seen.setdefault(key, number)
            entries.append(Entry(name, NAME_OF[tensor.dtype], tuple(tensor.shape), -1 if same == number else same))
        return cls(entries)

    @classmethod
    def read(cls, text: bytes) -> Layout:
        """That of a message. Raises ValueError for anything that `text` of no layout is."""
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("JSON that is nested too deeply") from error
        if not isinstance(found, list):
            raise ValueError("a layout is a list")
        entries: list[Entry] = []
        for row in found:
            if not isinstance(row, list) or len(row) != 4 or not all(isinstance(text, str) for text in row[:2]):
                raise ValueError("an entry has a name, a type, a shape and a number")
            name, dtype, shape, same = row
            if dtype not in DTYPES:
                raise ValueError(f"{name!r} is of the unknown type {dtype!r:.40}")
            if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
                raise ValueError(f"{name!r} has no shape")
            if type(same) is not int or not -1 <= same < len(entries):
                raise ValueError(f"{name!r} has the memory of an unknown tensor")
            entry = Entry(name, dtype, tuple(shape), same)
            if same >= 0 and entries[same] != Entry(entries[same].name, dtype, entry.shape, -1):
                raise ValueError(f"{name!r} has the memory of a tensor with another shape")
            entries.append(entry)
        return cls(entries)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors in a block of memory of `bytes` uint8 values."""
        return {
            entry.name: memory[offset : offset + DTYPES[entry.dtype].itemsize * _product(entry.shape)]
            .view(DTYPES[entry.dtype])
            .view(entry.shape)
            for entry, offset in zip(self.entries, self.offsets, strict=True)
        }

    def take(self, tensors: Mapping[str, Tensor], memory: Tensor) -> None:
        """Copies a state of this layout into memory. Raises ConfigError if another thread changed it meanwhile."""
        before = _changes(tensors)
        for entry, view in zip(self.entries, self.views(memory).values(), strict=True):
            if entry.same < 0:
                view.copy_(tensors[entry.name])
        if _changes(tensors) != before:
            raise ConfigError(
                "the parameters changed while commit copied them: call it between optimizer.step() and the next "
                "change, in the thread that trains"
            )

    def check(self, other: Layout, where: str, whose: str) -> None:
        """Raises MismatchError, which names the first differences, unless another layout has these names, types and
        shapes; which tensors share their memory does not matter (`check_ties`). `where`, `whose`: words for the other,
        and for this one."""
        here, there = ({entry.name: (entry.dtype, entry.shape) for entry in layout.entries} for layout in (other, self))
        if here == there:
            return
        said = [
            f"{name}: {_described(here.get(name))} {where}, {_described(there.get(name))} {whose}"
            for name in [*there, *(missing for missing in here if missing not in there)]
            if here.get(name) != there.get(name)
        ]
        more = f", and {len(said) - TOLD} more" if len(said) > TOLD else ""
        raise MismatchError(
            f"the state has other tensors: {'; '.join(said[:TOLD])}{more}; use a model of the same class, "
            f"configuration and dtype"
        )

    def ties(self) -> dict[str, frozenset[str]]:
        """The names of the tensors that have the memory of each, its own among them."""
        groups: dict[int, set[str]] = {}
        for number, entry in enumerate(self.entries):
            groups.setdefault(number if entry.same < 0 else entry.same, set()).add(entry.name)
        return {name: frozenset(group) for group in groups.values() for name in group}

    def check_ties(self, other: Layout, where: str, whose: str) -> None:
        """Raises MismatchError, which names the first differences, unless in another layout with these names the same
        tensors share their memory."""
        here, there = other.ties(), self.ties()
        said = [
            f"{name} shares its memory with {_others(name, here[name])} {where}, with {_others(name, there[name])} "
            f"{whose}"
            for name in there
            if here[name] != there[name]
        ]
        if said:
            raise MismatchError(f"other tensors are tied: {'; '.join(said[:TOLD])}")


def overlaps(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of tensors whose memory overlaps, or whose values lie between each other's. Each such tensor is in one of
    them at least."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    found: list[tuple[str, str]] = []
    widest = ("", 0, 0, "")
    for span in spans:
        is_near = span[0] == widest[0]
        if is_near and span[1] < widest[2]:
            found.append((widest[3], span[3]))
        if not is_near or span[2] > widest[2]:
            widest = span
    return found


def marks(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]] | None:
    """The place of each tensor, and how often it was changed in place; None if torch does not count that."""
    if any(tensor.is_inference() for tensor in tensors.values()):
        return None
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors.values()]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first value to the end of the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.itemsize


def _others(name: str, group: frozenset[str]) -> str:
    return ", ".join(sorted(group - {name})) or "none"


def _changes(tensors: Mapping[str, Tensor]) -> list[int]:
    """How often each tensor was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]


def _described(found: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if found is None else f"{found[0]}{list(found[1])}"


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
