"""`Site.agreed`, where the ranks of a site cannot tell each other how a call ended."""

from __future__ import annotations

import pytest

from commlayer import AbortedError, CommError, ConfigError, OperationTimeoutError
from commlayer.frontend.local.site import Site


class Apart(Site):
    """A site of two ranks, of which the other one does not come."""

    def __init__(self) -> None:
        super().__init__(ranks=(0, 1))

    def has_any(self, _: bool) -> bool:
        raise OperationTimeoutError("rank 0 did not come")


def ends(error: CommError | None) -> CommError:
    """What a rank raises that has found this error."""

    def call() -> None:
        if error is not None:
            raise error

    with pytest.raises(CommError) as caught:
        Apart().agreed(call)
    return caught.value


def test_a_rank_whose_mate_does_not_come_names_that_mate_and_not_a_death_elsewhere() -> None:
    elsewhere = AbortedError("rank 5 aborted")
    found = ends(elsewhere)
    assert isinstance(found, OperationTimeoutError)
    assert found.__cause__ is elsewhere


def test_an_error_that_ends_the_training_is_raised_with_that_of_the_site_as_its_cause() -> None:
    wrong = ConfigError("every is 6 here")
    assert ends(wrong) is wrong
    assert isinstance(wrong.__cause__, OperationTimeoutError)


def test_a_call_that_ends_well_raises_the_error_of_the_site() -> None:
    found = ends(None)
    assert isinstance(found, OperationTimeoutError)
    assert found.__cause__ is None
