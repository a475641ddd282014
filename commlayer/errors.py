"""The exceptions that commlayer raises. Every message names the value, the rank and a remedy."""

from __future__ import annotations


class CommError(RuntimeError):
    """Base class of all others.

    The attributes are set where an operation of a group failed, and None otherwise. Ranks are ranks of the job.
    """

    rank: int | None = None
    """The rank that raised the error."""
    culprit: int | None = None
    """The rank to look at. Ranks that raise an error for the same failure name the same culprit; None: unknown."""
    host: str | None = None
    """Name of the culprit's host."""
    operation: str | None = None
    """Name of the operation: all_reduce, send."""
    sequence: int | None = None
    """Its number in the group: collectives have the same numbers on all ranks, sends and receives count by
    themselves."""
    group: str | None = None
    """Name of the group."""


class ConfigError(CommError, ValueError):
    """A setting or argument is out of range or contradicts another."""


class PeerLostError(CommError):
    """A peer died or stopped answering; its group cannot go on."""


class UnreachableError(CommError):
    """No packet arrives from one rank at another: a firewall, or the wrong network interface."""


class OperationTimeoutError(CommError, TimeoutError):
    """An operation did not end within its timeout; its group cannot go on."""


class AbortedError(CommError):
    """This rank, or a peer that failed first, aborted the group."""


class ClosedError(CommError):
    """The engine or the group is closed."""


class MismatchError(CommError):
    """The ranks called different operations: size, dtype, reduction, policy or order differ."""
