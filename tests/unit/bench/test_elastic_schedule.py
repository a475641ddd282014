"""The simulated cluster of `bench.elastic_schedule`: known times, and no work that is lost or invented."""

from __future__ import annotations

import random

import pytest

from bench.elastic_schedule import (
    GPUS,
    PAUSES,
    Allocation,
    Job,
    Ones,
    Pauses,
    Run,
    equal,
    fifo,
    placed,
    shortest,
    simulate,
    trace,
)

FREE = Pauses(0.0, 0.0, restarts=False)


def test_jobs_that_wait_for_each_other() -> None:
    jobs = [Job(number, 0.0, 10, 64.0, 0.0, GPUS) for number in range(3)]  # a step takes a second
    assert simulate(jobs, fifo, FREE) == pytest.approx([10, 20, 30])
    assert simulate(jobs[:2], equal, FREE) == pytest.approx([20, 20])
    late = [jobs[0], Job(1, 1.0, 2, 64.0, 0.0, GPUS)]
    assert simulate(late, shortest, FREE) == pytest.approx([12, 2])
    assert simulate(late, shortest, Pauses(5.0, 0.0, restarts=True)) == pytest.approx([23, 7])


def test_a_step_on_several_hosts_has_an_all_reduce() -> None:
    job = Job(0, 0.0, 1, 8.0, 1.25e9, 8)
    assert job.step_s(range(4)) == pytest.approx(2.0)
    assert job.step_s(range(8)) == pytest.approx(2.0)  # 1 s, and the gradients once each way at 10 Gbit/s
    assert job.step_s([0, 4, 8, 12]) == pytest.approx(3.5)


def test_what_a_change_costs() -> None:
    pauses, job = Pauses(8.0, 0.5, restarts=False), Job(0, 0.0, 100, 4.0, 0.0, 4)
    run = Run(job, 100)
    run.move([0, 1], 0.0, pauses)
    assert run.end_s(0.0) == 8 + 200
    run.advance(0.0, 28.0)
    assert run.left == 90
    run.move([0, 1, 2, 3], 28.0, pauses)  # the new ones compute after 8 s, of which the others wait for half a second
    assert run.end_s(28.0) == pytest.approx(36 + 90 - 7.5 / 2)
    run.advance(28.0, 36.5)
    assert run.left == pytest.approx(90 - 7.5 / 2 - 0.5)
    run.move([3], 36.5, pauses)
    assert run.end_s(36.5) == pytest.approx(37 + 4 * run.left)
    run.move([], 36.5, pauses)
    left = run.left
    run.advance(36.5, 1000.0)
    assert run.left == left


def test_no_gpu_has_two_jobs_and_none_has_too_many() -> None:
    draw = random.Random(1)
    runs = {job.number: Run(job, job.steps) for job in trace(2, 12, 0.8)}
    for policy in (fifo, shortest, equal, Ones(3)):
        for now_s in (0.0, 60.0, 120.0):
            found: Allocation = policy(runs, now_s, PAUSES["elastic"])
            gpus = [gpu for owned in found.values() for gpu in owned]
            assert len(gpus) == len(set(gpus)) <= GPUS
            assert set(gpus) <= set(range(GPUS))
            assert all(len(owned) <= runs[number].job.most for number, owned in found.items())
            for number, run in runs.items():
                run.move(found.get(number, ()), now_s, PAUSES["elastic"])
    counts = {number: draw.randrange(6) for number in runs}
    assert {number: len(share) for number, share in placed(counts, runs).items()} == counts


@pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(policy, id=policy.__name__) for policy in (fifo, shortest, equal)),
        pytest.param(Ones(0), id="ones", marks=pytest.mark.slow),
    ],
)
def test_no_job_ends_before_its_work_is_done(policy: object) -> None:
    jobs = trace(4, 6, 0.8)
    for pauses in PAUSES.values():
        for job, took_s in zip(jobs, simulate(jobs, policy, pauses), strict=True):  # type: ignore[arg-type]
            assert took_s > job.steps * job.compute_s / job.most
