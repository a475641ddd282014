"""`Cache`: the records of a table that are on this rank, by the number of their row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ABSENT = -1


class Cache:
    """Records of `columns` values, of rows 0 to `rows` - 1. Grows as needed."""

    def __init__(self, rows: int, columns: int) -> None:
        self._slot = np.full(rows, ABSENT, np.int32)
        self._free = np.zeros(0, np.int32)
        self._records = torch.zeros(0, columns, dtype=torch.float32, device="cpu")

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows are here."""
        return np.not_equal(self._slot[rows], ABSENT)

    def get(self, rows: NDArray[np.int64]) -> Tensor:
        """The records of rows that are here."""
        return self._records[torch.from_numpy(self._slot[rows].astype(np.int64))]

    def put(self, rows: NDArray[np.int64], records: Tensor) -> None:
        """Adds rows, each once, or replaces their records."""
        new = rows[~self.has(rows)]
        if len(new) > len(self._free):
            self._grow(len(new) - len(self._free))
        taken, self._free = self._free[: len(new)], self._free[len(new) :]
        self._slot[new] = taken
        self._records[torch.from_numpy(self._slot[rows].astype(np.int64))] = records

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Forgets rows that are here."""
        self._free = np.concatenate([self._free, self._slot[rows]])
        self._slot[rows] = ABSENT

    def _grow(self, needed: int) -> None:
        before = len(self._records)
        added = max(needed, before // 2, 1024)
        self._records = torch.cat([self._records, self._records.new_zeros(added, self._records.shape[1])])
        self._free = np.concatenate([self._free, np.arange(before, before + added, dtype=np.int32)])
