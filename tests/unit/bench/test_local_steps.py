import dataclasses
from typing import Any

import pytest

from bench import local_loss, local_steps
from bench.jobs.local_steps import Job
from bench.local_loss import LENGTHS, System, usual
from bench.local_steps_page import best_gloo, percentile, tables
from bench.local_systems import (
    ALONE,
    AUTO,
    EQUAL,
    EXACT,
    LEVEL,
    LOCAL_AUTO,
    LOCAL_CODEC,
    PERIODS,
    QUORUM,
    SPECIAL,
    SPEEDS,
    STALLS,
    STATE,
    TORCHFT,
    UNEVEN,
    WAITING,
    jobs_of,
    jobs_of_exact,
    jobs_of_pair,
    jobs_of_speeds,
    jobs_of_stalls,
    jobs_of_two,
)  # fmt: skip
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

SECONDS = {ALONE: 0.05, "gloo, cubic f32": 2.0, "gloo, cubic bf16": 1.0, "gloo, bbr bf16": 1.2, AUTO: 0.4, STATE: 0.2}
ABOUT = {"cores": 2, "cpu": "x", "kernel": "y", "torch": "z", "load_average": 0, "git_commit": "c"}


def log(job: Job, step_s: float, every: int) -> dict[str, Any]:
    about = {"job": dataclasses.asdict(job), "step_s": [step_s] * 9 + [3 * step_s], "sent_bytes": 1e6}
    return {**about, "every": every, "busy": 0.1, "of_ranks": 0.1, "words": "decided" if job.local else ""}


def network(jobs: list[Job]) -> dict[str, Any]:
    runs = []
    for job in jobs:
        every = {LOCAL_AUTO: 8, LOCAL_CODEC: 8}.get(job.system, (job.local or {}).get("every", 1))
        runs += [log(job, SECONDS.get(job.system, 0.0625), every) for _ in range(2)]
    scenario = Scenario(hosts=4, nics=(Link(rate_bps=2e7),))
    return {"network": scenario.table, "runs": runs, "machine": ABOUT, "measured": "today"}


def row_of(text: str, system: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"| {system} ")).split(" | ")


def test_table_compares_with_the_best_gloo_and_the_hook() -> None:
    text = tables({"20": network(jobs_of())}, {})
    row = row_of(text, "local, H 16")
    assert row[1] == "75.0"
    assert row[3:5] == ["62.5", "187.5"]
    assert row[6] == "80.0%"
    assert row[7:10] == ["16.00", "6.40", "3.20"]
    assert row[10:13] == ["", "", ""]
    for system in (LOCAL_AUTO, LOCAL_CODEC):
        assert row_of(text, f"{system} (H 8)")[7] == "16.00"
    assert "The best gloo is `gloo, cubic bf16`" in text


def test_time_to_a_loss_is_the_step_times_the_measured_factor() -> None:
    about = {"model": "byte GPT", "optimizer": "AdamW", "seed": 1}
    system = System(16, *usual(16), "int4-int8", 100)
    runs = [{**about, "steps": steps, **local_loss.EXACT._asdict(), "loss": 3 - steps / 1000} for steps in LENGTHS]
    runs.append({**about, "steps": 1500, **system._asdict(), "loss": 3 - 1.2})  # as 1,200 exact steps
    row = row_of(tables({"20": network(jobs_of())}, {"runs": runs}), "local, H 16")
    assert row[10:13] == ["1.25", "12.80", "2.56"]


def test_two_sites_have_no_factor_of_four() -> None:
    pair = network(jobs_of_pair())
    pair["network"] = Scenario(hosts=2, nics=(Link(rate_bps=2e7),)).table
    for run in pair["runs"]:
        if run["job"]["system"] == LOCAL_AUTO:
            run.update(every=1, words="all stay exact")
    about = {"model": "byte GPT", "optimizer": "AdamW", "seed": 1}
    runs = [{**about, "steps": steps, **local_loss.EXACT._asdict(), "loss": 3 - steps / 1000} for steps in LENGTHS]
    runs.append({**about, "steps": 1500, **System(16, *usual(16), "int4-int8", 100)._asdict(), "loss": 3 - 1.2})
    losses = {"runs": runs}
    assert row_of(tables({"4 x 1": network(jobs_of_pair())}, losses), "local, H 16")[10] != ""
    text = tables({"2 x 1": pair}, losses)
    assert row_of(text, "local, H 16")[7:11] == ["16.00", "6.40", "3.20", ""]
    assert row_of(text, f"{LOCAL_AUTO} (H 1)")[10] == "1.00"


def test_exact_steps_cost_no_steps() -> None:
    exact = network(jobs_of())
    for run in exact["runs"]:
        if run["job"]["system"] == LOCAL_AUTO:
            run.update(every=1, words="measured\n33 exact steps so far; all stay exact")
    assert row_of(tables({"200": exact}, {}), f"{LOCAL_AUTO} (H 1)")[10:13] == ["1.00", "16.00", "3.20"]


def test_sites_of_two_have_no_gloo() -> None:
    text = tables({"8 x 2": network(jobs_of_two())}, {})
    assert row_of(text, "local, H 8")[6] == "80.0%"
    assert "best gloo is" not in text


def test_uneven_sites_are_compared_with_equal_steps() -> None:
    found = network([])
    for job, step_s in zip(jobs_of_speeds(), (0.028, 0.016), strict=True):
        found["runs"] += [{**log(job, step_s, 24), "own": 0.25, "step_s": [step_s]} for _ in range(2)]
    text = tables({SPECIAL[SPEEDS]: found}, {})
    assert row_of(text, UNEVEN)[1:4] == ["62.5", "62.5 to 62.5", "1.75"]
    assert row_of(text, EQUAL)[3] == "1.00"
    assert "The limit is 1.75." in text


def test_sites_without_stalls_are_compared_with_a_level_job() -> None:
    found = network([])
    for job, step_s, own in zip(jobs_of_stalls(), (0.016, 0.024, 0.017), (0.25, 0.25, 0.26), strict=True):
        found["runs"] += [{**log(job, step_s, 24), "own": own, "step_s": [step_s]} for _ in range(2)]
    text = tables({SPECIAL[STALLS]: found}, {})
    assert row_of(text, LEVEL)[1:4] == ["64.0", "64.0 to 64.0", "100.0%"]
    assert row_of(text, WAITING)[3] == "66.7%"
    assert row_of(text, QUORUM)[3:6] == ["97.9%", "58.8", "26.0%"]
    assert "one site sleeps for 2 s more" in text


def test_exact_steps_are_compared_with_the_hook_of_the_same_codec() -> None:
    found = network([])
    for job, step_s in zip(jobs_of_exact(), (0.1, 0.101, 0.05, 0.055), strict=True):
        found["runs"] += [{**log(job, step_s, 1), "step_s": [step_s]} for _ in range(2)]
    text = tables({SPECIAL[EXACT]: found}, {})
    assert row_of(text, f"{LOCAL_AUTO}, float32")[5:7] == ["1.010", "1.010 to 1.010"]
    assert row_of(text, f"{LOCAL_AUTO}, bf16")[5:7] == ["1.100", "1.100 to 1.100"]
    assert row_of(text, "hook, float32")[5:7] == ["", ""]


def test_gloo_is_the_one_that_averages_gradients() -> None:
    assert best_gloo({"gloo, a": [3.0], "gloo, b": [2.0], "LocalSGD on gloo, H 8": [1.0]}) == "gloo, b"


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.5, 50), (0.99, 99), (1.0, 99)])
def test_percentile(share: float, expected: int) -> None:
    assert percentile(range(100), share) == expected


def test_local_jobs_run_whole_rounds_of_their_own_count() -> None:
    for job in (*jobs_of(), *jobs_of_two()):
        if job.local is not None and job.local["every"] != "auto":
            assert job.local.get("fragments", 4) <= job.local["every"]
    assert {job.period for job in jobs_of()} == {0, *PERIODS}


def test_each_case_has_the_rates_of_its_networks() -> None:
    found = {case: network.rates_mbit_s for case, network in local_steps.NETWORKS.items()}
    assert found == {
        "20": (20,),
        "100": (100,),
        "200": (200,),
        "1000": (1000,),
        "8x2": (20, 1000),
        "2x1": (20,),
        SPEEDS: (20,),
        STALLS: (20,),
        EXACT: (200,),
        TORCHFT: (20,),
    }
