"""A link serves one transfer at a time: in order, or the most urgent first."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.scheduler.link import Clock, Discipline, Link, Network, Transfer

Sent = tuple[float, float, int]
"""Start, seconds and class of a transfer."""


def serve(discipline: Discipline, sent: list[Sent]) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """The times when each transfer ended, and when the link was busy with it."""
    clock, ended, busy = Clock(), dict[str, float](), list[tuple[str, float, float]]()
    link = Link(clock, discipline, lambda *span: busy.append(span))

    def done(name: str) -> None:
        ended[name] = clock.now

    for index, (start, seconds, urgency) in enumerate(sent):
        name = str(index)
        transfer = Transfer(name, seconds, (urgency,), partial(done, name))
        clock.at(start, partial(link.send, transfer))
    clock.run()
    return ended, busy


def test_an_urgent_transfer_interrupts_by_class_and_waits_in_a_fifo() -> None:
    sent = [(0.0, 10.0, 5), (2.0, 1.0, 0), (2.5, 1.0, 5)]
    assert serve("class", sent)[0] == {"0": 11, "1": 3, "2": 12}
    assert serve("fifo", sent)[0] == {"0": 10, "1": 11, "2": 12}
    assert serve("class", sent)[1] == [("0", 0, 2), ("1", 2, 3), ("0", 3, 11), ("2", 11, 12)]
    assert serve("class", [(0.0, 4.0, 5), (1.0, 1.0, 5)])[1] == [("0", 0, 4), ("1", 4, 5)]  # equals wait


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 2)), max_size=12),
    st.sampled_from(["fifo", "class"]),
)
def test_the_link_is_never_idle_while_something_waits(sent: list[tuple[int, int, int]], discipline: Discipline) -> None:
    """Any order of service is busy at the same times; the most urgent class sees only itself."""
    transfers = [(float(start), float(seconds), urgency) for start, seconds, urgency in sent]
    ended, _ = serve(discipline, transfers)
    assert len(ended) == len(sent)
    free = 0.0
    for start, seconds, _ in sorted(transfers):
        free = max(free, start) + seconds
    assert max(ended.values(), default=0.0) == free
    if discipline == "class":
        alone = [transfer for transfer in transfers if transfer[2] == 0]
        apart, _ = serve("class", alone)
        assert sorted(apart.values()) == sorted(
            ended[str(i)] for i, transfer in enumerate(transfers) if transfer[2] == 0
        )


def test_bad_networks_are_refused() -> None:
    with pytest.raises(ConfigError, match="discipline='fair' is unknown; use 'fifo' or 'class'"):
        Network("fair")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"latency_s=-0\.1 is negative"):
        Network(latency_s=-0.1)
