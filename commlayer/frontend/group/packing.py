"""`Packing`: a state as one array of bytes, into which a thread copies the tensors while the model computes.

The array has the size of its head, the head, and the tensors. The head is in torch's format of files: the state with
the place, shape and dtype of each tensor instead of the tensor.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

PLACE = "place of a tensor"

SIZE_BYTES = 8


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


class Packing:
    """`state`: dicts and lists of dense tensors on the CPU, and of what `torch.load(weights_only=True)` reads."""

    def __init__(self, state: Any) -> None:
        """Copies all but the tensors. They must stay as they are until `packed` has returned."""
        self._tensors: list[tuple[int, Tensor]] = []
        self._size = 0
        file = io.BytesIO()
        torch.save(tree_map(self._place, state), file)
        head = file.getbuffer()
        first = _aligned(SIZE_BYTES + len(head))
        self._packed = torch.empty(first + self._size, dtype=torch.uint8, device="cpu")
        self._packed[:SIZE_BYTES].view(torch.int64).fill_(len(head))
        self._packed[SIZE_BYTES:][: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
        self._data = self._packed[first:]
        threads = ThreadPoolExecutor(1, "commlayer-packing")
        self._copied = threads.submit(self._copy)
        threads.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Whether `packed` returns at once."""
        return self._copied.done()

    def packed(self) -> Tensor:
        """The array, once all is copied."""
        self._copied.result()
        return self._packed

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        first, self._size = self._size, self._size + _aligned(leaf.numel() * leaf.element_size())
        self._tensors.append((first, leaf.detach()))
        return {PLACE: (first, list(leaf.shape), leaf.dtype)}

    def _copy(self) -> None:
        for first, tensor in self._tensors:  # without the interpreter's lock
            _at(self._data, first, list(tensor.shape), tensor.dtype).copy_(tensor)
        self._tensors = []


def unpack(packed: Tensor) -> Any:
    """The state of which this is the array. Its tensors are parts of the array."""
    size = int(packed[:SIZE_BYTES].view(torch.int64))
    head = torch.load(io.BytesIO(packed[SIZE_BYTES:][:size].numpy().data), weights_only=True)
    data = packed[_aligned(SIZE_BYTES + size) :]
    return tree_map(lambda leaf: _at(data, *leaf[PLACE]) if _is_place(leaf) else leaf, head, is_leaf=_is_place)


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, dict) and PLACE in leaf


def _at(data: Tensor, first: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The part of the array that is this tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return data[first : first + size].view(dtype).view(shape)
