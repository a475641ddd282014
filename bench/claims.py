"""The claims of `bench/stress.py`: each is a figure of its results and a target."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from bench.cases import BESIDE, BESIDE_SLOW, CASES, TCP_CC, URGENT, WIRES, is_gloo, wire_of
from bench.matrix import LINK_SHARE, P50, P99, TO_COMPARE, Claim, Figures, Metric, Result, Runs, best, time_text
from commlayer.loss.operation_policy import PapersPolicy
from commlayer.tools.bench.spec import BackendSpec


def claim(run: str, wire: str, figure: str, target: str, outcome: Callable[[Runs], Figures]) -> Claim:
    """A claim about a case."""
    return Claim(run, CASES[run].title, wire, figure, target, outcome)


def results_of(runs: Runs, run: str, good: Callable[[str], bool]) -> dict[str, Result]:
    """The results of a run whose backends are `good`, by name. Raises ValueError when there is none."""
    found = {result["backend"]: result for result in runs[run]["results"] if good(result["backend"])}
    if not found:
        raise ValueError(f"{run} has no such backend")
    return found


def is_bounded(wire: str) -> Callable[[str], bool]:
    """commlayer with a loss bound on this wire, but not the papers' rule."""

    def good(name: str) -> bool:
        policy = BackendSpec.parse(name).policy
        return policy.loss_bound > 0 and not isinstance(policy, PapersPolicy) and wire_of(name) == wire

    return good


def is_reliable(wire: str) -> Callable[[str], bool]:
    """commlayer without a loss bound on this wire."""
    return lambda name: not is_gloo(name) and BackendSpec.parse(name).policy.loss_bound == 0 and wire_of(name) == wire


def worst(results: Mapping[str, Result], metric: Metric) -> float:
    """The worst figure, which all results reach."""
    return (min if metric.higher_is_better else max)(metric.of(result) for result in results.values())


def right(*results: Mapping[str, Result]) -> bool:
    """Whether all elements of all results are right."""
    return all(result["wrong"] == 0 for each in results for result in each.values())


def over_gloo(run: str, wire: str, metric: Metric, at_least: float) -> Claim:
    """Ratio to the best gloo on the same wire; the worse of both treatments counts."""

    def outcome(runs: Runs) -> Figures:
        lossy = results_of(runs, run, is_bounded(wire))
        gloo = results_of(runs, run, lambda name: is_gloo(name) and wire_of(name) == wire)
        figures = {name: metric.of(result) for name, result in gloo.items()}
        name, mine = best(figures, metric), worst(lossy, metric)
        ratio = metric.ratio(mine, figures[name])
        return Figures(
            metric.text(mine), f"{metric.text(figures[name])} ({name})", ratio, ratio >= at_least and right(lossy)
        )

    return claim(run, wire, f"{metric.name}, bounded", f"≥ {at_least:g}x the best gloo", outcome)


def over_reliable(run: str, wire: str, at_most: float) -> Claim:
    """Median with a loss bound over the median of reliable mode on the same wire without loss."""

    def outcome(runs: Runs) -> Figures:
        lossy, reliable = results_of(runs, run, is_bounded(wire)), results_of(runs, "clean", is_reliable(wire))
        mine, clean = worst(lossy, P50), worst(reliable, P50)
        ratio = mine / clean
        text = f"{P50.text(clean)} (reliable, no loss)"
        return Figures(P50.text(mine), text, ratio, ratio <= at_most and right(lossy, reliable))

    return claim(run, wire, "p50, bounded", f"≤ {at_most:g}x without loss", outcome)


def tail(run: str, wire: str, at_most: float) -> Claim:
    """p99 with a loss bound over its own median; the worse of both treatments counts."""

    def outcome(runs: Runs) -> Figures:
        lossy = results_of(runs, run, is_bounded(wire))
        name = max(lossy, key=lambda each: P99.of(lossy[each]) / P50.of(lossy[each]))
        p50, p99 = P50.of(lossy[name]), P99.of(lossy[name])
        return Figures(P99.text(p99), f"{P50.text(p50)} (its p50)", p99 / p50, p99 / p50 <= at_most and right(lossy))

    return claim(run, wire, "p99, bounded", f"≤ {at_most:g}x p50", outcome)


def beside(run: str, idle: str, at_most: float | None, bulk: str = BESIDE) -> Claim:
    """p99 beside bulk traffic over the median on an idle network. `at_most` None: no target."""

    def outcome(runs: Runs) -> Figures:
        quiet, busy = results_of(runs, run, is_same(idle)), results_of(runs, run, is_same(idle + bulk))
        p50, p99 = worst(quiet, P50), worst(busy, P99)
        reached = (at_most is None or p99 / p50 <= at_most) and right(quiet, busy)
        return Figures(P99.text(p99), f"{P50.text(p50)} (its p50, idle)", p99 / p50, reached)

    target = TO_COMPARE if at_most is None else f"≤ {at_most:g}x idle"
    return claim(run, WIRES[0], f"p99, {idle.partition(':')[0]}", target, outcome)


def is_same(name: str) -> Callable[[str], bool]:
    """Names that mean the same backend."""
    return lambda other: BackendSpec.parse(name) == BackendSpec.parse(other)


def link_share(run: str, at_least: float) -> Claim:
    """Share of the summed rate of the NICs, beside the best gloo."""

    def outcome(runs: Runs) -> Figures:
        reliable, gloo = results_of(runs, run, is_reliable(WIRES[0])), results_of(runs, run, is_gloo)
        figures = {name: LINK_SHARE.of(result) for name, result in gloo.items()}
        name, mine = best(figures, LINK_SHARE), worst(reliable, LINK_SHARE)
        other = f"{LINK_SHARE.text(figures[name])} ({name})"
        return Figures(LINK_SHARE.text(mine), other, mine / figures[name], mine >= at_least and right(reliable))

    return claim(run, WIRES[0], "busbw", f"≥ {at_least:.0%} of all NICs", outcome)


DEATH_WINDOW_S = 3.0


def death(run: str, at_most_ms: float | None) -> Claim:
    """Longest operation after a NIC has died, minus the median before. `at_most_ms` None: no target, for gloo."""

    def outcome(runs: Runs) -> Figures:
        if "failed" in runs[run]:
            return Figures("failed", "", None, at_most_ms is None)
        [result] = runs[run]["results"]
        died_s = next(event["at_s"] for event in runs[run]["events"] if "link_down" in event["event"])
        [began_s], [times_us] = result["began_s"], result["iterations_us"]
        before = [us for at_s, us in zip(began_s, times_us, strict=True) if at_s + us / 1e6 < died_s]
        after = list(zip(began_s, times_us, strict=True))[len(before) :]
        met = [us for at_s, us in after if at_s < died_s + DEATH_WINDOW_S]
        if not before or not met:
            raise ValueError(f"{run}: the NIC died before or after the measurement")
        usual, longest = statistics.median(before), max(met)
        cost_ms = (longest - usual) / 1e3
        reached = at_most_ms is None or (cost_ms < at_most_ms and right({"": result}))
        return Figures(f"{cost_ms:.0f} ms", f"{time_text(longest)} after {time_text(usual)}", None, reached)

    name = "commlayer" if at_most_ms is not None else "gloo"
    target = TO_COMPARE if at_most_ms is None else f"< {at_most_ms:g} ms more, no error"
    return claim(run, WIRES[0], f"longest, {name}", target, outcome)


CLAIMS = (
    *(over_reliable("clean", wire, 1.02) for wire in WIRES),
    *(over_reliable("loss1", wire, 1.08) for wire in WIRES),
    *(tail("loss1", wire, 1.15) for wire in WIRES),
    *(over_gloo("loss1", wire, P50, 2) for wire in WIRES),
    *(over_gloo(run, wire, P99, 3) for run in ("burst1", "uneven3", "incast") for wire in WIRES),
    beside("priority", URGENT, 1.5),
    beside("priority-marked", URGENT, 1.5),
    *(beside(run, URGENT, None, BESIDE_SLOW) for run in ("priority-50", "priority-50-marked")),
    *(beside("priority", f"gloo/{tcp_cc}", None) for tcp_cc in TCP_CC),
    *(link_share(run, 0.95) for run in ("nics-100-100", "nics-150-50", "nics-4x50")),
    death("nic-dies", 200),
    death("nic-dies-gloo", None),
)
