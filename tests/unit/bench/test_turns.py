"""Systems in turns: their order, the interval of their results, the accelerator, the logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import turns
from bench.harness.driver import BenchError, Benchmark
from bench.harness.results import read_results
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.scenario import Scenario


def test_every_round_has_every_system_and_begins_with_another() -> None:
    made = turns.in_turns("abcd", 4)
    assert "".join(made) == "abcdbcdacdabdabc"


def test_an_interval_has_the_median_with_95_percent() -> None:
    assert turns.interval([3, 1, 2]) == (1, 3)
    assert turns.interval(range(6)) == (0, 5)  # 96.9 %; without the outer two: 78 %
    assert turns.interval(range(9)) == (1, 7)  # 96.1 %
    assert turns.interval(range(8)) == (0, 7)  # without the outer two: 93.0 %


def test_a_cell_has_the_median_and_the_interval() -> None:
    assert turns.spread([0.2, 0.1, 0.4], 1e3, ".0f") == "200 (100 to 400)"


def test_a_benchmark_measures_at_once_or_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, traced = tmp_path / "page.md", list[tuple[float, Path]]()
    page.write_text("<!-- steps:begin -->\n<!-- steps:end -->\n")
    benchmark = Benchmark(tmp_path / "kept.json", page, lambda content: {"steps": str(content)})

    def run(measure: Any, *words: str) -> int:
        parser = turns.parser(None, 6)
        turns.add_trace(parser)
        given = parser.parse_args(words)
        return turns.main(given, benchmark, measure, lambda *_: {}, trace=lambda *about: traced.append(about))

    def measure(rounds: int, slower: float, *, short: bool) -> Any:
        return {"rounds": rounds, "slower": slower, "short": short}

    def fail(*_: Any, **__: Any) -> Any:
        raise BenchError("only 1 of 2 jobs ended")

    assert run(measure, "--quick") == 0
    assert run(measure, "--trace", "out.json") == 0
    assert traced == [(1.0, Path("out.json"))]
    assert not benchmark.results.exists()
    assert run(measure, "--slower", "2") == 0
    kept = {"rounds": 6, "slower": 2.0, "short": False}
    assert read_results(benchmark.results) == kept
    assert run(fail, "--table") == 0
    assert str(kept) in page.read_text()
    assert run(fail) == 2
    assert "only 1 of 2 jobs ended" in capsys.readouterr().err


def test_an_accelerator_takes_time_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    values = torch.ones(3, requires_grad=True)
    turns.Accelerator.apply(values, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert slept == [0.5, 1.0]
    assert values.grad is not None
    assert values.grad.tolist() == [1, 1, 1]


def test_slower_links() -> None:
    scenario = Scenario.read("overlap")
    rate = scenario.nics[0].rate_bps
    assert rate is not None
    assert turns.slowed(scenario, 2).nics[0].rate_bps == rate / 2


def test_the_busy_share_is_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    assert turns.busy(CpuTime(process_s=1.0, machine_s=10.0, softirq_s=0.0), 20.0) == {"busy": 0.125, "of_ranks": 0.1}


@pytest.mark.parametrize(("of_ranks", "machine", "again"), [(0.2, 0.3, True), (0.2, 0.25, False), (0.3, 0.9, False)])
def test_a_job_is_repeated_beside_another_load(of_ranks: float, machine: float, again: bool) -> None:
    assert turns.is_disturbed({"of_ranks": of_ranks, "busy": machine}) == again


def test_logs_by_system_keep_the_order_of_rounds() -> None:
    runs: list[dict[str, Any]] = [{"job": {"system": name}, "step_s": [value]} for name, value in ("a1", "b2", "a3")]
    found = turns.by_system(runs)
    assert {name: [log["step_s"] for log in logs] for name, logs in found.items()} == {
        "a": [["1"], ["3"]],
        "b": [["2"]],
    }


def test_a_rank_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Nothing:
        def __init__(self, scenario: Scenario) -> None:
            self.scenario = scenario

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def run(network: Nothing, command: list[str]) -> int:
        Path(command[-1]).write_text('{"job": {}}\n')
        return status

    monkeypatch.setattr(turns, "LOGS", tmp_path)
    monkeypatch.setattr(turns, "Network", Nothing)
    monkeypatch.setattr(turns, "run", run)
    monkeypatch.chdir(turns.ROOT)
    scenario, status = Scenario(hosts=2), 0
    assert turns.measure(scenario, "bench.overlap", {"jobs": [{}]}, "x") == [{"job": {}}]
    with pytest.raises(RuntimeError, match="only 1 of 2"):
        turns.measure(scenario, "bench.overlap", {"jobs": [{}, {}]}, "x")
    status = 1
    with pytest.raises(RuntimeError, match="x: "):
        turns.measure(scenario, "bench.overlap", {"jobs": [{}]}, "x")


def test_the_warm_up_is_neither_timed_nor_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.harness.turns.dist.barrier", lambda: None)
    monkeypatch.setattr("bench.harness.turns.dist.get_world_size", lambda: 1)
    seconds = iter([0.02, 0.02, 0.001, 0.001, 0.001])
    log = turns.timed(lambda: turns.Accelerator.compute("step", next(seconds)), 2, 3, trace=True)
    recorded, turns.Accelerator.spans = turns.Accelerator.spans, None
    assert len(log["step_s"]) == len(recorded or ()) == 3
    assert all(step_s >= 0.001 for step_s in log["step_s"])
    assert next(seconds, None) is None
    assert {"busy", "of_ranks"} < log.keys()
