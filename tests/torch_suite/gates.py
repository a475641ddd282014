"""Gates: tell torch's test file the abilities of our backend. All differences from torch's own files are here.

`distributed_test.py` decides most skips when it is imported, from its global `BACKEND`: tests for the CPU ask for
"gloo", those of all-to-all on the CPU for "mpi", those for GPUs for "nccl". So the file is imported under the name of
a backend it knows, the *gate*, and then told the name of the backend to run. Whatever runs, the skips are the same.
A test runs behind the first gate of GATES that lets it through.
"""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from . import stand_in

GATES = ("gloo", "mpi", "nccl")
"""The gates of torch's tests. Behind the last, CPU tensors stand in for those of a GPU: see stand_in.py."""

BODIES_FOR_GLOO = ("_test_accumulate_gradients_no_sync",)
"""Methods that ask for gloo by name in the middle, and have no branch for a backend they do not know."""

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
    }
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_small_worldsize = _skip_below_3
    common.TIMEOUT_DEFAULT = timeout_s
    common.TIMEOUT_OVERRIDE.clear()
    for features in common.DistTestCases.backend_feature.values():
        if "gloo" in features:
            features.add(backend)
    with contextlib.ExitStack() as stack:
        if gate == "nccl":
            stand_in.install()
            stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    module.BACKEND = os.environ["BACKEND"] = backend  # type: ignore[attr-defined]  # for the code that runs from here on
    module.Barrier.sync.__func__.__defaults__ = (None, BARRIER_S)
    for name in BODIES_FOR_GLOO:
        base = module.DistributedTest._DistTestBase
        setattr(base, name, mock.patch.object(module, "BACKEND", "gloo")(getattr(base, name)))
    return module


@contextlib.contextmanager
def running(gate: str) -> Iterator[None]:
    """The environment of a running test, in the process of a rank."""
    with contextlib.ExitStack() as stack:
        # torch's function asks for gloo by name; groups of other backends have the method all the same.
        stack.enter_context(mock.patch.object(dist, "monitored_barrier", _monitored_barrier))
        if gate == "nccl":
            stack.enter_context(stand_in.device())
        yield


def _skip_below_3(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch asks for 8 ranks, to keep these tests off machines with few GPUs; the ranks 1 and 2 are all they need."""
    skips: Any = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            sys.exit(skips["small_worldsize"].exit_code)
        return function(*args, **kwargs)

    return wrapper


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        group = group or dist.group.WORLD
        group.monitored_barrier(timeout or dist.distributed_c10d.default_pg_timeout, wait_all_ranks=wait_all_ranks)
