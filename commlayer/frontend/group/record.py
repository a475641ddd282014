"""`open_record`: enters a process group in the flight recorder, and in its readers: traces, watch, metrics."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ...config import Config
from ...telemetry import agent
from ...transport import metrics, watch
from ...transport.flight import GroupRecord, recorder
from .profile import CommsProfile
from .steps import watch_steps
from .submit import Submitter


def open_record(
    group: dist.ProcessGroup,
    name: str,
    ranks: Sequence[int],
    native: Any,
    submitter: Submitter,
    config: Config,
) -> GroupRecord:
    """The record of `group`, whose ranks of the job are `ranks`. It does not keep the group alive."""
    describe = description_of(group)
    rank = group.rank()
    record = GroupRecord(name, describe, ranks, rank, submitter.calls, native.awaited, native.status)
    submitter.profile = CommsProfile(name, describe, ranks, rank).recorded
    native.on_failure = functools.partial(watch.failed, record.number)
    recorder.open(record)
    watch_steps()
    watch.arm(config)
    metrics.serve(config)
    if config.top:
        world = dist.get_world_size() if dist.is_initialized() else len(ranks)
        agent.arm(config, native.engine, ranks[rank], world)
    return record


def description_of(group: dist.ProcessGroup) -> Callable[[], str]:
    """A function that returns the description of `group`, without keeping it alive."""
    this = weakref.ref(group)

    def describe() -> str:
        group = this()
        return "" if group is None else group.group_desc or "undefined"

    return describe
