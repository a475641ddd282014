"""The comparison of two backends, on made-up outcomes."""

import json
from dataclasses import asdict
from pathlib import Path

from tests.torch_suite.outcome import KNOWN, Difference, Outcome, differences, read, table


def outcome(backend: str, test: str, ended: str, gate: str = "gloo", detail: str = "") -> Outcome:
    return Outcome(gate, backend, 2, test, ended, detail, 0.5)


def test_only_tests_that_pass_with_the_reference_can_fail() -> None:
    outcomes = [
        *(outcome("gloo", test, ended) for test, ended in {"a": "passed", "b": "failed", "c": "passed"}.items()),
        *(outcome("ours", test, ended) for test, ended in {"a": "failed", "b": "passed"}.items()),
    ]
    found = list(differences(outcomes, "gloo", "ours"))
    assert found == [
        Difference(2, "a", "passed", "failed", ""),
        Difference(2, "b", "failed", "passed", ""),
        Difference(2, "c", "passed", "missing", ""),
    ]
    assert [test.is_failure for test in found] == [True, False, True]


def test_a_known_difference_is_no_failure() -> None:
    assert not Difference(2, next(iter(KNOWN)), "passed", "failed", "").is_failure


def test_the_last_gate_counts() -> None:
    outcomes = [
        outcome("gloo", "a", "skipped"),
        outcome("ours", "a", "skipped"),
        outcome("gloo", "a", "passed", "mpi"),
        outcome("ours", "a", "failed", "mpi"),
    ]
    assert [difference.ours for difference in differences(outcomes, "gloo", "ours")] == ["failed"]
    counted = {line.split()[0]: line.split()[2:] for line in table(outcomes, ["gloo", "ours"]).splitlines()[1:3]}
    assert counted == {"gloo": ["0"] * 6, "mpi": ["1", "0", "0", "0", "1", "0"]}


def test_outcomes_survive_their_file(tmp_path: Path) -> None:
    written = [outcome("gloo", "a", "skipped", detail="no GPU")]
    path = tmp_path / "results.json"
    path.write_text(json.dumps([asdict(test) for test in written]), encoding="utf-8")
    assert read([path]) == written
    assert "    1  no GPU" in table(written, ["gloo"])
