"""The script behind docs/trust.md: it shows the output of commands, and no proof that failed."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import trust


def test_sanitizer_runs_are_counted() -> None:
    runs = ("test/test_a", "asan/test_a", "tsan/test_a", "test/test_b")
    output = "\n".join(f"-- build/{run}" for run in runs) + "\nnative: 4 passed\n"
    assert trust.sanitizers(output) == {
        "test_runs": "2",
        "asan_runs": "1",
        "tsan_runs": "1",
        "passed": "4",
    }


def test_the_last_table_counts() -> None:
    output = "| old |\n|---|\n| 1 |\nwords\n| new | x |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\nend\n"
    figures = trust.table(output)
    assert figures["rows"] == "2"
    assert figures["table"].startswith("| new | x |")


def test_the_counts_of_torchs_tests() -> None:
    output = (
        "gate  world   gloo: passed, failed, skipped    commlayer: passed, failed, skipped\n"
        "gloo      2                    91       0       0                    90       1       0\n"
        "nccl      3                   102      35      24                   108      29      24\n"
        "1 tests pass with gloo and not with commlayer; details in out\n"
    )
    figures = trust.torch_suite(output)
    assert (figures["gloo"], figures["commlayer"], figures["worse"]) == ("193", "198", "1")
    assert figures["table"].splitlines()[-1] == "| nccl | 3 | 102 | 35 | 24 | 108 | 29 | 24 |"


def test_output_without_the_figure_is_no_proof() -> None:
    with pytest.raises(ValueError, match="findings"):
        trust.found(r"^(?P<findings>\d+) findings")("all is well")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "trust.md"
    page.write_text("before\n<!-- proofs:begin -->\nold\n<!-- proofs:end -->\nafter\n")
    here = dataclasses.replace(trust.BENCHMARK, page=page, results=tmp_path / "trust.json")
    monkeypatch.setattr(trust, "BENCHMARK", here)
    monkeypatch.setattr(trust, "LOGS", tmp_path / "logs")
    proof = trust.Proof("echoes", "echo 7 findings", trust.found(r"(?P<findings>\d+) findings"), "{findings} there")
    monkeypatch.setattr(trust, "PROOFS", {"echo": proof, "later": proof})
    return tmp_path


def test_a_proof_is_kept_and_shown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trust.py", "--only", "echo"])
    assert trust.main() == 0
    text = (here / "trust.md").read_text()
    assert "| echoes | 7 there | `echo 7 findings` |" in text
    assert "| echoes | not run yet | `echo 7 findings` |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text


def test_a_failed_proof_does_not_show_its_earlier_result(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"echo": {"command": "echo", "commit": "1", "date": "", "seconds": 1, "figures": {"findings": "0"}}}
    (here / "trust.json").write_text(json.dumps(kept))
    failing = trust.Proof("echoes", "false", trust.found("x"), "")
    monkeypatch.setattr(trust, "PROOFS", {"echo": failing})
    monkeypatch.setattr("sys.argv", ["trust.py"])
    assert trust.main() == 2
    assert "not run yet" in (here / "trust.md").read_text()
    assert json.loads((here / "trust.json").read_text()) == {}
