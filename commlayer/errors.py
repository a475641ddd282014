"""What can go wrong, as types a job can catch. Every message names the value, the rank and a remedy."""

from __future__ import annotations


class CommError(RuntimeError):
    """Base of everything commlayer raises while communicating."""


class ConfigError(CommError, ValueError):
    """A setting or argument is out of range or contradicts another."""


class PeerLostError(CommError):
    """A peer died or stopped answering; the group cannot go on."""


class OperationTimeoutError(CommError, TimeoutError):
    """An operation did not end within its timeout."""


class AbortedError(CommError):
    """The group was aborted, here or by a peer that failed first."""


class ClosedError(CommError):
    """The engine or the group has been closed."""


class MismatchError(CommError):
    """Ranks disagree on the operation: size, dtype, reduction or order."""
