"""The driver of benchmarks: what is measured and kept, what a page gets, and exit statuses."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.harness.driver import WHOLE, BenchError, Benchmark
from bench.harness.options import options
from bench.harness.page import markdown
from bench.harness.results import read_results, write_results

MARKERS = "<!-- names:begin -->\nold\n<!-- names:end -->\n"


def asked(*words: str) -> argparse.Namespace:
    return options(None, only=("a", "b"), quick="little", table=True).parse_args(words)


def measure(content: dict[str, Any], name: str) -> None:
    if name == "bad":
        raise BenchError("bad: no such network")
    content["names"].append(name)


@pytest.fixture
def benchmark(tmp_path: Path) -> Benchmark:
    page = tmp_path / "page.md"
    page.write_text(MARKERS)
    return Benchmark(
        tmp_path / "kept.json",
        page,
        lambda content: {"names": ", ".join(content["names"])},
        {"names": []},
        is_good=lambda content: "b" not in content["names"],
    )


def test_each_case_is_kept_before_the_next_one(benchmark: Benchmark) -> None:
    def interrupted(content: dict[str, Any], name: str) -> None:
        if name == "b":
            raise KeyboardInterrupt
        measure(content, name)

    with pytest.raises(KeyboardInterrupt):
        benchmark.main(asked(), "ab", interrupted)
    assert read_results(benchmark.results) == {"names": ["a"]}
    assert benchmark.page.read_text() == MARKERS


def test_a_case_that_fails_leaves_the_others(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(asked(), ("bad", "a"), measure) == 2
    assert "bad: no such network" in capsys.readouterr().err
    assert read_results(benchmark.results) == {"names": ["a"]}
    assert "\na\n" in benchmark.page.read_text()


def test_nothing_is_shown_where_nothing_was_measured(benchmark: Benchmark) -> None:
    assert benchmark.main(asked(), ("bad",), measure) == 2
    assert benchmark.page.read_text() == MARKERS
    assert benchmark.empty == {"names": []}


@pytest.mark.parametrize(("case", "status"), [("a", 0), ("b", 1)])
def test_a_missed_target_is_an_exit_status(benchmark: Benchmark, case: str, status: int) -> None:
    assert benchmark.main(asked(), case, measure) == status
    assert benchmark.main(asked("--table"), case, measure) == status


def test_a_quick_run_keeps_nothing_and_is_not_judged(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(benchmark.results, {"names": ["a"]})
    assert benchmark.main(asked("--quick"), "b", measure) == 0
    assert capsys.readouterr().out == "b\n"
    assert read_results(benchmark.results) == {"names": ["a"]}
    assert benchmark.page.read_text() == MARKERS


def test_tables_and_pictures_come_from_the_kept_results(benchmark: Benchmark) -> None:
    drawn = list[dict[str, Any]]()
    made = Benchmark(benchmark.results, benchmark.page, benchmark.tables, picture=drawn.append)
    write_results(made.results, {"names": ["kept"]})
    assert made.main(asked("--table"), WHOLE, lambda *_: pytest.fail("measured")) == 0
    assert drawn == [{"names": ["kept"]}]
    assert "\nkept\n" in made.page.read_text()


def test_a_table_has_a_line_for_each_row() -> None:
    assert markdown(["a", "b"], [["1", "2"], ["3", ""]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |  |"
