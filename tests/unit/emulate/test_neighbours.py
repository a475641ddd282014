"""The kernel's table of neighbours is shared by all emulated hosts."""

from pathlib import Path

from commlayer.tools.emulate.neighbours import entries, excess


def test_each_host_knows_the_others() -> None:
    assert entries(4, 2) == 24


def test_a_small_table_is_named(tmp_path: Path) -> None:
    limit = tmp_path / "gc_thresh3"
    limit.write_text("1024\n")
    assert excess(16, 1, limit) is None
    assert excess(32, 1, limit) is None
    text = excess(33, 1, limit)
    assert text is not None
    assert "1056 entries" in text
    assert "takes 1024" in text
    assert "gc_thresh3" in text


def test_an_unknown_limit_is_no_complaint(tmp_path: Path) -> None:
    assert excess(150, 16, tmp_path / "none") is None
