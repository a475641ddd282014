"""Data for torchtitan's Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

WORDS = 256


class Batches(BaseDataLoader):
    """Sequences that count upwards, so that the next token can be learned."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._drawn = torch.Generator().manual_seed(dp_rank)
        self._shape = (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[Any]:
        size, length = self._shape
        while True:
            starts = torch.randint(0, WORDS, (size, 1), generator=self._drawn)
            tokens = (starts + torch.arange(length + 1)) % WORDS
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded."""
