"""Registers the backend `commlayer` when torch is imported: `load` is an entry point of the group `torch.backends`, and
since torch 2.14, which asks for a backend by its name, of `torch.distributed.backends`. `load_vllm` is one of vLLM's.

This module is outside of the package, because to import that takes half a second, and every process that imports torch
would wait for it. The package is imported when the first group is made, and where there is a file of settings (or
COMMLAYER_DDP_ variables) with the first DistributedDataParallel.
"""

from __future__ import annotations

import functools
from typing import Any

import commlayer_environment as environment
from commlayer_environment import NAME, REPLACED


def load() -> None:
    """Registers the backend. With COMMLAYER_INSTEAD_OF=gloo, or that in the file of settings, it also takes gloo's
    place. With a file of settings, or variables for it, models of DDP are looked at. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_devices())
    _split_groups(dist)
    _shrink_groups(dist)
    if environment.variable(environment.TORCHCOMMS):
        _refuse_torchcomms(dist.distributed_c10d)
    file = environment.job_file()
    if environment.variable(environment.INSTEAD_OF) or (file and _file_replaces(file)):
        _take_place(dist)
    folder = environment.variable(environment.TRIAL)
    if folder:
        _watch_steps(folder)
    if file or environment.has_ddp_variables():
        _look_at_models()


def load_vllm() -> None:
    """Tells vLLM of the engine that loads published weights. An entry point of the group `vllm.general_plugins`, which
    vLLM calls in each of its processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(NAME, "commlayer.vllm", "Engine")


def _devices() -> list[str]:
    """The types of devices whose tensors a group takes: also those of the accelerator at hand."""
    import torch

    found = torch.accelerator.current_accelerator()
    return ["cpu", "cuda"] if found is None or found.type == "cuda" else ["cpu", "cuda", found.type]


def _create(opts: Any, pg_options: Any = None) -> Any:
    from commlayer.frontend.group.create import create

    return create(opts, pg_options)


def _split_groups(dist: Any) -> None:
    """Lets `dist.split_group` split groups of ours without an accelerator, which torch refuses before 2.15."""
    import torch

    c10d = dist.distributed_c10d
    real = c10d.split_group
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) or getattr(real, "splits", False):
        return

    @functools.wraps(real)
    def split_group(parent_pg: Any = None, *args: Any, **kwargs: Any) -> Any:
        parent = parent_pg or dist.group.WORLD
        if not hasattr(parent, "name_of_split"):
            return real(parent_pg, *args, **kwargs)
        from commlayer.frontend.group.split import split_group

        return split_group(parent, *args, **kwargs)

    split_group.splits = True  # type: ignore[attr-defined]
    dist.split_group = c10d.split_group = split_group


def _shrink_groups(dist: Any) -> None:
    """Lets `dist.shrink_group` shrink groups of ours: torch makes the smaller group from a backend of C++."""
    c10d = dist.distributed_c10d
    real = getattr(c10d, "shrink_group", None)
    if real is None or getattr(real, "shrinks", False):
        return

    @functools.wraps(real)
    def shrink_group(ranks_to_exclude: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(group or dist.group.WORLD, "exclude"):
            return real(ranks_to_exclude, group, *args, **kwargs)
        from commlayer.frontend.group.shrink import shrink_group

        return shrink_group(ranks_to_exclude, group, *args, **kwargs)

    shrink_group.shrinks = True  # type: ignore[attr-defined]
    dist.shrink_group = c10d.shrink_group = shrink_group


def _refuse_torchcomms(c10d: Any) -> None:
    """Lets a group of ours raise ConfigError where torchcomms would be asked for it: by torch before 2.14, and in vain.

    Later torches ask torchcomms for the backends that it has.
    """
    real = c10d._new_process_group_helper
    if hasattr(c10d, "_torchcomms_handles_backend") or getattr(real, "refuses_torchcomms", False):
        return

    @functools.wraps(real)
    def make(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if NAME in str(backend).lower() and c10d._use_torchcomms_enabled():
            from importlib.metadata import version

            from commlayer.errors import ConfigError

            raise ConfigError(
                f"rank {rank}: {environment.TORCHCOMMS}={environment.variable(environment.TORCHCOMMS)} lets torch "
                f"{version('torch')} ask torchcomms {version('torchcomms')} for the backend {backend!r}, which it does "
                f"not have; unset the variable, or install torch 2.14 or later"
            )
        return real(size, rank, ranks, backend, *args, **kwargs)

    make.refuses_torchcomms = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make


def _watch_steps(folder: str) -> None:
    """Measures the optimizer steps of a trial (`commlayer headroom`). Importing the package waits for the first one."""
    from torch.optim import optimizer as optimizers

    if any(getattr(hook, "is_trial", False) for hook in optimizers._global_optimizer_post_hooks.values()):
        return

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        from commlayer.tools.job import steps

        steps.after_step(folder, optimizer)

    after_step.is_trial = True  # type: ignore[attr-defined]
    after_step.reads_nothing = True  # type: ignore[attr-defined]  # so deferred steps stay deferred
    optimizers.register_optimizer_step_post_hook(after_step)


def _file_replaces(path: str) -> bool:
    """Whether the file asks to take gloo's place. A faulty file counts, too: the first group tells its error."""
    try:
        with open(path, "rb") as file:
            if b"instead_of" not in file.read():
                return False  # and nothing was imported
    except OSError:
        return False
    from commlayer.config import Config
    from commlayer.errors import ConfigError

    try:
        return bool(Config.from_environment().instead_of)
    except ConfigError:
        return True


def _take_place(dist: Any) -> None:
    """Makes a commlayer group of each group of gloo that torch is asked for: as WORLD, by new_group, in a mesh."""
    c10d = dist.distributed_c10d
    real = c10d._new_process_group_helper  # all ways to make a group lead here, also those of torch's own modules
    if getattr(real, "takes_place", False):
        return
    dist.Backend.default_device_backend_map["cpu"] = NAME  # some hosts ask for the backend of a device

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

    A group of gloo and another backend stays as torch makes it: "cpu:gloo,cuda:nccl".

    Raises ConfigError for a wrong COMMLAYER_INSTEAD_OF, and for a faulty file of settings.
    """
    if environment.variable(environment.INSTEAD_OF).lower() != REPLACED:
        from commlayer.config import Config

        Config.from_environment()  # raises, unless the file has said it
    if backend == "undefined":
        import torch

        return backend if torch.accelerator.is_available() else NAME
    entries = [entry.rpartition(":") for entry in backend.lower().split(",")]
    if {name for _, _, name in entries} > {REPLACED}:
        # A group of ours is one of Python, also for the other backend, which would lose its device_id and its options.
        return backend
    return ",".join(f"{device}{colon}{NAME if name == REPLACED else name}" for device, colon, name in entries)


def _look_at_models() -> None:
    """Lets `commlayer.frontend.overlap.unchanged` see each DistributedDataParallel: its arguments, and the model."""
    from torch.nn.parallel import DistributedDataParallel

    real = DistributedDataParallel.__init__
    if getattr(real, "looks", False):
        return

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from commlayer.frontend.overlap import unchanged

        real(self, *args, **unchanged.arguments(real, args, kwargs))
        unchanged.prepare(self)

    init.looks = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
