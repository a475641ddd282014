"""commlayer: a communication layer for distributed training with PyTorch.

Importing it registers the backend for `torch.distributed.init_process_group("commlayer")`. A job that keeps another
backend can use the engine for its gradients alone: `model.register_comm_hook(HookState(), allreduce_hook)`.
"""

from __future__ import annotations

import commlayer_autoload

from . import planner, scheduler
from .compress.fine import Fine
from .compress.reshard import reshard
from .config import Config, Policy
from .errors import (
    AbortedError,
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnreachableError,
)
from .frontend.elastic.elastic import elastic
from .frontend.embedding import embedding
from .frontend.experts import experts
from .frontend.experts.all_to_all import all_to_all_single, all_to_all_single_autograd
from .frontend.gradients.ddp import allreduce_hook
from .frontend.gradients.fsdp import compress_fsdp
from .frontend.gradients.hook_state import HookState
from .frontend.group.options import Options
from .frontend.local.local_steps import LocalSteps
from .frontend.overlap.overlap import overlap
from .frontend.pipelines import pipeline
from .frontend.tensor_parallel import tp
from .frontend.work.context import priority
from .loss.tolerance import ByLayer, BySteps, GradientNorm, Tolerance
from .transport.flight import flight_record
from .transport.stats import paths, stats
from .weights.publisher import publish
from .weights.subscription import subscribe

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "ByLayer",
    "BySteps",
    "ClosedError",
    "CommError",
    "Config",
    "ConfigError",
    "Fine",
    "GradientNorm",
    "HookState",
    "LocalSteps",
    "MismatchError",
    "OperationTimeoutError",
    "Options",
    "PeerLostError",
    "Policy",
    "Tolerance",
    "UnreachableError",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "allreduce_hook",
    "compress_fsdp",
    "elastic",
    "embedding",
    "experts",
    "flight_record",
    "overlap",
    "paths",
    "pipeline",
    "planner",
    "priority",
    "publish",
    "reshard",
    "scheduler",
    "stats",
    "subscribe",
    "tp",
]

commlayer_autoload.load()  # for a torch that loads no backends by itself (TORCH_DEVICE_BACKEND_AUTOLOAD=0)
