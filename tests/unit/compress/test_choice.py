"""`Choice` on a simulated network: a rank's measurements in, codecs out."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from commlayer.compress.choice import FIRST, PERIOD, TRIAL, TRIAL_SHARE, Choice
from commlayer.compress.content import Candidate, Content, load_of
from commlayer.compress.link import DISTINCT

LOW_RANK = "powersgd:4"
EXACT_STEPS = 8
CANDIDATES = [
    Candidate("none", 8.0, 0.0),
    Candidate("bf16", 4.0, 0.3e-9),
    Candidate("int8", 2.06, 0.3e-9),
    Candidate("int4-int8", 1.54, 0.6e-9),
    Candidate("int4", 1.02, 0.8e-9, keeps_errors=True),
    Candidate(LOW_RANK, 4.0, 4e-9, keeps_errors=True, steps=1.4, begins=EXACT_STEPS),
    Candidate("sign", 0.28, 0.8e-9, keeps_errors=True, steps=1.4, begins=EXACT_STEPS),
]
BY_NAME = {candidate.codec: candidate for candidate in CANDIDATES}
CONTENTS = [
    Content(400_000, 369_000, 31_000, exact=3_300, left=8_400, right=8_400),
    Content(400_000, 369_000, 31_000, exact=3_300, left=8_400, right=8_400),
    Content(250_000, 231_000, 19_000, exact=2_200, left=5_200, right=5_200),
]
"""The content of the GPT of docs/compression.md, in 3 buckets."""
VECTORS = [Content(content.values, content.coarse, content.fine, exact=content.values) for content in CONTENTS]
"""The same without a matrix that is worth factors."""
STARTS_S = [0.015, 0.025, 0.035]
"""The times when the backward pass has made each bucket."""
COMPUTING_S = 0.039
SHARE = 0.75


class Job:
    """Steps of a training in simulated time."""

    def __init__(self, *, allow_state: bool = False, noise: float = 0.0, ranks: int = 1) -> None:
        self.choices = [Choice(CANDIDATES, SHARE, allow_state=allow_state) for _ in range(ranks)]
        self.random, self.noise = random.Random(1), noise
        self.now_s, self.step = 0.0, 0
        self.rate, self.latency_s = 12.5e6, 0.0
        self.contents = CONTENTS
        self.low_rank_s = 0.0
        """What the operations of factors take beside all that their candidate says."""

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
            codecs = [[choice.codec(i) for i in range(len(self.contents))] for choice in self.choices]
            assert all(codec == codecs[0] for codec in codecs)
            spans = self.spans(codecs[0])
            for choice in self.choices:
                for i, times in enumerate(spans):
                    slip_s = 0.0001 * self.random.random()
                    now = [(self.now_s + start_s, self.now_s + end_s + slip_s) for start_s, end_s in times]
                    choice.note(i, self.contents[i], now)
            length_s = COMPUTING_S + max(spans[-1][-1][1] - STARTS_S[-1], 0.0)
            self.now_s += length_s
            self.step += 1
        return length_s

    def spans(self, codecs: Sequence[str]) -> list[list[tuple[float, float]]]:
        """(start, end) of the operations of each bucket."""
        finish_s, spans = 0.0, []
        triples = list(zip(codecs, STARTS_S, self.contents, strict=False))
        for codec, start_s, content in triples:
            load = load_of(BY_NAME[codec], content, BY_NAME["bf16"].bytes_per_value)
            finish_s = max(finish_s, start_s) + load.bytes * SHARE / self.rate * self.some() + load.coding_s
            spans.append([(start_s, finish_s)])
        finish_s += self.latency_s * self.some()
        spans[-1][-1] = spans[-1][-1][0], finish_s
        for i, (codec, _, content) in enumerate(triples):
            load = load_of(BY_NAME[codec], content, BY_NAME["bf16"].bytes_per_value)
            if load.late_bytes:
                begin_s = finish_s + load.late_coding_s
                finish_s = begin_s + load.late_bytes * SHARE / self.rate * self.some() + self.low_rank_s / 3
                spans[i].append((begin_s, finish_s))
        spans[-1].append((finish_s, finish_s))
        return spans

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
        (25e6, True, "int4"),
        (12.5e6, True, LOW_RANK),
        (2.5e6, True, LOW_RANK),
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
    order = [candidate.codec for candidate in CANDIDATES]
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
    job.contents = CONTENTS[:2]
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


def test_codecs_restored_on_some_ranks_begin_anew_on_all() -> None:
    """A rank that is new in the job has no state, and ranks with other codecs would not understand each other."""
    job, other = Job(), Job()
    job.run(PERIOD * 2)
    other.contents = CONTENTS[:2]
    other.run(PERIOD * 2)
    saved, of_other = job.choice.state_dict(), other.choice.state_dict()
    for states in ([saved, None], [None, saved, saved], [saved, of_other]):
        choices = [Choice(CANDIDATES, SHARE, allow_state=False) for _ in states]
        for choice, state in zip(choices, states, strict=True):
            if state is not None:
                choice.load_state_dict(state)
        begin_together(choices)
        assert [[choice.codec(i) for i in range(3)] for choice in choices] == [["bf16"] * 3] * len(choices)


def begin_together(choices: list[Choice]) -> None:
    """The first step of these ranks, each in a thread."""
    offers: list[Sequence[float]] = []
    meet = threading.Barrier(len(choices), timeout=30)

    def agree(own: Sequence[float]) -> Sequence[float]:
        offers.append(own)
        meet.wait()
        return [max(column) for column in zip(*offers, strict=True)]

    with ThreadPoolExecutor(len(choices)) as ranks:
        list(ranks.map(lambda choice: choice.begin_step(100, 0.0, agree), choices))


def test_checkpoint_with_codecs_that_are_not_allowed_now_begins_anew() -> None:
    job, restored = Job(allow_state=True), Job()
    job.run(PERIOD * 2)
    assert LOW_RANK in job.choice.codecs
    restored.choice.load_state_dict(job.choice.state_dict())
    assert restored.choice.codec(0) == "bf16"
    restored.run(PERIOD * 2)
    assert not {"int4", LOW_RANK, "sign"}.intersection(restored.choice.codecs)


def test_codecs_that_need_more_steps_begin_after_the_exact_ones() -> None:
    job = Job(allow_state=True)
    job.rate = 2.5e6
    job.run(FIRST + 1)
    assert set(job.choice.codecs) == {"int4"}
    job.run(EXACT_STEPS - FIRST - 1)
    assert set(job.choice.codecs) == {"int4"}
    assert f"from step {EXACT_STEPS} on" in job.choice.explain()
    job.run(1)
    assert job.step - 1 == EXACT_STEPS
    assert set(job.choice.codecs) == {LOW_RANK}


@pytest.mark.parametrize(("has_sign", "last"), [(True, "sign"), (False, "int4")])
def test_without_matrices_another_codec_is_chosen(has_sign: bool, last: str) -> None:
    job = Job(allow_state=True)
    job.contents, job.rate = VECTORS, 2.5e6
    candidates = CANDIDATES if has_sign else CANDIDATES[:-1]
    unavailable = {} if has_sign else {"sign": "no optimizer"}
    job.choices = [Choice(candidates, SHARE, allow_state=True, unavailable=unavailable)]
    job.run(PERIOD * 3)
    assert job.choice.codecs[-1] == last
    assert has_sign == ("sign              not chosen from: no optimizer" not in job.choice.explain())


def test_more_steps_count_as_longer_ones() -> None:
    """At 200 Mbit/s factors shorten the step of `int4`, but by less than a training with them takes longer."""
    job = Job(allow_state=True)
    job.rate = 25e6
    job.run(PERIOD * 3)
    predicted = job.choice.decisions[-1].predicted
    assert predicted["int4"] / 1.4 < predicted[LOW_RANK] < 0.9 * predicted["int4"]
    assert job.choice.codecs[-1] == "int4"


@pytest.mark.parametrize("latency_s", [0.0, 0.03])
def test_factors_are_given_up_when_the_link_has_become_fast(latency_s: float) -> None:
    """With factors nearly all of the busy time is latency: the rate must be told from it."""
    job = Job(allow_state=True, noise=0.05)
    job.rate, job.latency_s = 2.5e6, latency_s
    job.run(PERIOD * 3)
    assert set(job.choice.codecs) == {LOW_RANK}
    job.rate = 125e6
    job.run(PERIOD * 4)
    assert LOW_RANK not in job.choice.codecs
    job.rate = 2.5e6
    job.run(PERIOD * 4)
    assert set(job.choice.codecs) == {LOW_RANK}


@pytest.mark.parametrize("rate", [2.5e6, 12.5e6, 16e6, 20e6, 25e6])
def test_noise_seldom_changes_codecs_with_state(rate: float) -> None:
    job = Job(allow_state=True, noise=0.1)
    job.rate, job.latency_s = rate, 0.025
    job.run(PERIOD * 20)
    decisions = [decision.codecs for decision in job.choice.decisions]
    assert sum(a != b for a, b in itertools.pairwise(decisions[2:])) <= 2


def test_the_table_has_a_row_for_each_codec() -> None:
    job = Job(allow_state=True)
    job.rate = 2.5e6
    job.run(PERIOD * 2)
    table = job.choice.explain()
    sent = SHARE * sum(4 * (content.exact + content.left + content.right) for content in CONTENTS)
    assert f"{LOW_RANK:16}{sent:12.0f}" in table
    assert "counts 1.4 times: more steps to the same loss" in table
    assert all(f"\n{candidate.codec} " in table for candidate in CANDIDATES)
    plain = Job()
    plain.run(PERIOD)
    assert "int4              not chosen from: needs Policy(allow_state=True)" in plain.choice.explain()


@pytest.mark.parametrize("low_rank_s", [0.03, 0.06, 0.1])
@pytest.mark.parametrize("latency_s", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(2))
def test_a_link_that_became_fast_is_found_by_a_trial(low_rank_s: float, latency_s: float, seed: int) -> None:
    """1,000, 20 and 1,000 Mbit/s again, where factors take time of their own: it looks like a slow link."""
    job = Job(allow_state=True, noise=0.05)
    job.random.seed(seed)
    job.rate, job.latency_s = 125e6, latency_s
    fast_s = job.run(PERIOD * 3)
    job.rate = 2.5e6
    job.run(PERIOD * 6)
    assert job.choice.codecs[-1] == LOW_RANK
    job.rate, job.low_rank_s = 125e6, low_rank_s
    job.run(PERIOD * 8)
    assert min(job.run(1) for _ in range(TRIAL + 1)) < 1.1 * fast_s


@pytest.mark.parametrize("rate", [1.25e6, 12.5e6, 125e6])
def test_trials_cost_their_share(rate: float) -> None:
    """Of a link that stays as it is: at most TRIAL_SHARE of the time, and less and less."""
    job = Job(allow_state=True)
    job.rate, job.latency_s = rate, 0.005
    job.run(PERIOD * 4)
    begun_s, best_s, spent = job.now_s, job.run(1), []
    for _ in range(PERIOD * 60):
        length_s = job.run(1)
        if job.choice._trial:
            spent.append(length_s - best_s)
        else:
            best_s = min(best_s, length_s)
    assert sum(spent) <= TRIAL_SHARE * (job.now_s - begun_s)
    assert len(spent) <= 60 * TRIAL / 4  # patience
    assert sum(spent[len(spent) // 2 :]) <= TRIAL_SHARE / 2 * (job.now_s - begun_s)


def test_a_trial_has_distinctly_more_bytes_and_the_table_tells() -> None:
    job = Job(allow_state=True)
    job.rate, job.latency_s = 2.5e6, 0.01
    for _ in range(PERIOD * 20):
        job.run(1)
        if job.choice._trial:
            break
    choice = job.choice
    assert choice._trial != choice.codecs
    assert choice._bytes(choice._trial) >= DISTINCT * choice._bytes(choice.codecs)
    assert f"trial of {TRIAL} steps: " in choice.explain()
    assert choice.state_dict()["codecs"] == choice.codecs
    job.run(TRIAL)
    assert not choice._trial
