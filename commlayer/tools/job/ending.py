"""`end`: the ranks of a trial exchange their records, and end together, without a traceback.

The records travel through the Store of the default group, so that the starter on every host gets those of all ranks.
The Store often lives in rank 0, which leaves last. Then each process ends at once: neither handlers of `atexit` nor
destructors of groups run, which would wait for other ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ...transport.whole_file import whole_file
from . import record

_PREFIX = "commlayer/trial"
_LEAVE_S = 10.0
_POLL_S = 0.02


def end(folder: Path, rank: int, text: str, timeout_s: float) -> NoReturn:
    """Ends this process with status 0, once all ranks have come here and the records are in the folder."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        exchange(store, folder, rank, dist.get_world_size(), text, timeout_s)
    for child in multiprocessing.active_children():  # workers of data loaders
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def exchange(store: dist.Store, folder: Path, rank: int, world: int, text: str, timeout_s: float) -> None:
    """Tells the other ranks this rank's record, and writes theirs, unless their own process did so."""
    others = [other for other in range(world) if other != rank]
    store.set(f"record/{rank}", text)
    store.wait([f"record/{other}" for other in others], timedelta(seconds=timeout_s))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for other in others:
            path = record.path(folder, other)
            if not path.exists():
                with whole_file(path) as file:
                    file.write(store.get(f"record/{other}"))
    store.add("done", 1)
    deadline_s = time.monotonic() + _LEAVE_S
    if rank != 0:
        return
    while store.add("done", 0) < world and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
