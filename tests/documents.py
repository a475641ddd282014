"""Tables of the documents in docs/, for tests that compare them with the code."""

from tests import ROOT

DOCS = ROOT / "docs"


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row; the first is its head."""
    lines = (DOCS / document).read_text().partition(f"## {heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]
