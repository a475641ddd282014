"""`Choice` on a simulated network: a rank's measurements in, codecs out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from commlayer.compress.choice import FIRST, PERIOD, Candidate, Choice

CANDIDATES = [
    Candidate("none", 8.0, 0.0),
    Candidate("bf16", 4.0, 0.3e-9),
    Candidate("int8", 2.06, 0.3e-9),
    Candidate("int4-int8", 1.54, 0.6e-9),
    Candidate("int4", 1.02, 0.8e-9, keeps_errors=True),
]
BY_NAME = {each.codec: each for each in CANDIDATES}
VALUES = [400_000, 400_000, 250_000]
STARTS_S = [0.015, 0.025, 0.035]
"""When the backward pass has made each bucket."""
COMPUTING_S = 0.039
SHARE = 0.75


class Job:
    """Steps of a training in simulated time."""

    def __init__(self, *, allow_state: bool = False, noise: float = 0.0, ranks: int = 1) -> None:
        self.choices = [Choice(CANDIDATES, SHARE, allow_state=allow_state) for _ in range(ranks)]
        self.random, self.noise = random.Random(1), noise
        self.now_s, self.step = 0.0, 0
        self.rate = 12.5e6
        self.values = VALUES

    @property
    def choice(self) -> Choice:
        return self.choices[0]

    def run(self, steps: int) -> float:
        """Runs some steps; returns the length of the last one."""
        length_s = 0.0
        for _ in range(steps):
            offered: list[Sequence[float]] = []
            for choice in self.choices:
                choice.begin_step(self.step, self.now_s, self.agree(offered))
            codecs = [[choice.codec(i) for i in range(len(self.values))] for choice in self.choices]
            assert all(each == codecs[0] for each in codecs)
            finish_s, ends = 0.0, []
            for codec, start_s, values in zip(codecs[0], STARTS_S, self.values, strict=False):
                sent_s = BY_NAME[codec].bytes_per_value * values * SHARE / self.rate * self.some()
                finish_s = max(finish_s, start_s) + sent_s + BY_NAME[codec].coding_s * values
                ends.append(finish_s)
            for choice in self.choices:
                for i, end_s in enumerate(ends):
                    slip_s = 0.0001 * self.random.random()
                    choice.note(i, self.values[i], self.now_s + STARTS_S[i], self.now_s + end_s + slip_s)
            length_s = COMPUTING_S + max(ends[-1] - STARTS_S[-1], 0.0)
            self.now_s += length_s
            self.step += 1
        return length_s

    def some(self) -> float:
        return self.random.uniform(1 - self.noise, 1 + self.noise)

    def agree(self, offered: list[Sequence[float]]) -> Callable[[Sequence[float]], Sequence[float]]:
        """Ranks run one after another here, so the largest value is known after the last: ranks get equal values."""

        def largest(own: Sequence[float]) -> Sequence[float]:
            offered.append(own)
            return offered[0]

        return largest


def test_starts_in_16_bits() -> None:
    job = Job()
    job.run(FIRST)
    assert job.choice.codec(0) == "bf16"
    assert "no decision yet" in job.choice.explain()


@pytest.mark.parametrize(
    ("rate", "allow_state", "last"),
    [
        (2e9, False, "none"),
        (1.25e8, False, "int8"),
        (12.5e6, False, "int4-int8"),
        (12.5e6, True, "int4"),
        (2.5e6, True, "int4"),
    ],
)
def test_slower_links_get_shorter_codes(rate: float, allow_state: bool, last: str) -> None:
    job = Job(allow_state=allow_state, noise=0.02)
    job.rate = rate
    job.run(PERIOD * 3)
    assert job.choice.codecs[-1] == last
    assert f"{rate * 8e-6:.0f}"[:1] in job.choice.explain()


def test_choice_is_no_slower_than_any_single_codec() -> None:
    for rate in (2.5e6, 12.5e6, 25e6, 125e6, 500e6):
        job = Job()
        job.rate = rate
        length_s = job.run(PERIOD * 3)
        for candidate in CANDIDATES[:4]:
            fixed = Job()
            fixed.rate = rate
            fixed.choices = [Choice([candidate], SHARE, allow_state=False)]
            fixed.choice._start = candidate.codec
            assert length_s <= 1.06 * fixed.run(FIRST)  # a change must save WORTH


def test_early_buckets_stay_mild_where_the_backward_pass_hides_them() -> None:
    job = Job()
    job.rate = 1e8
    job.run(PERIOD * 2)
    order = [each.codec for each in CANDIDATES]
    ranks = [order.index(codec) for codec in job.choice.codecs]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_a_change_of_the_link_is_followed() -> None:
    job = Job(noise=0.05)
    job.rate = 1e9
    job.run(PERIOD * 2)
    assert set(job.choice.codecs) <= {"none", "bf16"}
    job.rate = 5e6
    job.run(PERIOD * 2 + 2)
    assert job.choice.codecs[-1] == "int4-int8"
    job.rate = 1e9
    job.run(PERIOD * 2 + 2)
    assert set(job.choice.codecs) <= {"none", "bf16"}


def test_noise_changes_nothing() -> None:
    job = Job(noise=0.1)
    job.rate = 25e6
    job.run(PERIOD * 20)
    decisions = [decision.codecs for decision in job.choice.decisions]
    assert len(decisions) > 15
    assert sum(a != b for a, b in itertools.pairwise(decisions[1:])) <= 2


def test_ranks_with_different_clocks_decide_alike() -> None:
    job = Job(noise=0.1, ranks=3)
    job.run(PERIOD * 5)  # checks in each step that the codecs are the same
    assert job.choice.codecs


def test_new_buckets_are_measured_first() -> None:
    job = Job()
    job.run(PERIOD * 2)
    assert job.choice.codecs
    job.values = VALUES[:2]
    job.run(2)
    assert not job.choice.codecs
    assert job.choice.codec(0) == "bf16"
    job.run(PERIOD * 2)
    assert len(job.choice.codecs) == 2


def test_checkpoint_goes_on_with_its_codecs() -> None:
    job = Job()
    job.run(PERIOD * 2)
    restored = Job()
    restored.choice.load_state_dict(job.choice.state_dict())
    assert [restored.choice.codec(i) for i in range(3)] == job.choice.codecs
    restored.run(3)
    assert restored.choice.codecs == job.choice.codecs


def test_checkpoint_with_codecs_that_are_not_allowed_now_begins_anew() -> None:
    job, restored = Job(allow_state=True), Job()
    job.run(PERIOD * 2)
    assert "int4" in job.choice.codecs
    restored.choice.load_state_dict(job.choice.state_dict())
    assert restored.choice.codec(0) == "bf16"
    restored.run(PERIOD * 2)
    assert "int4" not in restored.choice.codecs
