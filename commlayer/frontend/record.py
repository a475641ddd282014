"""`open_record`: enters a process group in the flight recorder, and in its readers: traces, watch, metrics."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from ..config import Config
from ..transport import metrics, watch
from ..transport.base import Group
from ..transport.flight import GroupRecord, recorder
from .profile import CommsProfile
from .submit import Submitter


def open_record(
    group: dist.ProcessGroup,
    name: str,
    ranks: Sequence[int],
    native: Group,
    submitter: Submitter,
    config: Config,
) -> GroupRecord:
    """The record of `group`, whose ranks of the job are `ranks`. It does not keep the group alive."""
    this = weakref.ref(group)

    def describe() -> str:
        group = this()
        return "" if group is None else group.group_desc or "undefined"

    rank = group.rank()
    record = GroupRecord(name, describe, ranks, rank, submitter.calls, native.awaited, native.status)
    submitter.profile = CommsProfile(name, describe, ranks, rank).record
    native.on_failure = functools.partial(watch.failed, id(record))
    recorder.open(record)
    watch.arm(config)
    metrics.serve(config)
    return record
