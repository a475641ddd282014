"""An epoch has each sample once, whatever steps fail and whoever goes or comes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from commlayer.errors import ClosedError
from commlayer.frontend.elastic.sampler import Sampler


class FakeJob:
    """A rank whose steps are made by hand."""

    def __init__(self, number: int, members: list[int], row_size: int = 1) -> None:
        self.number, self.left = number, False
        self._computing, self._row_size = members, row_size
        self.begun = self.alone = 0
        self.made: Any = None

    @property
    def _rows(self) -> list[list[int]]:
        """Neighbours make a row."""
        size = self._row_size
        return [self._computing[first : first + size] for first in range(0, len(self._computing), size)]

    def _begin(self) -> None:
        self.begun += 1

    def _end(self) -> None:
        pass

    def step(self) -> bool:
        self.alone += 1
        self.made()
        return True


def sampler(job: FakeJob, samples: int, batch_size: int, *, shuffle: bool = True) -> Sampler:
    found = Sampler(job, samples, batch_size, shuffle=shuffle, seed=3, by_speed=False)
    job.made = lambda: found.advance({})
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1 << 30))
def test_each_sample_once(samples: int, batch_size: int, seed: int) -> None:
    draw = random.Random(seed)
    members = [0, 1, 2]
    ranks = {each: sampler(FakeJob(each, members), samples, batch_size) for each in members}
    for epoch in range(2):
        seen: list[int] = []
        while ranks[members[0]].epoch == epoch:
            shares = {each: ranks[each]._share() for each in members}
            batch = [index for each in members for index in shares[each]]
            assert len(batch) == min(batch_size, samples - len(seen))
            if draw.random() < 0.7:
                seen += batch
                for each in members:
                    ranks[each].advance({})
            if draw.random() < 0.2 and len(members) > 1:
                members.remove(draw.choice(members))
            if draw.random() < 0.2:
                number = max(ranks) + 1
                ranks[number] = sampler(FakeJob(number, members), samples, batch_size)
                ranks[number].load(ranks[members[0]].state())
                members.append(number)
        assert sorted(seen) == list(range(samples))
        assert samples < 20 or seen != list(range(samples))
        assert {each: ranks[each].epoch for each in members} == dict.fromkeys(members, epoch + 1)


def test_a_loader_gets_its_shares_step_by_step() -> None:
    job = FakeJob(1, [0, 1])
    own = sampler(job, 10, 4, shuffle=False)
    loader: Any = DataLoader(list(range(10)), batch_sampler=own)  # type: ignore[arg-type]
    assert len(loader) == 3
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        assert own.take(len(job._computing)) == 1.0
        if len(seen) != 2:  # the second step fails, and its batch comes again, without rank 0
            own.advance({})
        else:
            job._computing = [1]
    assert seen == [[2, 3], [6, 7], [4, 5, 6, 7], [8, 9]]
    assert (own.epoch, len(own), job.begun) == (1, 3, 4)
    job.left = True
    assert list(own) == []


def test_a_rank_without_samples_makes_the_step() -> None:
    job = FakeJob(2, [0, 1, 2])
    own = sampler(job, 8, 6)
    shares = []
    for share in own:
        shares.append(share)
        own.take(3)
        own.advance({})
    assert ([len(each) for each in shares], job.alone, own.epoch) == ([2], 1, 1)


def test_a_weight_is_the_share_of_the_batch() -> None:
    own = sampler(FakeJob(0, [0, 1, 4]), 7, 7)
    for _ in own:
        assert own.take(4) == 3 * 4 / 7  # a fourth rank listens
        with pytest.raises(ClosedError, match="rank 0: step\\(\\) without a batch"):
            own.take(4)
        own.advance({})


@pytest.mark.parametrize(("samples", "batch_size"), [(24, 12), (26, 12), (30, 2)], ids=str)
def test_the_ranks_of_a_row_have_equally_many_samples(samples: int, batch_size: int) -> None:
    """By the slowest of them; the weight of each is that of its share."""
    members = [0, 1, 2, 3]
    made = {
        each: Sampler(FakeJob(each, members, 2), samples, batch_size, shuffle=False, seed=0, by_speed=True, row_size=2)
        for each in members
    }
    counts = []
    for step in range(30 * -(-samples // batch_size)):
        shares = {each: own._share() for each, own in made.items()}
        counts.append([len(share) for share in shares.values()])
        assert counts[-1][0] == counts[-1][1]
        assert counts[-1][2] == counts[-1][3]
        first = step % -(-samples // batch_size) * batch_size
        batch = list(range(first, min(first + batch_size, samples)))
        assert [index for share in shares.values() for index in share] == batch
        for each, own in made.items():
            own._begun_s = 0.0
            assert own.weight(4) == len(shares[each]) * 4 / len(batch)
            own.advance({0: 30.0, 1: 20.0, 2: 10.0, 3: 20.0})
    assert counts[0] == ([3, 3, 3, 3] if batch_size == 12 else [1, 1, 0, 0])
    assert counts[-3] == ([4, 4, 2, 2] if batch_size == 12 else [1, 1, 0, 0])
