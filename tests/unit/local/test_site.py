"""`Site.agreed`, where the ranks of a site cannot tell each other how a call ended."""

from __future__ import annotations

import pytest

from commlayer import AbortedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from commlayer.frontend.local.site import Site

LATE = OperationTimeoutError("rank 0 did not come")


class Apart(Site):
    """A site of two ranks, which cannot tell each other anything."""

    def __init__(self, why: CommError) -> None:
        super().__init__(ranks=(0, 1))
        self._why = why

    def has_any(self, _: bool) -> bool:
        raise type(self._why)(str(self._why))


def ends(error: CommError | None, why: CommError = LATE) -> CommError:
    """What a rank raises that has found this error."""

    def call() -> None:
        if error is not None:
            raise error

    with pytest.raises(CommError) as caught:
        Apart(why).agreed(call)
    return caught.value


def test_a_rank_whose_mate_does_not_come_names_that_mate_and_not_a_death_elsewhere() -> None:
    elsewhere = AbortedError("rank 5 aborted")
    found = ends(elsewhere)
    assert isinstance(found, OperationTimeoutError)
    assert found.__cause__ is elsewhere


def test_a_rank_whose_mate_has_died_raises_what_it_has_found() -> None:
    """Its error may say already that the other sites have gone on, and why."""
    found = PeerLostError("rank 0 of its site died, and rank(s) 2, 3 go on")
    assert ends(found, PeerLostError("rank 0 died")) is found


def test_an_error_that_ends_the_training_is_raised_with_that_of_the_site_as_its_cause() -> None:
    wrong = ConfigError("every is 6 here")
    assert ends(wrong) is wrong
    assert isinstance(wrong.__cause__, OperationTimeoutError)


def test_a_call_that_ends_well_raises_the_error_of_the_site() -> None:
    found = ends(None)
    assert isinstance(found, OperationTimeoutError)
    assert found.__cause__ is None
