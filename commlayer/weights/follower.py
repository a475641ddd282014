"""`Follower`: takes the versions that somebody else names, so that several readers hold the same one."""

from __future__ import annotations

import time
from types import TracebackType

from ..errors import ConfigError, MismatchError, OperationTimeoutError, PeerLostError
from .subscription import Subscription, Version, subscribe


class Follower:
    """A reader of the workers of a rollout engine, whose driver says which version all of them load.

    It keeps the version that it took last, so that a load that failed is tried again without the network. It belongs to
    one thread.
    """

    def __init__(self, address: str, *, secret_file: str | None = None, timeout_s: float = 30.0) -> None:
        """As `commlayer.subscribe`; `timeout_s` also limits the time to a version. Raises ConfigError as it does."""
        self.address = address
        self._timeout_s = timeout_s
        self._subscription: Subscription = subscribe(address, secret_file=secret_file, timeout_s=timeout_s)
        self._version: Version | None = None

    def take(self, number: int) -> Version:
        """The version with this number, which `commit` has got or gets within `timeout_s`.

        Raises ConfigError for a number that is none; OperationTimeoutError if the version does not come in time;
        MismatchError if this reader holds a later one; PeerLostError if the publisher has closed; and the errors of
        `Subscription.latest`.
        """
        if type(number) is not int or number < 0:
            raise ConfigError(f"version {number!r}: use the whole number that commit() was given")
        end_s = time.monotonic() + self._timeout_s
        while self._version is None or self._version.number < number:
            left_s = max(0.0, end_s - time.monotonic())
            found = self._subscription.latest(left_s)
            self._version = found or self._version
            if found is None and self._subscription.is_ended:
                raise PeerLostError(
                    f"the publisher at {self.address} has closed, and version {number} was not among those that it "
                    f"sent; this reader holds {self._holding}. Publish anew, and have the workers subscribe anew"
                )
            if found is None:
                raise OperationTimeoutError(
                    f"version {number} of {self.address} did not come within {self._timeout_s} s; this reader holds "
                    f"{self._holding}. Commit it at the trainer before the update, or use a larger timeout_s"
                )
        if self._version.number > number:
            raise MismatchError(
                f"version {number} of {self.address} is gone; this reader holds {self._holding}. Name the latest "
                f"version, and commit the next one only when the update has ended"
            )
        return self._version

    @property
    def _holding(self) -> str:
        return "nothing" if self._version is None else f"version {self._version.number}"

    def close(self) -> None:
        """Ends the connection."""
        self._subscription.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
