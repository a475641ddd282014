from __future__ import annotations

from pathlib import Path

import pytest

from bench.page import BEGIN, END, fill


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        fill(page, "new ±")
        assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\nnew ±\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END])
def test_a_page_without_markers_is_refused(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        fill(page, "new")
    assert page.read_text() == text
