from typing import Any

import pytest

from bench import time_to_loss
from bench.jobs.training import Job
from bench.time_to_loss import (
    BEST_GLOO,
    BOUNDED,
    BUCKETS_MB,
    FINALISTS,
    POLICIES,
    TARGETS,
    TUNING_STEPS,
    Verdict,
    best,
    finalists,
    gloo_jobs,
    in_turns,
    limit_step_s,
    our_jobs,
    systems,
    table,
    taken,
    tune,
)
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario
from commlayer.tools.emulate.traffic import Incast

NETWORK = Scenario(hosts=4, nics=(Link(rate_bps=100e6),))


def log(job: Job, step_s: float = 0.5, losses: tuple[float, ...] = (3.0, 2.5, 2.4), **more: Any) -> dict[str, Any]:
    """A log with one validation per step; the first steps, which do not count, are slow."""
    times = [9.0, 9.0, 9.0, *[step_s] * 3]
    return {
        "job": vars(job),
        "step_s": times,
        "validations": [[i + 1, step_s * (i + 1), loss] for i, loss in enumerate(losses)],
        "forward_s": 0.01,
        "backward_s": 0.02,
        "update_s": 0.005,
        "parameters": 1_000_000,
        "ranks": 4,
        "replicas_identical": True,
        "uncounted_share": 0.0,
        **more,
    }


def runs(ours_s: float, ours_final: float = 2.4) -> list[dict[str, Any]]:
    found = []
    for seed, final in ((1, 2.39), (2, 2.40), (3, 2.41)):
        found.append(log(Job(BEST_GLOO, "gloo", "bbr", "f16", seed=seed), 0.6, (3.0, 2.5, final)))
        job = Job(BOUNDED, bits="f16", policy=POLICIES[BOUNDED], seed=seed)
        found.append(log(job, ours_s, (3.0, 2.5, ours_final + final - 2.4)))
    return found


def content(ours_s: float, ours_final: float = 2.4) -> dict[str, Any]:
    about = dict.fromkeys(("cores", "cpu", "kernel", "torch", "git_commit", "load_average"), "x")
    scenario = {"network": NETWORK.table, "target_loss": 2.5, "runs": runs(ours_s, ours_final), "machine": about}
    scenario |= {"tuning": [log(job) for job in gloo_jobs()], "measured": "today"}
    return {"scenarios": {"loss1_100": scenario}}


def verdict(ours_s: float, ours_final: float = 2.4) -> Verdict:
    found = systems(runs(ours_s, ours_final))
    return Verdict.of(found[BOUNDED], found[BEST_GLOO], 2.5)


def test_gloo_is_tried_in_every_form() -> None:
    forms = {(job.tcp_cc, job.bits, job.bucket_mb) for job in gloo_jobs()}
    assert forms == {(cc, bits, mb) for cc in ("cubic", "bbr") for bits in ("f32", "f16", "bf16") for mb in BUCKETS_MB}


def test_the_best_ones_are_looked_at_again_with_more_steps() -> None:
    sifted = [log(job, 1 - 0.01 * i) for i, job in enumerate(gloo_jobs())]
    again = finalists(sifted)
    assert [job.steps for job in again] == [TUNING_STEPS] * FINALISTS
    assert (again[0].bits, again[0].tcp_cc, again[0].bucket_mb) == ("bf16", "bbr", BUCKETS_MB[-1])


def test_the_median_after_the_first_steps_decides() -> None:
    job = Job(BEST_GLOO)
    slow_start, uneven = log(job, 0.5), log(job, 0.6)
    uneven["step_s"] = [0.0, 0.0, 0.0, 0.6, 0.6, 0.1]
    assert best([uneven, slow_start]) is slow_start


def test_we_compress_no_more_than_the_best_gloo() -> None:
    asked = []

    def run(stage: str, jobs: list[Job]) -> list[dict[str, Any]]:
        asked.append(stage)
        return [log(job, 0.4 if job.bits == "bf16" else 0.5) for job in jobs]

    chosen, logs = tune(run)
    assert [job.system for job in chosen] == [BEST_GLOO, *POLICIES]
    assert {job.bits for job in chosen} == {"bf16"}
    assert asked == ["sift", "gloo", "ours"]
    assert len(logs) == len(gloo_jobs()) + FINALISTS + len(our_jobs("bf16"))
    with pytest.raises(RuntimeError, match="no form of gloo"):
        tune(lambda _stage, _jobs: [])


def test_systems_take_turns_and_differ_in_nothing_else() -> None:
    jobs = in_turns([Job("a"), Job("b")], (1, 2), {"steps": 7})
    assert [(job.system, job.seed) for job in jobs] == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert {job.steps for job in jobs} == {7}


def test_the_first_validation_that_is_good_enough_counts() -> None:
    each = log(Job("a"), 0.5, (3.0, 2.5, 2.6, 2.4))
    assert time_to_loss.time_to_loss(each, 2.5) == 1.0
    assert time_to_loss.time_to_loss(each, 2.45) == 2.0
    assert time_to_loss.time_to_loss(each, 2.3) is None


def test_the_limit_is_the_busiest_link_full() -> None:
    each = log(Job("a", bits="f16"))
    transfer_s = 1.5 * 2e6 / (100e6 / 8 * 1472 / 1514)
    assert limit_step_s(each, NETWORK) == pytest.approx(0.015 + transfer_s)
    incast = Incast(to=1, senders=4, burst_bytes=62_500, period_ms=100)  # 20 Mbit/s
    busy = Scenario(hosts=4, nics=NETWORK.nics, incast=(incast,))
    assert taken(busy, 0) == 0
    assert taken(busy, 1) == pytest.approx(0.2)
    assert limit_step_s(each, busy) == pytest.approx(0.015 + transfer_s / 0.8)
    assert limit_step_s(each | {"backward_s": 9.0}, NETWORK) == pytest.approx(9.015)


@pytest.mark.parametrize(("ours_s", "good"), [(0.39, True), (0.41, False)])
def test_the_ratio_decides(ours_s: float, good: bool) -> None:
    assert verdict(ours_s).ratios == pytest.approx([0.6 / ours_s] * 3)
    assert verdict(ours_s).reached(1.5) is good
    line = next(line for line in table(content(ours_s)).splitlines() if line.startswith(f"| {BOUNDED}"))
    assert line.endswith("| ≥ 1.5x | yes |" if good else "| ≥ 1.5x | **no** |")


@pytest.mark.parametrize(("final", "good"), [(2.409, True), (2.411, False), (2.3, True)])
def test_a_worse_loss_reaches_nothing(final: float, good: bool) -> None:
    assert verdict(0.1, final).noise == pytest.approx(0.01)
    assert verdict(0.1, final).reached(1.5) is good


def test_a_run_that_never_got_there_reaches_nothing() -> None:
    found = systems(runs(0.1))
    found[BOUNDED].logs[1]["validations"] = [[1, 0.1, 3.0], [2, 0.2, 2.51]]
    short = Verdict.of(found[BOUNDED], found[BEST_GLOO], 2.5)
    assert short.ratios == []
    assert not short.reached(1.5)


def test_seeds_that_not_all_have_do_not_count() -> None:
    found = systems(runs(0.1)[:-1])
    assert {len(system.logs) for system in found.values()} == {2}
    assert systems([]) == {}


def test_missing_measurements_are_named() -> None:
    assert table({"scenarios": {}}).count("Not measured") == len(TARGETS)
    text = table(content(0.3))
    assert text.count("Not measured") == len(TARGETS) - 1
    assert "no hook" not in text
    assert "bbr, f16, buckets of 25 MB" in text


@pytest.mark.parametrize("name", TARGETS)
def test_the_scenarios_are_there_and_shaped(name: str) -> None:
    scenario = Scenario.read(name)
    assert scenario.payload_gb_s is not None
    assert {"cubic", "bbr"} <= set(scenario.tcp_congestion_control)
