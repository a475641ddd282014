"""`reasons`: one sentence with its numbers for each setting that a search has chosen."""

from __future__ import annotations

import dataclasses

from ..headroom.verdict import seconds
from .arm import KEEPS_ERRORS, Arm
from .halving import Outcome, Tried, prediction_error
from .model import Model


def reasons(outcome: Outcome, model: Model) -> dict[str, str]:
    """The reasons by the name of the setting. "predicted" are numbers of the model, all others are measured."""
    arm = outcome.chosen.arm
    found: dict[str, str] = {}
    if arm.replaces_gloo:
        found["instead_of"] = _of_engine(outcome)
    if arm.codec != "none":
        kept = " and kept for the next step" if arm.codec in KEEPS_ERRORS else ""
        share = model.share(arm.codec, partial=arm.loss_bound > 0)
        found["codec"] = (
            f"{arm.codec} sends {share:.0%} of the bytes, and gradients are rounded{kept}: "
            f"{_beside(outcome, model, dataclasses.replace(arm, codec='none'), 'float32')}."
        )
    if arm.loss_bound:
        found["loss_bound"] = (
            f"{model.loss:.1%} of the packets are lost, and up to {arm.loss_bound:.0%} of a message need not be sent "
            f"again: {_beside(outcome, model, dataclasses.replace(arm, loss_bound=0.0), 'nothing lost')}."
        )
    if arm.overlap:
        plain = dataclasses.replace(arm, overlap=False, staleness=0)
        stale = " and each step uses the gradients of the step before" if arm.staleness else ", and results stay exact"
        found["overlap"] = (
            f"gradients travel during the next forward pass{stale}: {_beside(outcome, model, plain, 'no overlap')}."
        )
    if arm.bucket_mb:
        as_is = dataclasses.replace(arm, bucket_mb=0.0)
        found["bucket_mb"] = (
            f"{model.bucket_count(arm)} buckets of a step instead of {model.bucket_count(as_is)}: "
            f"{_beside(outcome, model, as_is, 'buckets as they were')}."
        )
    if arm.ports > 1:
        found["ports"] = (
            f"{arm.ports} sockets per interface, for fabrics that choose links by port: "
            f"{_beside(outcome, model, dataclasses.replace(arm, ports=1), 'one')}."
        )
    return found


def summary(outcome: Outcome) -> str:
    """The result in one sentence."""
    default, chosen = outcome.default.timing, outcome.chosen.timing
    if default is None or chosen is None or outcome.chosen is outcome.default:
        best = min((tried for tried in outcome.tried[1:] if tried.timing), key=_median_s, default=None)
        if best is None or default is None:
            return "The job stays as it is: no other setting ran."
        return (
            f"The job stays as it is, at {seconds(default.median_s)} per step: the best other setting ({best.arm}) "
            f"takes {seconds(_median_s(best))}, which is not less beyond the spread of the steps."
        )
    low, high = outcome.gain_interval
    return (
        f"A step takes {seconds(chosen.median_s)} instead of {seconds(default.median_s)}, {outcome.gain:.0%} less "
        f"(95 % interval: {low:.0%} to {high:.0%}), with {outcome.chosen.arm}."
    )


def _median_s(tried: Tried) -> float:
    return tried.timing.median_s if tried.timing is not None else float("inf")


def _of_engine(outcome: Outcome) -> str:
    alone = _measured(outcome, Arm(replaces_gloo=True))
    default = outcome.default.timing
    if alone is None or default is None:
        return "the job's groups are commlayer's instead of gloo's, which the other settings need."
    return (
        f"commlayer in gloo's place, without another change: {seconds(alone)} per step, {seconds(default.median_s)} "
        "with gloo."
    )


def _beside(outcome: Outcome, model: Model, other: Arm, name: str) -> str:
    """The step with the chosen arm beside that with another: measured if both were, otherwise predicted."""
    chosen, measured = outcome.chosen, _measured(outcome, other)
    if measured is not None and chosen.timing is not None:
        return f"{seconds(chosen.timing.median_s)} per step, {seconds(measured)} with {name}"
    own, error = seconds(chosen.predicted_s), prediction_error(outcome.tried)
    known = f" (a prediction was {told_error(error)} here)" if error is not None else ""
    return f"{own} per step predicted, {seconds(model.seconds(other))} with {name}{known}"


def told_error(error: float) -> str:
    """An error of a prediction (`Tried.prediction_error`) in words."""
    return f"{abs(error):.0%} too {'long' if error > 0 else 'short'}"


def _measured(outcome: Outcome, arm: Arm) -> float | None:
    return next(
        (tried.timing.median_s for tried in outcome.tried if tried.arm == arm and tried.timing is not None), None
    )
