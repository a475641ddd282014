"""Which end bounds which start: by collective, root, sizes and messages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlayer.tools.trace.align import solve
from commlayer.tools.trace.order import RESOLUTION_NS, bounds, message_pairs
from commlayer.tools.trace.records import read_all

from .files import MS, collective, flight, message, operation, profile, write


def found(folder: Path, *entries: list[dict[str, Any]], size: int = 2, **contents: Any) -> Any:
    """The bounds in ms between ranks that have these entries; rounded, without the resolution."""
    records = {f"flight_{rank}": flight(rank, own, size=size) for rank, own in enumerate(entries)}
    paths = write(folder, **records, **contents)
    return np.round((bounds(read_all(paths, pytest.fail)) - RESOLUTION_NS) / MS, 3)


def of_two(folder: Path, **given: Any) -> tuple[float, float]:
    """The bounds between rank 0 (0 to 5 ms) and rank 1 (1 to 7 ms): the most by which 1 is ahead of 0, and 0 of 1."""
    matrix = found(folder, [collective(1, 0, 5, **given)], [collective(1, 1, 7, **given)])
    return float(matrix[0, 1]), float(matrix[1, 0])


INF = float("inf")


@pytest.mark.parametrize(
    ("name", "root", "expected"),
    [
        ("all_reduce", None, (4, 7)),
        ("all_gather_v", None, (4, 7)),
        ("reduce_scatter", None, (4, 7)),
        ("all_to_all", None, (4, 7)),
        ("broadcast", 0, (INF, 7)),
        ("scatter", 1, (4, INF)),
        ("reduce", 0, (4, INF)),
        ("gather", 1, (INF, 7)),
        ("unheard_of", None, (INF, INF)),
    ],
)
def test_bounds_by_collective(tmp_path: Path, name: str, root: int | None, expected: tuple[float, float]) -> None:
    assert of_two(tmp_path, profiling_name=f"gloo:{name}", root=root) == expected


def test_a_barrier_has_no_data(tmp_path: Path) -> None:
    empty = {"input_sizes": [], "output_sizes": [], "bytes": 0, "input_dtypes": [], "output_dtypes": []}
    assert of_two(tmp_path, profiling_name="gloo:barrier", **empty) == (4, 7)


@pytest.mark.parametrize(
    "given",
    [
        {"input_sizes": [[0]], "output_sizes": [[0]], "bytes": 0},
        {"profiling_name": "gloo:all_to_all", "input_sizes": [[8], [0]], "output_sizes": [[4], [4]]},
        {"profiling_name": "gloo:all_to_all", "input_sizes": [[8]], "output_sizes": [[6]]},
        {"profiling_name": "gloo:reduce_scatter_v"},
        {"time_discovered_completed_ns": None},
    ],
    ids=["empty", "an empty part", "uneven parts", "unknown part", "in flight"],
)
def test_ranks_that_may_not_need_each_other_have_no_bounds(tmp_path: Path, given: dict[str, Any]) -> None:
    assert of_two(tmp_path, **given) == (INF, INF)


def test_a_rank_that_gives_nothing_bounds_nothing(tmp_path: Path) -> None:
    matrix = found(tmp_path, [collective(1, 0, 5, bytes=0)], [collective(1, 1, 7)])
    assert (matrix[0, 1], matrix[1, 0]) == (4, INF)


def test_ranks_that_call_different_collectives_bound_nothing(tmp_path: Path) -> None:
    matrix = found(tmp_path, [collective(1, 0, 5)], [collective(1, 1, 7, profiling_name="gloo:barrier")])
    assert (matrix[0, 1], matrix[1, 0]) == (INF, INF)


def test_a_group_that_was_made_again_bounds_nothing_with_equal_numbers(tmp_path: Path) -> None:
    """Number 1 is there twice on rank 0: which one rank 1 has is not known."""
    matrix = found(tmp_path, [collective(1, 0, 5), collective(1, 50, 51)], [collective(1, 1, 7)])
    assert (matrix[0, 1], matrix[1, 0]) == (INF, INF)


def test_a_receive_cannot_end_before_its_send_was_submitted(tmp_path: Path) -> None:
    sends = [message("send", 1, 0, 1, peer=1, ordinal=1), message("send", 2, 10, 11, peer=1, ordinal=2)]
    matrix = found(tmp_path, sends, [message("recv", 1, 0, 14, peer=0, ordinal=2)])
    assert (matrix[0, 1], matrix[1, 0]) == (INF, 4)


@pytest.mark.parametrize(
    "received",
    [{"peer": 0, "ordinal": 3}, {"peer": 0, "ordinal": 1, "tag": 5}, {"peer": None, "ordinal": 1}],
    ids=["another number", "another tag", "from any rank"],
)
def test_other_messages_do_not_match(tmp_path: Path, received: dict[str, Any]) -> None:
    matrix = found(tmp_path, [message("send", 1, 0, 1, peer=1, ordinal=1)], [message("recv", 1, 0, 14, **received)])
    assert (matrix[0, 1], matrix[1, 0]) == (INF, INF)


def test_receives_from_any_rank_hide_which_message_the_others_took(tmp_path: Path) -> None:
    entries = [message("recv", 1, 0, 1, peer=None, ordinal=1), message("recv", 2, 2, 3, peer=0, ordinal=1)]
    paths = write(tmp_path, a=flight(0, [message("send", 1, 0, 1, peer=1, ordinal=1)]), b=flight(1, entries))
    records = read_all(paths, pytest.fail)
    assert message_pairs([call for record in records for call in record.operations]) == []


def test_two_files_of_one_rank_have_the_same_call(tmp_path: Path) -> None:
    """The profile's clock is 3 ms ahead: the call at 1 ms of the record is between 4.0 and 4.1 ms there."""
    matrix = found(tmp_path, [collective(1, 1.05, 5)], trace=profile(0, operation(1, 4, 9)))
    assert (matrix[0, 1], matrix[1, 0]) == (-2.95, 3.05)
    records = read_all(sorted(tmp_path.iterdir()), pytest.fail)
    moved = solve(bounds(records))[1]
    assert moved.offset_ns == pytest.approx(-3 * MS)
    assert moved.uncertainty_ns == pytest.approx(0.05 * MS + RESOLUTION_NS)


def test_an_older_record_without_numbers_of_messages_is_read(tmp_path: Path) -> None:
    entry = message("send", 1, 0, 1, peer=1)
    assert "ordinal" not in json.dumps(entry)
    assert found(tmp_path, [entry], [])[0, 1] == INF
