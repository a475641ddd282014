"""Pages of the documentation with parts that come from results: each part stands between two markers."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, **parts: str) -> None:
    """Replaces the text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` for each part NAME.

    Raises ValueError, and leaves the page as it is, if it lacks a marker.
    """
    content = page.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = content.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"{page.name} lacks {begin} or {end}: add both")
        content = f"{before}{begin}\n{text}\n{end}{after}"
    page.write_text(content, encoding="utf-8")
