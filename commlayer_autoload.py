"""Registers the backend `commlayer` when torch is imported: `load` is an entry point of the group `torch.backends`.

This module is outside of the package, because to import that takes half a second, and every process that imports torch
would wait for it. The package is imported when the first group is made.
"""

from __future__ import annotations

import functools
import os
from typing import Any

NAME = "commlayer"
REPLACED = "gloo"
VARIABLE = "COMMLAYER_INSTEAD_OF"


def load() -> None:
    """Registers the backend. With COMMLAYER_INSTEAD_OF=gloo it also takes gloo's place. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if os.environ.get(VARIABLE, "").strip():
        _take_place(dist)


def _create(opts: Any, pg_options: Any = None) -> Any:
    from commlayer.frontend.backend import create

    return create(opts, pg_options)


def _take_place(dist: Any) -> None:
    """Makes a commlayer group of each group of gloo that torch is asked for: as WORLD, by new_group, in a mesh."""
    c10d = dist.distributed_c10d
    real = c10d._new_process_group_helper  # all ways to make a group lead here, also those of torch's own modules
    if getattr(real, "takes_place", False):
        return
    dist.Backend.default_device_backend_map["cpu"] = NAME  # for hosts that ask for the backend of a device

    @functools.wraps(real)
    def make(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        asked, backend = str(backend), instead_of(str(backend))
        if backend != asked and isinstance(kwargs.get("backend_options"), dist.ProcessGroupGloo._Options):
            del kwargs["backend_options"]
        return real(size, rank, ranks, backend, *args, **kwargs)

    make.takes_place = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make


def instead_of(backend: str) -> str:
    """The backend to make where a script asks for this one: a name, "device:name,..." or "undefined" (none given).

    Raises ConfigError for a wrong COMMLAYER_INSTEAD_OF.
    """
    if os.environ[VARIABLE].strip().lower() != REPLACED:
        from commlayer.config import Config

        Config.from_environment()  # raises
    if backend == "undefined":
        import torch

        return backend if torch.accelerator.is_available() else NAME
    entries = [entry.rpartition(":") for entry in backend.lower().split(",")]
    return ",".join(f"{device}{colon}{NAME if name == REPLACED else name}" for device, colon, name in entries)
