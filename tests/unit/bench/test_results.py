"""Files of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness.results import LINE, read_results, write_results

RESULTS = Path(__file__).parents[3] / "bench/results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_are_as_the_benchmarks_write_them(path: Path, tmp_path: Path) -> None:
    write_results(tmp_path / path.name, read_results(path))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_every_run_has_a_line(tmp_path: Path) -> None:
    runs: list[dict[str, Any]] = [{"step_s": [0.1] * LINE, "system": name} for name in ("gloo", "commlayer")]
    times = {f"setting {number}": number / 10 for number in range(LINE)}
    case = {"runs": runs, "empty": [], "hosts": [1, 2], "steps_s": times}
    content = {"schema": 1, "machine": {"cores": 2}, "cases": {"small": case}}
    path = tmp_path / "results.json"
    write_results(path, content)
    assert json.loads(path.read_text()) == content
    lines = path.read_text().splitlines()
    assert [line.removesuffix(",") for line in lines if '"step_s"' in line] == [json.dumps(run) for run in runs]
    assert {'"schema": 1,', '"machine": {"cores": 2},', '"hosts": [1, 2],', f'"steps_s": {json.dumps(times)}'} <= set(
        lines
    )


def test_a_benchmark_begins_without_results(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"runs": {}}
    begun = read_results(tmp_path / "none.json", empty)
    begun["schema"] = 1
    assert empty == {"runs": {}}
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        read_results(tmp_path / "none.json")


def test_an_interrupted_benchmark_leaves_the_results_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, {"runs": [1]})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_results(path, {"runs": [1, object()]})
    assert read_results(path) == {"runs": [1]}
