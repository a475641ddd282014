"""`search`: live trials by successive halving (Jamieson and Talwalkar, AISTATS 2016), with optuna's pruner.

Every arm makes a few steps, and only the best ones make many more; the default always does. Arms come in the order of
their predictions, so the first good one prunes most of the others. The default stays unless another arm is better
beyond the spread: the 95 % interval of its gain must lie above 0. All that came to the end are tested, one after
another, until one is better. Where a single step would change the verdict, both make their steps again first.

Of arms that are about as fast as the best one, the one that changes least is tested first.

Where several hosts run the search, each has the times of all ranks, and decides like the others.
"""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..headroom.timing import Timing, share_interval
from ..job.trial import TrialError
from .arm import Arm
from .space import CODECS

REDUCTION = 3
"""The best third of the arms goes on, with three times the steps."""
RUNGS = 2
ABOUT = 0.02
"""Share of a step: so much slower than the best is an arm that changes less."""
MILDER = 0.01
"""Share of a step for each change: predictions are no better than that, and a milder arm is tried first."""

Measure = Callable[[Arm, int], Timing]
"""Runs the job with an arm for some measured steps. Raises TrialError."""
Tell = Callable[["Tried"], None]


@dataclass(frozen=True)
class Tried:
    """The trials of one arm."""

    arm: Arm
    predicted_s: float
    timing: Timing | None = None
    """The timing of the longest trial; None: every trial failed."""
    rungs: int = 0
    """Trials that ended well."""
    fault: str = ""
    """The error of a trial that failed."""

    @property
    def is_finished(self) -> bool:
        """Whether it came to the last rung."""
        return self.rungs == RUNGS

    @property
    def prediction_error(self) -> float | None:
        """The predicted step less the measured one, as a share of the measured; None: there is nothing to compare."""
        if self.timing is None or self.arm.is_default:
            return None
        return self.predicted_s / self.timing.median_s - 1


@dataclass(frozen=True)
class Outcome:
    """The result of a search."""

    tried: tuple[Tried, ...]
    """The default first."""
    chosen: Tried
    gain: float = 0.0
    """Share of the default's step that the chosen arm saves."""
    gain_interval: tuple[float, float] = (0.0, 0.0)
    """95 % of it."""

    @property
    def default(self) -> Tried:
        """The trials of the job as it is."""
        return self.tried[0]


def load_optuna() -> Any:
    """The optimizer library. Raises ValueError, with the remedy, if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError("needs optuna: pip install optuna") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def search(
    arms: Sequence[tuple[Arm, float]],
    measure: Measure,
    steps: int,
    *,
    known: Mapping[Arm, Timing] | None = None,
    tell: Tell = lambda _: None,
) -> Outcome:
    """Tries arms, each with its predicted step, the default first. `steps`: measured steps of the last rung.

    `known`: arms that have made a few steps already. `tell` gets the state of an arm after each of its trials. Raises
    TrialError if the default fails, ValueError without optuna.
    """
    optuna = load_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    for number in range(len(arms)):
        study.enqueue_trial({"arm": number})
    tried = []
    for _ in arms:
        trial = study.ask()
        arm, predicted_s = arms[trial.suggest_int("arm", 0, len(arms) - 1)]

        def timed(arm: Arm, rung: int) -> Timing:
            already = (known or {}).get(arm) if rung == 0 else None
            return already or measure(arm, max(2, steps // REDUCTION ** (RUNGS - 1 - rung)))

        found = _try(trial, Tried(arm, predicted_s), timed, tell)
        if found.is_finished and found.timing is not None:
            study.tell(trial, found.timing.median_s)
        else:
            state = optuna.trial.TrialState
            study.tell(trial, state=state.FAIL if found.fault else state.PRUNED)
        tried.append(found)

    def again(tried: Tried) -> Tried:
        if tried.timing is None:
            return tried
        try:
            more = measure(tried.arm, steps)
        except TrialError:  # it has run before: the steps of then stay
            return tried
        tried = dataclasses.replace(tried, timing=Timing(tried.timing.steps_s + more.steps_s))
        tell(tried)
        return tried

    return judged(tried, again)


def _try(trial: Any, tried: Tried, timed: Measure, tell: Tell) -> Tried:
    """Runs the trials of an arm until the pruner ends them. The default is never pruned, and its errors are raised.
    `timed` takes an arm and the number of the rung."""
    for rung in range(RUNGS):
        try:
            timing = timed(tried.arm, rung)
        except TrialError as error:
            if tried.arm.is_default:
                raise
            tried = dataclasses.replace(tried, fault=str(error))
            tell(tried)
            return tried
        tried = dataclasses.replace(tried, timing=timing, rungs=rung + 1)
        tell(tried)
        # The lower middle one of few steps counts: a busy machine makes a step longer, and nothing makes it shorter.
        trial.report(statistics.median_low(timing.steps_s), step=REDUCTION**rung)
        if not tried.arm.is_default and rung + 1 < RUNGS and trial.should_prune():
            return tried
    return tried


def judged(tried: Sequence[Tried], again: Callable[[Tried], Tried]) -> Outcome:
    """Chooses among arms that came to the last rung, the default among them, which is the first. `again` returns an arm
    with the steps of another trial added to its own."""
    latest = list(tried)
    for number in _finalists(tried):
        if _one_step_decides(latest[0], latest[number]):
            latest[0], latest[number] = again(latest[0]), again(latest[number])
        low, high = _gain_interval(latest[0], latest[number])
        if low > 0:
            default, best = latest[0].timing, latest[number].timing
            assert default is not None and best is not None  # noqa: S101, PT018  # finalists have steps
            return Outcome(tuple(latest), latest[number], 1 - best.median_s / default.median_s, (low, high))
    return Outcome(tuple(latest), latest[0])


def _finalists(tried: Sequence[Tried]) -> list[int]:
    """The numbers of the arms that may be better than the default, in the order in which they are tested: of those that
    are about as fast as the best one, the mildest; then the others, the fastest first."""
    finished = [(number, trial.timing) for number, trial in enumerate(tried) if trial.is_finished]
    medians = {number: timing.median_s for number, timing in finished if timing is not None}
    near_s = (1 + ABOUT) * min(medians.values())
    if medians[0] <= near_s:  # which changes least
        return []

    def order(number: int) -> tuple[object, ...]:
        is_near = medians[number] <= near_s
        return not is_near, changes(tried[number].arm) if is_near else medians[number], number

    return sorted((number for number in medians if medians[number] < medians[0]), key=order)


def _gain_interval(default: Tried, other: Tried) -> tuple[float, float]:
    """95 % of the share of the default's step that the other saves."""
    if default.timing is None or other.timing is None:
        return 0.0, 0.0
    return share_interval(default.timing, other.timing)


def _one_step_decides(default: Tried, other: Tried) -> bool:
    """Whether the verdict would be another without the slowest or the fastest step of either."""
    if default.timing is None or other.timing is None:
        return False
    is_better = _gain_interval(default, other)[0] > 0
    one, two = (tuple(sorted(tried.timing.steps_s)) for tried in (default, other) if tried.timing is not None)
    without = [(one[1:], two), (one[:-1], two), (one, two[1:]), (one, two[:-1])]
    return any((share_interval(Timing(first), Timing(second))[0] > 0) != is_better for first, second in without)


def changes(arm: Arm) -> tuple[float, ...]:
    """How much an arm changes: the numerics first, then the number of its settings."""
    count = sum(len(entries) for entries in arm.settings.values())
    return arm.staleness, arm.loss_bound, CODECS.index(arm.codec), count


def prediction_error(tried: Sequence[Tried]) -> float | None:
    """The largest error of the predictions that a trial has tested, as a share of the measured step; None: none has."""
    return max((trial.prediction_error for trial in tried if trial.prediction_error is not None), key=abs, default=None)


def candidates(predicted: Sequence[tuple[Arm, float]], count: int) -> list[tuple[Arm, float]]:
    """The default, then the `count` arms to try, in the order of their predictions; of near ones the milder first.

    Arms of one family differ by bucket size and sockets alone. Two thirds are the best of the best families, the others
    belong to the best family, as the model knows little about such details. Changes of the numerics that are predicted
    to win nothing, as a loss bound without losses, are not tried.
    """
    default, *others = predicted
    seconds = dict(others)
    ordered = sorted((other for other in others if not _is_idle(other[0], seconds)), key=_rank)
    best: dict[tuple[object, ...], tuple[Arm, float]] = {}
    for candidate in ordered:
        best.setdefault(family(candidate[0]), candidate)
    heads = list(best.values())
    share = max(1, count - count // 3)
    chosen = heads[:share]
    rest = [arm for arm in ordered if arm not in chosen]
    chosen += sorted(rest, key=lambda trial: (family(trial[0]) != family(heads[0][0]), _rank(trial)))[
        : count - len(chosen)
    ]
    return [default, *chosen]


def _is_idle(arm: Arm, seconds: Mapping[Arm, float]) -> bool:
    """Whether the same arm without one of its changes of the numerics is predicted to be as fast."""
    without: dict[str, Any] = {"codec": "none", "loss_bound": 0.0, "staleness": 0}
    twins = [
        dataclasses.replace(arm, **{name: value}) for name, value in without.items() if getattr(arm, name) != value
    ]
    return any(seconds.get(twin, float("inf")) <= seconds[arm] for twin in twins)


def _rank(candidate: tuple[Arm, float]) -> float:
    """The predicted step, longer for an arm that changes more."""
    arm, predicted_s = candidate
    numerics = CODECS.index(arm.codec) + 2 * (arm.loss_bound > 0) + 4 * arm.staleness
    return predicted_s * (1 + MILDER * (numerics + arm.overlap + (arm.bucket_mb > 0) + (arm.ports > 1)))


def family(arm: Arm) -> tuple[object, ...]:
    """The settings of an arm that the model knows well."""
    return arm.codec, arm.loss_bound, arm.overlap, arm.staleness
