"""Groups of ranks, and what each of them receives."""

from commlayer.planner.exchange import Axis, Exchange


def test_groups() -> None:
    assert [Axis(2, 3).group(rank) for rank in (0, 4, 6, 11)] == [(0, 3), (1, 4), (6, 9), (8, 11)]
    assert Axis(4).group(6) == (4, 5, 6, 7)


def test_bytes_and_messages() -> None:
    axis = Axis(4)
    assert Exchange("all_gather", axis, 100, "forward").received_bytes == 75
    assert Exchange("all_reduce", axis, 100, "step").received_bytes == 150
    assert Exchange("send", axis, 100, "forward").received_bytes == 100
    assert Exchange("all_reduce", axis, 102, "step").received_bytes == 2 * (102 - 25)  # the rank with the least share
    assert [Exchange(kind, axis, 8, "step").messages for kind in ("all_to_all", "all_reduce", "send")] == [3, 6, 1]
