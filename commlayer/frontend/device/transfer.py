"""`Transfer`: the copies of one operation between a device and pinned host memory.

caller's stream   ... produce inputs |                       | wait(): a word, then copies back
out               waits for that, copies inputs to pinned memory
back              copies results, if no stream waits for them yet
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .accelerator import Accelerator


def pinned_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of pinned memory for copies of these tensors: torch rounds each up to a power of two."""
    different = {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(1 << (nbytes - 1).bit_length() for nbytes in different.values() if nbytes > 0)


class Transfer:
    """Pinned copies of an operation's tensors. It keeps them until `release`, and the tensors until `leave`."""

    def __init__(
        self,
        accelerator: Accelerator,
        device: torch.device,
        back: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self._accelerator = accelerator
        self.device = device
        self._back = back
        self._inputs = [tensor for tensor in inputs if accelerator.has(tensor)]
        self._outputs = [tensor for tensor in outputs if accelerator.has(tensor)]
        self._host: dict[int, Tensor] = {}
        with torch.inference_mode(mode=False):  # other threads write these tensors, outside of that mode
            for tensor in (*self._inputs, *self._outputs):
                if id(tensor) not in self._host:
                    self._host[id(tensor)] = accelerator.pinned(tensor.shape, tensor.dtype)
        self._stream = back
        self._ready, self._copied = accelerator.event(), accelerator.event()

    def take_out(self, out: Any, gate: Tensor | None = None) -> None:
        """Enqueues the copies of the inputs on the stream `out`, behind all work of the current stream.

        Behind them the stream writes the word `gate`, which the caller keeps until the copies are over.
        """
        out.wait_stream(self._accelerator.current_stream(self.device))
        with self._accelerator.on(out):
            for tensor in self._inputs:
                self._accelerator.copy(self._host[id(tensor)], tensor.detach())
        if gate is not None:
            self._accelerator.write_word(out, gate)
        self._ready.record(out)

    def wait_until_out(self) -> None:
        """Blocks the calling thread until the inputs are in pinned memory."""
        with self._accelerator.at(self.device):
            self._ready.synchronize()

    def host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The pinned copies of these tensors; host tensors stay as they are."""
        return [self._host.get(id(tensor), tensor) for tensor in tensors]

    def addresses(self) -> frozenset[int]:
        """Those of the pinned copies; 0 is that of a tensor without elements."""
        return frozenset({0, *(copy.data_ptr() for copy in self._host.values())})

    def bring_back(self, word: Tensor | None = None) -> None:
        """Enqueues the copies of the results: with `word`, on the current stream and once the word is written.

        The caller keeps the word until the copies are over.
        """
        if word is not None:
            self._stream = self._accelerator.current_stream(self.device)
        # Earlier work of the caller's stream may still read the outputs. And CUDA demands that an order which a word
        # makes, from the copies out to those back, can also be seen in events.
        self._stream.wait_event(self._ready)
        if word is not None:
            self._accelerator.wait_word(self._stream, word)
        with self._accelerator.on(self._stream):
            for tensor in self._outputs:
                self._accelerator.copy(tensor.detach(), self._host[id(tensor)])
        self._copied.record(self._stream)

    def follow(self) -> None:
        """Lets the current stream wait for the copies back, which are enqueued."""
        self._accelerator.current_stream(self.device).wait_event(self._copied)

    def leave(self) -> None:
        """Lets go of the tensors on the device: the current stream has all work on them, or waits for it.

        The caching allocator gives their memory to later work of the stream that they were made on. That is the rule of
        NCCL's `wait()`, too. Kept until the copies are over, they would be the parameters of all layers with FSDP2.
        """
        self._inputs.clear()
        self._outputs.clear()

    def is_back(self) -> bool:
        """Whether the copies out and back are over; those back may never have been enqueued."""
        with self._accelerator.at(self.device):
            return bool(self._ready.query() and self._copied.query())

    def wait_until_back(self) -> None:
        """Blocks the calling thread until the copies back, which are enqueued, are over."""
        with self._accelerator.at(self.device):
            self._copied.synchronize()

    def on_results(self) -> AbstractContextManager[Any]:
        """Makes the stream current that has the copies back."""
        return self._accelerator.on(self._stream)

    def release(self) -> None:
        """Lets go of all tensors: the copies are over, or are never made."""
        self.leave()
        self._host.clear()
