"""Makes the sources of the documentation site from docs/, README.md and CONTRIBUTING.md: `make site`.

    python -m docs.pages out/site            # writes out/site/mkdocs.yml and out/site/pages/
    python -m docs.pages --check out/site    # fails if a built page loads anything from another host

The pages in docs/ are written for readers of the repository: their links are relative to the file, also to files
outside of docs/. On the site README.md is the start page, and every other linked file of the repository gets a page
that shows it. The sections of docs/README.md are the navigation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs/README.md"
NAMES = {ROOT / "README.md": "index.md", INDEX: "pages.md", ROOT / "CONTRIBUTING.md": "contributing.md"}
"""Places on the site of pages that have another one than in docs/."""

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml"}


def place(path: Path) -> str:
    """The path on the site of a file of the repository."""
    if path in NAMES:
        return NAMES[path]
    if path.is_relative_to(INDEX.parent) and path.suffix in (".md", ".svg", ".png"):
        return path.relative_to(INDEX.parent).as_posix()
    return f"files/{path.relative_to(ROOT).as_posix()}.md"


def converted(text: str, page: Path, linked: Callable[[Path], None]) -> str:
    """A page's text with the links of the site. Calls `linked` with each file of the repository that it links to."""

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        if "://" in match[1] or not target.is_file():
            return match[1]
        linked(target)
        return os.path.relpath(place(target), Path(place(page)).parent)

    text = LINK.sub(link, text)
    return re.sub(r"^<!-- (::: .*?) -->$", r"\1", text, flags=re.MULTILINE | re.DOTALL)  # invisible in the repository


def titled(text: str, page: Path, titles: dict[str, str]) -> str:
    """A page's text, with the titles of pages instead of links' texts that are names of files."""

    def title(match: re.Match[str]) -> str:
        target = os.path.normpath(Path(place(page)).parent / match[2])
        return f"[{titles.get(target, match[1])}]({match[2]}"

    return re.sub(r"\[([\w/]+\.md)\]\(([^)\s#]+)(?=[)#])", title, text)


def shown(path: Path) -> str:
    """The page of a file that is not written in Markdown."""
    name, language = path.relative_to(ROOT), LANGUAGES.get(path.suffix, "text")
    return f"# {name}\n\n`````{language}\n{path.read_text(encoding='utf-8')}`````\n"


def navigation(index: str) -> list[dict[str, list[dict[str, str]]]]:
    """The sections of the index, each with the titles of its pages and their places on the site."""
    sections = []
    for section in index.split("\n## ")[1:]:
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)#]+)\) \|", section, re.MULTILINE)
        pages = [{title: place(Path(os.path.normpath(INDEX.parent / link)))} for title, link in rows]
        sections.append({section.partition("\n")[0]: pages})
    return sections


def write(folder: Path) -> None:
    """Writes the sources of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    index = navigation(INDEX.read_text(encoding="utf-8"))
    titles = {
        at: title for section in index for pages in section.values() for page in pages for title, at in page.items()
    }
    waiting = sorted((ROOT / "docs").rglob("*.md"))
    seen = set(waiting)

    def linked(path: Path) -> None:
        if path not in seen:
            seen.add(path)
            waiting.append(path)

    while waiting:
        path = waiting.pop()
        target = folder / "pages" / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copy(path, target)
        else:
            text = shown(path)
            if path.suffix == ".md":
                text = titled(converted(path.read_text(encoding="utf-8"), path, linked), path, titles)
            target.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "docs/site.css", folder / "pages")
    settings = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    (folder / "mkdocs.yml").write_text(f"{settings}nav: {json.dumps(index)}\n", encoding="utf-8")  # JSON is YAML


def loads(html: str) -> list[str]:
    """Addresses on other hosts that a browser would load with this page; links for readers do not count."""
    tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", html)
    return [
        url
        for tag in tags
        if 'rel="canonical"' not in tag
        for url in re.findall(r"(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)", tag)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="check the built pages")
    options = parser.parse_args()
    if not options.check:
        write(options.folder)
        return
    pages = sorted((options.folder / "html").rglob("*.html"))
    found = [f"{page}: {url}" for page in pages for url in loads(page.read_text(encoding="utf-8"))]
    if found or not pages:
        sys.exit("\n".join(["pages that load from other hosts, or no pages:", *found]))
    print(f"{len(pages)} pages: {options.folder}/html/index.html")


if __name__ == "__main__":
    main()
