"""Pages of the documentation with a part that comes from results: what is between two markers."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def fill(page: Path, text: str) -> None:
    """Replaces what is between the markers. Raises ValueError when the page does not have them."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page.name} has no {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
