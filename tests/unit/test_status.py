"""The engine's statuses as exceptions."""

import pytest

from commlayer.errors import CommError, ConfigError, PeerLostError
from commlayer.transport.status import ERRORS, check, lib


def test_a_status_has_its_exception_with_the_text_of_the_engine_and_the_remedy() -> None:
    check(lib.CL_OK, "opening")
    with pytest.raises(PeerLostError, match=r"^opening: a peer died or stopped answering; look at that rank's log"):
        check(lib.CL_EPEERLOST, "opening")
    with pytest.raises(ConfigError, match=r"^opening: .*; install libfabric1"):
        check(lib.CL_ENOLIBFABRIC, "opening")


def test_a_status_without_a_remedy_is_an_error_all_the_same() -> None:
    assert lib.CL_ENOPORT not in ERRORS  # `Engine` has the text, which names the range
    with pytest.raises(CommError, match=r"^opening: .*; unknown status$"):
        check(lib.CL_ENOPORT, "opening")
