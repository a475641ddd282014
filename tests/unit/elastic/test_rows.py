"""Which members are the rows of a job."""

from __future__ import annotations

import os
import random

import pytest
from torch.distributed import HashStore

from commlayer.frontend.elastic.rows import Rows
from commlayer.transport.native import host_key


class Counted(list[int]):
    """A row that counts how often it is read."""

    reads = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        Counted.reads += 1
        return super().__iter__()

    def __contains__(self, member: object) -> bool:
        Counted.reads += 1
        return super().__contains__(member)


def rows_of(first: list[list[int]], members: list[int]) -> Rows:
    found = Rows(HashStore(), "token", 0, (host_key(), os.getpid()), 1.0)
    roster = {"rows": first, "generation": 0, "members": members, "places": {}, "timeout_s": 1.0, "backend": ""}
    found.follow({**roster, "policy": {}})
    return found


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_random_members(seed: int) -> None:
    draw = random.Random(seed)
    size, count, joined = draw.randrange(1, 5), draw.randrange(1, 6), draw.randrange(4)
    order = draw.sample(range(size * count), size * count)
    first = sorted(sorted(order[at : at + size]) for at in range(0, len(order), size))
    later = [list(range(at, at + size)) for at in range(len(order), len(order) + size * joined, size)]
    rows = [*first, *later]
    members = sorted(draw.sample(range(size * len(rows)), draw.randrange(1, size * len(rows) + 1)))
    found = rows_of(first, members)
    expected = [row for row in rows if set(row) <= set(members)]
    assert found.rows(members) == expected
    assert found.rows(dict.fromkeys(members)) == expected
    assert found.whole(members) == {mate for row in rows if set(row) & set(members) for mate in row}
    found.members = [each for row in expected for each in row]
    assert found.likes() == [list(place) for place in zip(*expected, strict=True)]


def test_the_rows_of_a_large_job_are_read_once() -> None:
    """The job asks for them several times in each step."""
    first: list[list[int]] = [Counted(range(at, at + 4)) for at in range(0, 256, 4)]
    found = rows_of(first, list(range(256)))
    Counted.reads = 0
    assert found.rows(found.members) == first
    assert Counted.reads <= 2 * len(first)
