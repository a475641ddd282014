"""The sweep of pipelines: its points, its table and its picture."""

from pathlib import Path

import pytest

from bench.jobs import pipeline_sweep
from bench.jobs.pipeline_model import limit
from bench.jobs.pipelines import CONTROL, DEFERRED, FIFO, SERIAL, UNDEFERRED
from bench.overlap_pipeline import LARGE, SMALL, Measured
from tests.unit.bench.test_overlap_pipeline import content


def test_points_have_the_same_computation_per_rank() -> None:
    points = list(pipeline_sweep.cases(SMALL))
    assert len({(case.microbatches, case.chunks, case.share) for case in points}) == 24
    assert {case.forward_s * case.chunks for case in points} == {SMALL.forward_s * SMALL.chunks}


def test_ours_is_never_predicted_slower_than_the_best_stock_schedule() -> None:
    for case in pipeline_sweep.cases(SMALL):
        stock = limit(case, pipeline_sweep.best_stock(case)[0]).step_s
        for name in (UNDEFERRED, DEFERRED):
            assert limit(case, name).step_s <= stock * 1.0001


def test_the_selection_measures_the_two_best_stock_schedules() -> None:
    selection = pipeline_sweep.selection(SMALL)
    assert len(selection) == len(pipeline_sweep.MEASURED)
    for case, names in selection:
        assert {*pipeline_sweep.best_stock(case)[:2], CONTROL, FIFO, UNDEFERRED, DEFERRED} == set(names)


def test_live_activations() -> None:
    """LoopedBFS keeps all M; 1F1B p on the first rank."""
    for name, kept in ((DEFERRED, 16), (SERIAL, 4)):
        assert pipeline_sweep.live(LARGE, name, limit(LARGE, name)) == kept


@pytest.mark.parametrize(("factor", "mark"), [(1.0, ""), (2.0, " (**slower**)")])
def test_the_table_has_measured_points(factor: float, mark: str) -> None:
    microbatches, chunks, share = pipeline_sweep.MEASURED[0]
    case = pipeline_sweep.at(SMALL, microbatches, chunks, share)
    table = pipeline_sweep.table(SMALL, [Measured(content(case, {DEFERRED: factor}))])
    lines = [line for line in table.splitlines() if line.startswith(f"| {microbatches} | {chunks} | {share:.0%} |")]
    assert len(lines) == 1
    assert lines[0].endswith(f"){mark} |")
    assert table.count("**slower**") == bool(mark)
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + 24


def test_the_picture_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        pipeline_sweep.plot(SMALL, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
