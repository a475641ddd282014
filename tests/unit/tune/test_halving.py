"""Successive halving: few long trials, the default among them, and a choice beyond the spread."""

import random
import sys

import pytest

from commlayer.tools.headroom.timing import Timing
from commlayer.tools.job.trial import JobFailedError
from commlayer.tools.tune.arm import Arm
from commlayer.tools.tune.halving import Tried, candidates, family, prediction_error, search

CODECS = ("none", "bf16", "int8", "int4-int8", "int4")
STEPS = 9


class Job:
    """A job whose steps take the seconds of its arm, with noise."""

    def __init__(self, seconds: dict[Arm, float], noise: float = 0.01) -> None:
        self._seconds, self._noise = seconds, noise
        self._random = random.Random(1)
        self.trials: list[tuple[Arm, int]] = []

    def __call__(self, arm: Arm, steps: int) -> Timing:
        self.trials.append((arm, steps))
        if arm not in self._seconds:
            raise JobFailedError(f"{arm}: the job ended with status 1\nmore")
        mean_s = self._seconds[arm]
        return Timing(tuple(mean_s * self._random.gauss(1, self._noise) for _ in range(steps)))


ARMS = [Arm(), *(Arm(codec=codec, overlap=True) for codec in CODECS)]
TIMES = dict(zip(ARMS, (1.0, 0.8, 0.7, 0.5, 0.6, 0.65), strict=True))
PREDICTED = [(arm, TIMES[arm]) for arm in sorted(ARMS, key=lambda arm: (not arm.is_default, TIMES[arm]))]


def test_the_fastest_arm_is_chosen_with_its_gain() -> None:
    job = Job(TIMES)
    told: list[Tried] = []
    outcome = search(PREDICTED, job, STEPS, tell=told.append)
    assert outcome.chosen.arm == Arm(codec="int8", overlap=True)
    assert outcome.gain == pytest.approx(0.5, abs=0.02)
    assert outcome.gain_interval[0] < outcome.gain < outcome.gain_interval[1]
    assert outcome.default.timing is not None
    assert len(outcome.default.timing.steps_s) == STEPS
    assert len(told) == len(job.trials)


def test_good_arms_first_end_the_others_after_a_third_of_the_steps() -> None:
    job = Job(TIMES)
    search(PREDICTED, job, STEPS)
    long = [arm for arm, steps in job.trials if steps == STEPS]
    assert long[:2] == [Arm(), Arm(codec="int8", overlap=True)]
    assert len(long) <= 4
    assert {steps for _, steps in job.trials} == {3, STEPS}


def test_the_default_stays_unless_another_arm_is_better_beyond_the_spread() -> None:
    for noise, seconds in ((0.1, 0.99), (0.01, 1.2)):
        job = Job({Arm(): 1.0, Arm(overlap=True): seconds}, noise)
        outcome = search([(Arm(), 1.0), (Arm(overlap=True), 0.5)], job, STEPS)
        assert outcome.chosen is outcome.default
        assert outcome.gain == 0.0
    assert job.trials.count((Arm(), STEPS)) == 1  # never pruned


def test_of_arms_that_are_about_as_fast_the_mildest_is_chosen() -> None:
    job = Job(
        {Arm(): 1.0, Arm(codec="int4"): 0.495, Arm(codec="bf16"): 0.5, Arm(codec="none", overlap=True): 0.6}, 1e-4
    )
    arms = [(Arm(), 1.0), (Arm(codec="bf16"), 0.5), (Arm(codec="int4"), 0.5), (Arm(overlap=True), 0.5)]
    assert search(arms, job, STEPS).chosen.arm == Arm(codec="bf16")


class Script:
    """A job whose trials take the given steps, one after another; a repeated trial the last ones."""

    def __init__(self, **steps_s: tuple[float, ...]) -> None:
        self.steps_s = {
            Arm() if codec == "default" else Arm(codec=codec): times_s for codec, times_s in steps_s.items()
        }
        self.trials: list[tuple[Arm, int]] = []

    def __call__(self, arm: Arm, steps: int) -> Timing:
        self.trials.append((arm, steps))
        again = self.trials.count((arm, steps)) > 1
        found = self.steps_s[arm]
        return Timing(tuple([min(found)] * steps if again else found[:steps]))


def test_one_long_step_does_not_veto_a_gain() -> None:
    """Six steps, one of which took 2.54 s for want of a core: both make their steps again."""
    job = Script(default=(1.28, 1.29, 1.27, 1.28, 1.28, 1.28), bf16=(0.43, 0.43, 2.54, 0.44, 0.43, 0.43))
    outcome = search([(Arm(), 1.28), (Arm(codec="bf16"), 0.5)], job, 6)
    assert outcome.chosen.arm == Arm(codec="bf16")
    assert outcome.gain == pytest.approx(0.66, abs=0.01)
    assert job.trials.count((Arm(), 6)) == job.trials.count((Arm(codec="bf16"), 6)) == 2
    assert outcome.chosen.timing is not None
    assert len(outcome.chosen.timing.steps_s) == 12


def test_a_long_step_of_a_short_trial_does_not_prune_its_arm() -> None:
    job = Script(default=(1.28,) * 6, int8=(0.6,) * 6, bf16=(2.54, 0.43, 0.43, 0.43, 0.43, 0.43))
    search([(Arm(), 1.28), (Arm(codec="int8"), 0.5), (Arm(codec="bf16"), 0.5)], job, 6)
    assert (Arm(codec="bf16"), 6) in job.trials


def test_the_next_finalist_is_tested_where_the_best_median_is_not_sure() -> None:
    wild = (0.3, 2.0, 0.3, 2.0, 0.3, 2.0, 0.3, 2.0, 0.3)
    steps_s = {Arm(): (1.0,) * 9, Arm("int8"): (0.5,) * 9, Arm("bf16"): wild}
    arms = [(Arm(), 1.0), (Arm("int8"), 0.3), (Arm("bf16"), 0.5)]
    outcome = search(arms, lambda arm, steps: Timing(steps_s[arm][:steps]), 9)
    medians = {trial.arm.codec: trial.timing.median_s for trial in outcome.tried[1:] if trial.timing}
    assert medians["bf16"] < medians["int8"]
    assert outcome.chosen.arm == Arm(codec="int8")


def test_predictions_have_an_error() -> None:
    tried = [Tried(Arm(), 1.0, Timing((1.0,))), Tried(Arm("bf16"), 0.268, Timing((0.493,))), Tried(Arm("int8"), 0.5)]
    assert [trial.prediction_error for trial in tried] == [None, pytest.approx(-0.456, abs=0.001), None]
    assert prediction_error(tried) == tried[1].prediction_error
    assert prediction_error(tried[:1]) is None


def test_known_steps_are_not_made_again() -> None:
    job = Job(TIMES)
    search(PREDICTED, job, STEPS, known={Arm(): Timing((1.0, 1.01))})
    assert [steps for arm, steps in job.trials if arm.is_default] == [STEPS]


def test_an_arm_that_fails_is_left_out_and_a_default_that_fails_ends_the_search() -> None:
    broken = Arm(codec="int4", ports=4)
    outcome = search([(Arm(), 1.0), (broken, 0.1), (Arm(codec="int8", overlap=True), 0.5)], Job(TIMES), STEPS)
    assert outcome.chosen.arm == Arm(codec="int8", overlap=True)
    failed = outcome.tried[1]
    assert (failed.timing, failed.rungs) == (None, 0)
    assert failed.fault.startswith("codec int4; 4 sockets per NIC: the job ended with status 1")
    with pytest.raises(JobFailedError):
        search([(Arm(), 1.0)], Job({}), STEPS)


def test_all_hosts_decide_alike() -> None:
    outcomes = [search(PREDICTED, Job(TIMES), STEPS) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def test_candidates_are_the_best_of_families_and_details_of_the_best() -> None:
    arms = [Arm(codec, bucket_mb=size) for codec in CODECS for size in (0.0, 1.0, 2.0)]
    predicted = [(arm, CODECS[::-1].index(arm.codec) + arm.bucket_mb / 10) for arm in arms]
    chosen = [arm for arm, _ in candidates([(Arm(), 9.0), *predicted[1:]], 6)]
    assert chosen[0] == Arm()
    assert [arm.codec for arm in chosen[1:5]] == ["int4", "int4-int8", "int8", "bf16"]
    assert {family(arm) for arm in chosen[5:]} == {family(Arm("int4"))}
    assert len(set(chosen)) == 7


def test_of_near_predictions_the_milder_arm_is_tried() -> None:
    arms = [Arm("int4", 0.05), Arm("int4"), Arm("int8", 0.05), Arm("int8", bucket_mb=1.0), Arm("int8"), Arm("bf16")]
    predicted = list(zip([Arm(), *arms], (2.0, 0.98, 0.99, 0.995, 0.995, 1.0, 1.2), strict=True))
    assert [arm for arm, _ in candidates(predicted, 3)] == [Arm(), Arm("int8"), Arm("int4"), Arm("int8", bucket_mb=1.0)]


def test_changes_of_the_numerics_that_win_nothing_are_not_tried() -> None:
    arms = [Arm("int8", 0.05), Arm("int8"), Arm("none", overlap=True), Arm("int8", overlap=True)]
    predicted = list(zip([Arm(), *arms], (2.0, 1.0, 1.0, 0.8, 0.8), strict=True))
    assert [arm for arm, _ in candidates(predicted, 4)] == [Arm(), Arm("none", overlap=True), Arm("int8")]
    lossy = list(zip([Arm(), *arms], (2.0, 0.9, 1.0, 0.8, 0.7), strict=True))
    assert {arm for arm, _ in candidates(lossy, 4)} == {Arm(), *arms}


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"needs optuna: pip install optuna$"):
        search(PREDICTED, Job(TIMES), STEPS)
