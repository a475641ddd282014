"""The verdicts of bench.against, its exit status and its page."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import against
from bench.against import CASES, Change, Row, compare, history, kept_row
from bench.harness import tree
from bench.harness.tree import CannotRunError, Taken, Tree, taken
from commlayer.tools.bench import machine
from commlayer.tools.emulate.scenario import Scenario

OTHER, OWN = Tree(Path("other"), "other"), Tree(Path("own"), "own")


def rounds(*ratios: float) -> list[tuple[Taken, Taken]]:
    return [(Taken(100.0, 50.0), Taken(100.0 * ratio, 50.0)) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "verdict", "is_bad"),
    [
        ((1.04, 1.05, 1.06, 1.05, 1.04, 1.07), "**slower**", True),
        ((1.02, 1.05, 1.06, 1.05, 1.04, 1.07), "same", False),
        ((0.90, 0.91, 0.92, 0.93, 0.94, 0.95), "faster", False),
        ((1.20, 1.20, 1.20, 1.20, 1.20), "too few rounds", False),
    ],
)
def test_a_case_is_slower_with_its_whole_interval(ratios: Sequence[float], verdict: str, is_bad: bool) -> None:
    row = Row.of("udp-4K-loop", rounds(*ratios))
    assert (row.verdict, row.is_bad) == (verdict, is_bad)


def test_one_run_in_virtual_time_is_enough() -> None:
    assert Row.of("fabric-1", rounds(1.031)).is_bad
    assert not Row.of("fabric-1", rounds(1.029)).is_bad


def test_cpu_time_decides_nothing() -> None:
    row = Row.of("udp-4K-loop", [(Taken(100.0, 50.0), Taken(100.0, 60.0))] * 6)
    assert row.cpu is not None
    assert row.cpu.is_loss
    assert not row.is_bad
    assert "1.200 more" in row.cells()


class Turns:
    """Trees that take given times, and the order of their turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own_us: Sequence[float]) -> None:
        self.order: list[str] = []
        values = iter(own_us)

        def take(tree: Tree, *_: object) -> Taken:
            self.order.append(tree.label)
            return Taken(next(values) if tree is OWN else 100.0, 0.0)

        monkeypatch.setattr(Tree, "take", take)


def test_turns_go_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, [100.0] * 4)
    compare("udp-4K-loop", OTHER, OWN, 4)
    assert turns.order == ["other", "own", "own", "other"] * 2


def test_the_first_turn_of_a_job_without_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(monkeypatch, [900.0, *[100.0] * 6])
    row = compare("start", OTHER, OWN, 6)
    assert len(turns.order) == 14
    assert row.change == Change(1.0, 1.0, 1.0, is_sure=True)


def test_a_case_that_looks_slower_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Turns(monkeypatch, [200.0] * 6 + [100.0] * 6)
    assert compare("udp-4K-loop", OTHER, OWN, 6).verdict == "same"
    Turns(monkeypatch, [200.0] * 12)
    assert compare("udp-4K-loop", OTHER, OWN, 6).verdict == "**slower**"


def test_a_case_that_cannot_run_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tree: Tree, *_: object) -> Taken:
        if tree is broken:
            raise CannotRunError(tree, "no such option")
        return Taken(1.0, 0.0)

    monkeypatch.setattr(Tree, "take", fail)
    for broken, verdict in ((OTHER, "**not compared**"), (OWN, "**fails here**")):
        row = compare("udp-4K-loop", OTHER, OWN, 6)
        assert (row.verdict, row.is_bad) == (verdict, broken is OWN)
        assert f"cannot run: {broken.label}: no such option" in row.cells()


def ended(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> int:
    monkeypatch.setattr(sys, "argv", ["against", "HEAD"])
    monkeypatch.setattr(against, "measure", lambda *_: list(rows))
    return against.main()


def test_the_exit_status_is_1_after_a_loss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    same, slower = Row.of("loss1", rounds(*[1.0] * 6)), Row.of("loss3", rounds(*[1.1] * 6))
    assert ended(monkeypatch, same, Row("clean", failure="no root")) == 0
    assert "or failed: none. Not compared: clean." in capsys.readouterr().out
    assert ended(monkeypatch, same, slower) == 1
    assert "or failed: loss3. Not compared: none." in capsys.readouterr().out
    assert ended(monkeypatch, same, Row("clean", failure="a rank died", is_broken=True)) == 1


def test_an_unknown_commit_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["against", "no-such-commit"])
    assert against.main() == 2
    assert "no-such-commit is no commit" in capsys.readouterr().err


def test_figures_of_ranks() -> None:
    """In a loop the slowest rank counts; after pauses the last to call."""
    found = [{"values": [1.0, 4.0, 1.0], "cpu_s": 0.5}, {"values": [2.0, 2.0, 3.0], "cpu_s": 1.0}]
    assert taken(found, is_spaced=False, unit="us") == Taken(2e6, 1.5e6)
    assert taken(found, is_spaced=True, unit="us") == Taken(1e6, 1.5e6)
    assert taken(found, is_spaced=False, unit="bytes") == Taken(2.0, 1.5e6)


def test_kept_rows_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [Row.of("loss1", rounds(1.1, 1.2, 1.1, 1.1, 1.1, 1.1)), Row("start", failure="cannot run: other: no memory")]
    monkeypatch.setattr(against, "RESULTS", tmp_path / "speed.json")
    against.keep("v1", "HEAD", 6, rows[:1])
    against.keep("v1", "HEAD", 6, rows[1:])
    against.keep("v2", "HEAD", 6, rows[:1])
    kept = json.loads(against.RESULTS.read_text())
    assert [kept_row(row.name, kept["v1"][row.name]) for row in rows] == rows
    lines = [line for line in history(kept).splitlines() if line.startswith("| v")]
    assert [line.split(" | ")[:3:2] for line in lines] == [["| v1", "start"], ["| v1", "loss1"], ["| v2", "loss1"]]
    assert machine.facts()["cpu"] in history(kept)


def test_every_case_has_its_network_and_the_stress_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Scenario] = []

    @contextlib.contextmanager
    def network(scenario: Scenario) -> Iterator[Scenario]:
        yield scenario

    @contextlib.contextmanager
    def stress(scenario: Scenario) -> Iterator[SimpleNamespace]:
        begun.append(scenario)
        yield SimpleNamespace(error=None)

    monkeypatch.setattr(tree, "Network", network)
    monkeypatch.setattr(tree, "Stress", stress)
    for case in CASES.values():
        with case.network() as made:
            assert (made is None) == (not case.scenario)
    assert len(begun) == sum(bool(case.scenario) for case in CASES.values())
    assert any(scenario.flows for scenario in begun)
