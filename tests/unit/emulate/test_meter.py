import pytest

from commlayer.tools.emulate.meter import Window, shortfall

RATE_BPS = 200e6


def window(idle: float, used: float, seconds: float = 0.5) -> Window:
    return Window(seconds, idle, "host 1 NIC 0", used * RATE_BPS, RATE_BPS)


SHORT, FULL, QUIET = window(0.0, 0.6), window(0.0, 0.95), window(0.0, 0.01)


def test_a_busy_machine_with_slow_links_did_not_keep_up() -> None:
    text = shortfall([SHORT] * 3 + [window(0.0, 0.72)] + [FULL] * 4 + [QUIET] * 9)
    assert text is not None
    assert "in 2.0 of 4.0 s with traffic no core was idle" in text
    assert "(host 1 NIC 0 came to 144 of 200 Mbit/s)" in text


@pytest.mark.parametrize(
    ("windows", "why"),
    [
        ([], "nothing ran"),
        ([FULL] * 20, "the links were the limit"),
        ([QUIET] * 20, "the ranks computed"),
        ([window(0.3, 0.6)] * 20, "the ranks waited"),
        ([SHORT], "less than a second"),
        ([SHORT] * 3 + [FULL] * 40, "a small part of the time"),
    ],
)
def test_otherwise_it_kept_up(windows: list[Window], why: str) -> None:
    assert shortfall(windows) is None, why
