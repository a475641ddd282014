"""How torch's test file is told what our backend can do: everything that differs from torch's own files is here.

`distributed_test.py` decides most skips when it is imported, from its global `BACKEND`: tests for the CPU ask for
"gloo", those of all-to-all on the CPU for "mpi". So the file is imported under the name of a backend it knows, the
*gate*, and then told the name of the backend to run: the skips are those of gloo (or MPI) on a machine without CUDA,
whatever runs.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

GATES = {"gloo": "test_", "mpi": "test_all_to_all"}
"""What runs behind each gate: the tests whose names begin so. The `mpi` gate opens all-to-all on the CPU alone."""

BARRIER_S = 60
"""How long ranks wait for each other before and after a test; torch's 10 s are little on a busy machine."""


def import_distributed_test(gate: str, backend: str, world: int, timeout_s: int, init_method: str) -> ModuleType:
    """torch's distributed_test for this backend and world; once in a process, because the file reads its environment.

    `init_method` is a file:// URL of a file that does not exist yet.
    """
    os.environ |= {
        "BACKEND": gate,
        "WORLD_SIZE": str(world),
        "INIT_METHOD": init_method,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(timeout_s),
    }
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    for feature in common.DistTestCases.backend_feature.values():
        if "gloo" in feature:
            feature.add(backend)
    module.BACKEND = os.environ["BACKEND"] = backend  # type: ignore[attr-defined]  # for what runs from here on
    module.Barrier.sync.__func__.__defaults__ = (None, BARRIER_S)
    return module
