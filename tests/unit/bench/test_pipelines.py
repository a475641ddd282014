"""What each rank of the pipeline benchmark runs: computation that sleeps, a plain reducer, waits in a trace."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from bench.jobs import pipelines
from bench.jobs.pipeline_model import ideal
from bench.jobs.pipelines import Chunk, Clock, Reducer, costs_of, spans_of, with_waits
from bench.overlap_pipeline import LARGE
from commlayer.scheduler.actions import Action
from commlayer.scheduler.measure import Timed
from commlayer.scheduler.trace import Span


def test_a_chunk_takes_time_and_has_a_gradient_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(Clock, "forward_s", 0.5)
    monkeypatch.setattr(Clock, "began_s", [])
    chunk = Chunk(1000)
    for _ in range(2):
        chunk(torch.ones(4, 3)).sum().backward()
    assert slept == [0.5, 1.0, 0.5, 1.0]
    assert chunk.weight.grad is not None
    assert chunk.weight.grad.shape == (1000,)
    assert chunk.weight.grad.is_contiguous()
    assert len(Clock.began_s) == 2


class Work:
    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


def test_a_reducer_averages_and_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[Work] = []

    def all_reduce(tensor: torch.Tensor, **_: Any) -> Work:
        tensor.mul_(2)  # both replicas have the same
        works.append(Work())
        return works[-1]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda _: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    reducer, module = Reducer(object()), nn.Sequential(Chunk(3), Chunk(3))  # type: ignore[arg-type]
    for parameter in module.parameters():
        parameter.grad = torch.full((3,), 8.0)
    reducer.start(module, 4)
    assert [parameter.grad.tolist() for parameter in module.parameters() if parameter.grad is not None] == [
        [2.0] * 3
    ] * 2
    assert not any(work.waited for work in works)
    reducer.wait()
    assert [work.waited for work in works] == [True, True]
    assert reducer.works == []


def test_a_parameter_is_reduced_with_its_last_micro_batch() -> None:
    started: list[tuple[int, torch.Tensor]] = []

    class Starting(Reducer):
        def __init__(self) -> None:
            self.works = []

        def start_one(self, scale: int, parameter: torch.Tensor) -> None:
            started.append((scale, parameter))

    weight = torch.ones(2)
    hook = pipelines._Countdown(3, Starting())
    for _ in range(5):
        hook(weight)
    assert len(started) == 1
    hook(weight)
    assert [scale for scale, _ in started] == [3, 3]


def test_the_wait_of_a_forward_is_an_action_of_its_own() -> None:
    forward, late, backward = Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0)
    records = [Timed(forward, 1.0, 2.0), Timed(late, 2.0, 4.0), Timed(backward, 4.0, 6.0)]
    assert with_waits(records, [0.5, 1.001, 3.0]) == [
        records[0],
        Timed(Action("WAIT", 1), 2.0, 3.0),
        Timed(late, 3.0, 4.0),
        records[2],
    ]
    assert with_waits(records, []) == records


def test_costs_survive_a_file() -> None:
    costs = ideal(LARGE)
    assert costs_of(dataclasses.asdict(costs)) == costs


def test_every_system_has_an_order_and_a_backend() -> None:
    assert {system.order for system in pipelines.SYSTEMS.values()} == {"1F1B", "interleaved", "AIAO"}
    on_gloo = {name: system.tcp_cc for name, system in pipelines.SYSTEMS.items() if system.backend == "gloo"}
    assert on_gloo == {pipelines.FIFO_GLOO: "bbr", pipelines.FIFO_CUBIC: "cubic"}


def test_spans_begin_at_the_zero_of_the_trace() -> None:
    record = Timed(Action("B", 1, 2), 11, 12.5)
    assert spans_of(3, [record], zero_s=10) == [Span(3, "compute", "B stage 1 mb 2", 1, 2.5)]
