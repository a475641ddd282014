"""Bounded loss, priorities and several NICs on stressed networks, beside gloo tuned for each network.

    python -m bench.stress               everything (about 20 minutes, as root); writes docs/stress.md
    python -m bench.stress --only loss1  one case, merged into the kept results (may be repeated)
    python -m bench.stress --table       only the tables of the kept results
    python -m bench.stress --quick       few iterations, to see that it works; keeps nothing

Every run is one `commlayer bench` command, kept in bench/results/stress.json. To tune gloo, another run
before it measures every variant of gloo a few times; the fastest ones take part.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.harness.matrix import (
    LINK_SHARE,
    P50,
    P99,
    ROOT,
    TO_COMPARE,
    Claim,
    Figures,
    Matrix,
    Metric,
    Result,
    Runs,
    best,
    machines,
    measure,
    time_text,
)
from commlayer.tools.bench.papers import PapersPolicy
from commlayer.tools.bench.spec import CAST_NAMES, BackendSpec

TCP_CC = ("cubic", "bbr")
CHUNKS = (1, 4)
WIRES = ("float32", "16 bit")
"""Gradients as they are, and cast; backends are compared on the same wire. gloo casts to the better 16-bit type."""
OUR_CAST = "float16"
WARMUP = 2
"""Calls that are not counted. From the third one on, shares of the hosts follow the rates of their links."""


def wire_of(name: str) -> str:
    """The one of `WIRES` that the backend called `name` uses."""
    return WIRES[BackendSpec.parse(name).cast is not None]


def is_gloo(name: str) -> bool:
    """Whether it is one of gloo's variants."""
    return BackendSpec.parse(name).name == "gloo"


def ours(*settings: str, wires: Iterable[str] = WIRES) -> tuple[str, ...]:
    """commlayer with each of these settings, on each wire."""
    casts = ("" if wire == WIRES[0] else f":cast={OUR_CAST}" for wire in wires)
    return tuple(f"commlayer{cast}{setting}" for cast in casts for setting in settings)


def bounded(bound: float) -> tuple[str, str]:
    """commlayer with this loss bound and each treatment: of the bare all-reduce and of the hook."""
    return f":loss_bound={bound}:treatment=rescale", f":loss_bound={bound}"


def papers(bound: float) -> str:
    """The papers' rule: both halves may lose packets, and lost contributions count as 0."""
    return f":loss_bound={bound}:treatment=zero:partial_results=True"


GLOO_TUNED = tuple(
    f"gloo/{tcp_cc}{cast}{f':chunks={chunks}' if chunks > 1 else ''}"
    for cast in ("", *(f":cast={name}" for name in CAST_NAMES))
    for tcp_cc in TCP_CC
    for chunks in CHUNKS
)


@dataclass(frozen=True)
class Case:
    """One row of the matrix: a network, and the measurements on it."""

    title: str
    scenario: str
    backends: tuple[str, ...]
    arguments: str
    """Arguments of the bench."""
    rounds: int
    iters: int
    tunes_gloo: bool = False
    """Whether to add gloo's fastest variants of each congestion control, with and without compression."""
    environ: tuple[tuple[str, str], ...] = ()
    may_fail: bool = False
    """Whether a failure is a result, too."""

    def command(self, backends: Iterable[str], rounds: int, iters: int) -> str:
        """The arguments of `commlayer bench`."""
        return (
            f"{self.arguments} --scenario {self.scenario} --backends {','.join(backends)} "
            f"--rounds {rounds} --iters {iters} --warmup {WARMUP} --timeout 120"
        )


GRADIENTS = "gradients --sizes 8M"
BESIDE = ":beside=64M"
BESIDE_SLOW = ":beside=16M"
URGENT = "commlayer:priority=0"
DYING = "gradients --sizes 1M"


def urgent(title: str, scenario: str, bulk: str, *, marked: bool = False) -> Case:
    """A small urgent operation, alone and beside bulk; `marked`: with DSCP for the switches."""
    return Case(
        title + (", DSCP for the switches" if marked else ""),
        scenario,
        (URGENT, URGENT + bulk),
        "all_reduce --sizes 64K",
        rounds=3,
        iters=20,
        environ=(("COMMLAYER_DSCP", "1"),) if marked else (),
    )


NICS_GLOO = tuple(f"gloo/{tcp_cc}:chunks=8" for tcp_cc in TCP_CC)
CASES = {
    "clean": Case(
        "8 MiB, no stress", "clean200", ours("", *bounded(0.01)), GRADIENTS, rounds=3, iters=5, tunes_gloo=True
    ),
    "loss1": Case("8 MiB, 1 % loss", "loss1", ours("", *bounded(0.01), papers(0.01)), GRADIENTS, 3, 9, tunes_gloo=True),
    "burst1": Case(
        "8 MiB, 1 % loss in bursts of 8", "burst1", ours("", *bounded(0.01)), GRADIENTS, 3, 5, tunes_gloo=True
    ),
    "uneven3": Case(
        "8 MiB, 3 % loss at one host", "uneven3", ours("", *bounded(0.03)), GRADIENTS, 3, 5, tunes_gloo=True
    ),
    "incast": Case(
        "8 MiB, 4-to-1 incast and cross traffic of 50 %",
        "incast_cross",
        ours("", *bounded(0.01)),
        GRADIENTS,
        rounds=3,
        iters=3,
        tunes_gloo=True,
    ),
    "slow": Case(
        "8 MiB, one host with half the rate",
        "slow_host",
        ours("", *bounded(0.01)),
        GRADIENTS,
        rounds=3,
        iters=5,
        tunes_gloo=True,
    ),
    "priority": Case(
        "64 KiB beside 64 MiB",
        "clean200",
        tuple(name + beside for name in (URGENT, "gloo/cubic", "gloo/bbr") for beside in ("", BESIDE)),
        "all_reduce --sizes 64K",
        rounds=3,
        iters=20,
    ),
    "priority-marked": urgent("64 KiB beside 64 MiB", "clean200", BESIDE, marked=True),
    "priority-50": urgent("64 KiB beside 16 MiB, 50 Mbit/s", "clean50", BESIDE_SLOW),
    "priority-50-marked": urgent("64 KiB beside 16 MiB, 50 Mbit/s", "clean50", BESIDE_SLOW, marked=True),
    "nics-100-100": Case("8 MiB, 2 NICs", "two_nics_100_100", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    "nics-150-50": Case("8 MiB, NICs of 150 and 50", "two_nics_150_50", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    "nics-4x50": Case("8 MiB, 4 NICs of 50", "four_nics_50", ("commlayer", *NICS_GLOO), GRADIENTS, 3, 4),
    # one run for each backend: a failed backend ends its run
    "nic-dies": Case("1 MiB, 1 of 2 NICs dies", "nic_dies", ("commlayer",), DYING, rounds=1, iters=200),
    "nic-dies-gloo": Case(
        "1 MiB, 1 of 2 NICs dies", "nic_dies", (NICS_GLOO[1],), DYING, rounds=1, iters=120, may_fail=True
    ),
}


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
    return all(result["wrong"] == 0 for ranks in results for result in ranks.values())


def over_gloo(run: str, wire: str, metric: Metric, at_least: float, *, bounded: bool = True) -> Claim:
    """Ratio to the best gloo on the same wire, in reliable mode or with a loss bound; the worse of both treatments
    counts."""

    def outcome(runs: Runs) -> Figures:
        ours = results_of(runs, run, (is_bounded if bounded else is_reliable)(wire))
        gloo = results_of(runs, run, lambda name: is_gloo(name) and wire_of(name) == wire)
        figures = {name: metric.of(result) for name, result in gloo.items()}
        name, mine = best(figures, metric), worst(ours, metric)
        ratio = metric.ratio(mine, figures[name])
        return Figures(
            metric.text(mine), f"{metric.text(figures[name])} ({name})", ratio, ratio >= at_least and right(ours)
        )

    figure = f"{metric.name}, {'bounded' if bounded else 'reliable'}"
    return claim(run, wire, figure, f"≥ {at_least:g}x the best gloo", outcome)


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
        name = max(lossy, key=lambda variant: P99.of(lossy[variant]) / P50.of(lossy[variant]))
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
    *(over_gloo("slow", wire, P50, 1.35, bounded=False) for wire in WIRES),
    beside("priority", URGENT, 1.5),
    beside("priority-marked", URGENT, 1.5),
    *(beside(run, URGENT, None, BESIDE_SLOW) for run in ("priority-50", "priority-50-marked")),
    *(beside("priority", f"gloo/{tcp_cc}", None) for tcp_cc in TCP_CC),
    *(link_share(run, 0.95) for run in ("nics-100-100", "nics-150-50", "nics-4x50")),
    death("nic-dies", 200),
    death("nic-dies-gloo", None),
)


def tuned(runs: Iterable[Result]) -> list[str]:
    """The fastest variant of gloo, by its median, for each congestion control and wire."""
    fastest: dict[tuple[str | None, str], Result] = {}
    for result in runs:
        key = BackendSpec.parse(result["backend"]).tcp_cc, wire_of(result["backend"])
        if key not in fastest or result["p50_us"] < fastest[key]["p50_us"]:
            fastest[key] = result
    return [result["backend"] for result in fastest.values()]


def run(name: str, quick: bool) -> dict[str, Any]:
    """Tunes gloo if the case says so, and measures. Raises BenchError."""
    case, environ = CASES[name], dict(CASES[name].environ)
    rounds, iters = (1, 2) if quick else (case.rounds, case.iters)
    if quick and case.scenario == "nic_dies":
        iters = case.iters  # enough iterations before and after the event
    tuning: dict[str, Any] | None = None
    backends = list(case.backends)
    if case.tunes_gloo:
        tuning = measure(f"{name}, gloo tuned", case.command(GLOO_TUNED, 1, 1 if quick else 2), environ)
        backends += tuned(tuning["results"])
    measured = measure(name, case.command(backends, rounds, iters), environ)
    if tuning is not None:
        kept = ("backend", "p50_us", "rounds_us", "wrong")
        measured["tuning"] = {
            "command": tuning["command"],
            "results": [{key: result[key] for key in kept} for result in tuning["results"]],
        }
    return measured


def claims_table(runs: Runs) -> str:
    """The claims, with their figures."""
    lines = [
        "| 4 hosts, 200 Mbit/s in all | wire | figure | commlayer | compared with | ratio | target | reached |",
        "|---|---|---|---|---|---|---|---|",
        *(claim.row(runs) for claim in CLAIMS),
    ]
    if measured := machines(runs):
        lines += ["", f"Measured on {measured}."]
    return "\n".join(lines)


def figures_table(runs: Runs) -> str:
    """Every variant of every case."""
    lines = [
        "| case | variant | p50 | p99 | spread of rounds | samples | packets lost | not counted | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        if "failed" in runs.get(name, {}):
            lines.append(f"| {case.title} | failed: {runs[name]['failed']} | | | | | | | |")
        for result in runs.get(name, {}).get("results", ()):
            packets = result["packets"]
            lost = f"{packets['packets_lost'] / packets['packets_sent']:.2%}" if packets else ""
            not_counted = f"{result['not_counted']:.3%}" if "loss_bound" in result["backend"] else ""
            lines.append(
                f"| {case.title} | {result['backend']} | {P50.text(P50.of(result))} | {P99.text(P99.of(result))} | "
                f"{result['spread']:.0%} | {result['samples']} | {lost} | {not_counted} | {result['wrong']} |"
            )
    return "\n".join(lines)


MATRIX = Matrix(
    CASES,
    run,
    CLAIMS,
    {"claims": claims_table, "figures": figures_table},
    ROOT / "bench/results/stress.json",
    ROOT / "docs/stress.md",
    may_fail=frozenset(name for name, case in CASES.items() if case.may_fail),
)

if __name__ == "__main__":
    sys.exit(MATRIX.main(__doc__))
