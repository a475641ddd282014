"""The table of a GPT's steps: pairs of runs, ratios, target."""

import dataclasses
from typing import Any

import pytest

from bench import overlap_gpt
from bench.jobs.training import WARM_UP_STEPS, Job
from bench.overlap import SCENARIO
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario


def log(job: Job, step_s: float) -> dict[str, Any]:
    return {
        "job": dataclasses.asdict(job),
        "step_s": [9.0] * WARM_UP_STEPS + [step_s] * 3,
        "sent_bytes": [0] * WARM_UP_STEPS + [5_000_000] * 3,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "update_s": 0.1,
        "parameters": 1_000_000,
        "ranks": 4,
    }


def test_rounds_begin_with_each_form_in_turn() -> None:
    jobs = overlap_gpt.jobs_of(("int8", "none"), 2, 5)
    assert [(job.system, job.overlap) for job in jobs[:4]] == [
        *(("int8", False), ("int8", True)),
        *(("none", False), ("none", True)),
    ]
    assert [job.overlap for job in jobs[4:]] == [True, False, True, False]


def test_a_row_has_its_target() -> None:
    jobs = overlap_gpt.jobs_of(("int8",), 2, 5)
    runs = [log(job, 0.8 if job.overlap else 1.2) for job in jobs]
    row = overlap_gpt.rows(runs)["int8"]
    assert row.ratios == pytest.approx([1.5, 1.5])
    assert row.computing_s == pytest.approx(0.4)
    assert row.communication_s(0.01) == pytest.approx(0.5)
    buckets = 4e6 / (overlap_gpt.BUCKET_MB * (1 << 20))
    assert row.target_s(0.01) == pytest.approx(1.05 * 0.5 + 0.5 / buckets)
    content = {
        "network": Scenario.read(SCENARIO).table,
        "runs": runs,
        "machine": machine.facts(),
        "measured": "2026-01-01",
    }
    assert "| `int8` | 400 | " in overlap_gpt.table(content)
    assert " | 1200 | 800 | 1.50 (1.50 to 1.50) | " in overlap_gpt.table(content)
