import dataclasses
from typing import Any

import pytest

from bench import compression
from bench.compression import KINDS, STEPS, SYSTEMS, TARGETS_S, WARM_UP, bytes_per_step, steps_of, tables, trainings
from bench.jobs.training import Job
from commlayer.tools.bench import machine

PARAMETERS, FINE = 1_000_000, 100_000


def log(job: Job, step_s: float) -> dict[str, Any]:
    steps = [9.0] * WARM_UP + [step_s] * (STEPS - WARM_UP)
    return {
        "job": dataclasses.asdict(job),
        "parameters": PARAMETERS,
        "fine": FINE,
        "ranks": 4,
        "step_s": steps,
        "cpu_s": steps,
        "sent_bytes": [2e6] * STEPS,
        "forward_s": 0.01,
        "backward_s": 0.02,
        "update_s": 0.01,
    }


@pytest.mark.parametrize(("codec", "each"), [("f16", 4), ("int8", 2 * 66 / 64), ("int4-int8", 130 / 256 + 66 / 64)])
def test_bytes_count_values_scales_and_headers(codec: str, each: float) -> None:
    payload = 0.75 * (each * (PARAMETERS - FINE) + 4 * FINE)
    assert bytes_per_step(codec, PARAMETERS, FINE) == pytest.approx(payload * (1432 + 82) / 1432)


def test_every_system_runs_once_a_round_and_each_begins_one() -> None:
    jobs = steps_of(3)
    count = len(SYSTEMS)
    rounds = [[job.system for job in jobs[i * count : (i + 1) * count]] for i in range(3)]
    assert all(sorted(names) == sorted(job.system for job in SYSTEMS) for names in rounds)
    assert len({names[0] for names in rounds}) == 3


def test_table_compares_with_the_best_gloo_in_16_bits() -> None:
    seconds = {"gloo, bbr bf16": 0.3, "gloo, bbr PowerSGD 1": 0.1, "commlayer, int8": 0.2}
    runs = [log(job, seconds.get(job.system, 0.4)) for job in steps_of(2)]
    about = machine.facts()
    text = tables({"100 Mbit/s, no loss": {"runs": runs, "machine": about, "measured": "today"}})
    row = next(line for line in text.splitlines() if line.startswith("| commlayer, int8 |")).split(" | ")
    assert row[1] == "200"
    assert row[3] == "1.50"
    assert row[4] == "2.00"
    assert row[7] == "170: **missed** |"


def test_training_table_gives_times_to_the_loss() -> None:
    runs = []
    for job in trainings(0.0):
        step_s = {"gloo, cubic f16": 0.3, "gloo, bbr PowerSGD 4": 0.2}.get(
            job.system, 0.4 if job.backend == "gloo" else 0.1
        )
        validations = [(step, step * step_s, 3.0 - step / 100) for step in range(3, 81, 3)]
        runs.append(log(job, step_s) | {"validations": validations})
    about = machine.facts()
    text = tables({KINDS[1] + "100 Mbit/s, no loss": {"runs": runs, "machine": about, "measured": "today"}})
    row = next(line for line in text.splitlines() if line.startswith("| commlayer, auto |")).split(" | ")
    assert row[1:5] == ["3.6", "3.6 to 3.6", "3.00", "2.00"]


def test_targets_name_codecs_and_rates_that_are_measured() -> None:
    assert {f"commlayer, {codec}" for codec, _ in TARGETS_S} <= {job.system for job in SYSTEMS}
    assert {rate for _, rate in TARGETS_S} <= set(compression.RATES_MBIT_S)
