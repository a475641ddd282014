"""The limit of this process's file descriptors."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("commlayer")

WANTED = 65536
"""gloo's fallback needs one per rank and group that uses it, and the data loaders of the job need theirs."""


def raise_descriptor_limit() -> None:
    """Raises the soft limit, which is 1,024 on most systems, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("cannot raise the limit of %d file descriptors (ulimit -n) to %d: %s", soft, wanted, error)
