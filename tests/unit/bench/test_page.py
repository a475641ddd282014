from pathlib import Path

import pytest

from bench.harness.page import write_between

PAGE = "before\n<!-- a:begin -->\nold\n<!-- a:end -->\nbetween\n<!-- b:begin -->\n<!-- b:end -->\nafter\n"


def test_only_text_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    for _ in range(2):
        write_between(page, a="new ±", b="more")
        text = page.read_text(encoding="utf-8")
        assert text == PAGE.replace("old", "new ±").replace("<!-- b:begin -->", "<!-- b:begin -->\nmore")


@pytest.mark.parametrize("text", ["", "<!-- b:begin -->", "<!-- b:end -->", PAGE.replace("b:end", "c:end")])
def test_a_page_without_a_marker_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"^page\.md lacks <!-- [ab]:begin --> or <!-- [ab]:end -->: add both"):
        write_between(page, a="new", b="new")
    assert page.read_text() == text
