"""One paragraph, which names the largest remedy and the next command."""

import pytest

from commlayer.tools.headroom.split import split
from commlayer.tools.headroom.verdict import is_little, next_command, seconds, verdict
from commlayer.tools.job.trial import Trial
from tests.unit.headroom.trials import job, on_engine

COMMAND = ("torchrun", "train.py", "--name", "a b")


def said(as_is: Trial, engine: Trial | None = None) -> str:
    found = split(as_is, as_is, engine)
    return f"{verdict(found)} Next: {next_command(found, COMMAND)}"


def test_little_is_said_and_ends_there() -> None:
    text = said(job(real=0.41, short=0.405, none=(0.4, 0.4)))
    assert text.startswith("Communication is not this job's problem")
    assert "at most 2%" in text
    assert "commlayer tune" not in text
    as_is = job()
    assert not is_little(split(as_is, as_is, None))
    assert is_little(split(as_is, as_is, None), 0.7)


@pytest.mark.parametrize(
    ("short", "engine", "remedy", "option"),
    [
        (
            0.45,
            None,
            "Look for a slow link first (commlayer probe).",
            "commlayer tune --allow compressed -- torchrun train.py --name 'a b'",
        ),
        (0.95, None, "Most of it is latency", "commlayer tune -- torchrun"),
        (0.75, on_engine(0.99, (0.45, 0.45)), "hide behind computation", "commlayer tune -- torchrun"),
    ],
)
def test_the_largest_remedy_is_named(short: float, engine: Trial | None, remedy: str, option: str) -> None:
    text = said(job(short=short), engine)
    assert "takes 1 s, and 400 ms without any communication" in text
    assert "at most 60%" in text
    assert remedy in text
    assert option in text


def test_latency_tells_the_number_of_operations() -> None:
    assert f"The job makes {on_engine(0.99).records[0].steps[-1].collectives:.0f} operations in a step." in said(
        job(short=0.95), on_engine(0.99)
    )
    assert "The job makes 1 operation in a step." in said(job(short=0.95), on_engine(0.99, collectives=1))


def test_a_better_transport_is_named() -> None:
    text = said(job(tcp={"sent": 100, "resent": 1}), on_engine(0.5))
    assert "wins 500 ms of them, by the way it answers lost packets (set COMMLAYER_INSTEAD_OF=gloo" in text
    assert "INSTEAD_OF" not in said(job(), on_engine(0.9))


def test_what_commlayer_reached_is_the_most() -> None:
    text = said(job(), on_engine(0.3))
    assert (
        "takes 1 s, and 300 ms on commlayer, nothing else changed: faster communication could win at most 70%" in text
    )


def test_latency_where_packets_are_lost() -> None:
    text = said(job(short=0.95, tcp={"sent": 100, "resent": 1}))
    assert "lost packets delay small messages, too: 550 ms of these 600 ms" in text


def test_slow_ranks_are_named() -> None:
    assert "Rank 1 computes 200 ms longer" in said(job(none=(0.2, 0.4)))
    text = said(job(none=(0.4, 0.4)))
    assert "longer than" not in text
    assert "Now one rank" not in text


def test_ranks_that_are_slow_by_turns_are_not_named() -> None:
    text = said(job(none=((0.2, 0.4) * 6, (0.4, 0.2) * 6)))
    assert "longer than" not in text
    assert "Now one rank is the slowest and now another, by 200 ms in the median step" in text


def test_a_slow_rank_that_costs_half_as_much_as_communication_comes_first() -> None:
    """And the reader is not sent to look for a slow link."""
    text = said(job(real=1.0, short=0.6, none=(0.3, 0.3, 0.3, 0.55)))
    assert "Rank 3 computes 250 ms longer than the others" in text
    assert text.index("Rank 3") < text.index("Begin there.") < text.index("Most of the 450 ms of communication")
    assert "probe" not in text
    assert "Begin there." not in said(job(real=1.0, short=0.6, none=(0.3, 0.3, 0.3, 0.5)))


def test_late_ranks_are_named() -> None:
    """They are not named if their computation is the reason, or if now this rank is late and now that one."""
    even = job(none=(0.4, 0.4))
    text = said(even, on_engine(in_flight_s=(0.3, 0.5), lags_s={1: 0.5}))
    assert "wait 200 ms per step for rank 1" in text
    assert "per step for rank" not in said(even, on_engine(in_flight_s=(0.3, 0.5), lags_s={1: 0.5, 0: 0.4}))
    assert "per step for rank" not in said(even, on_engine(in_flight_s=(0.3, 0.31), lags_s={1: 0.5}))
    assert "per step for rank" not in said(job(none=(0.2, 0.4)), on_engine(in_flight_s=(0.3, 0.5), lags_s={1: 0.5}))


def test_times_have_three_digits() -> None:
    assert [seconds(time_s) for time_s in (1.234, -0.00197, 0.0)] == ["1.23 s", "-1.97 ms", "0 us"]
