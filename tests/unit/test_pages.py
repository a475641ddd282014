"""The pages of the documentation name files, headings and targets that exist, and figures that their pages have."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

import commlayer
from docs import pages as site
from tests import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
FOLDERS = "commlayer|native|bench|tests|docs|examples|requirements"
SOURCES = ("commlayer", "native")
SUFFIXES = (".py", ".c", ".h")
STORE_ENTRY = "commlayer/job"  # looks like a path


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def links(text: str) -> list[str]:
    """Targets of links and images that are no addresses."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(text: str) -> list[str]:
    """Everything in the text that looks like a path of the repository."""
    found = [path.rstrip(".") for path in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w.*/-]*", text)]
    return [path for path in found if path != STORE_ENTRY]


def names_of_tree(text: str) -> set[str]:
    """The paths that a tree names: one indented line per folder ("name/") or row of names, then its meaning."""
    found: set[str] = set()
    folders: list[str] = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names, _, meaning = line.strip().partition("  ")
        for name in names.split(", "):
            found.add("/".join([*folders[:depth], name.rstrip("/")]))
        if names.endswith("/") and meaning:
            folders = [*folders[:depth], names.rstrip("/")]
    return found


def exists(path: str) -> bool:
    """Whether there is such a file or folder; a path without suffix may be a module or a noun in C."""
    return any((ROOT / f"{path}{suffix}").exists() for suffix in ("", *SUFFIXES))


def tree() -> set[str]:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return names_of_tree(page.partition("```\n")[2].partition("```")[0])


def sources() -> set[str]:
    """Every module of the package and every noun of the engine, without suffix; tests, simulators, tools: rooms."""
    found = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            whole = relative(path).startswith(("native/sim/", "native/fabric/"))
            whole |= relative(path).startswith(("native/tests/", "native/fuzz/", "native/kernels/", "native/include/"))
            if path.suffix in SUFFIXES and path.name[0] != "_":
                found.add(relative(path.parent if whole else path.with_suffix("")))
    return {re.sub(r"^(commlayer/tools/\w+|native/kernels)/.*", r"\1", name) for name in found}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_exist(page: Path) -> None:
    missing = [path for path in paths(page.read_text(encoding="utf-8")) if not list(ROOT.glob(path))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"(?:^ *|`)make (?!build/)([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets


def programs(text: str) -> list[str]:
    """The blocks that say that they are Python."""
    return [
        textwrap.dedent(block)
        for _, block in re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_is_python(page: Path) -> None:
    for program in programs(page.read_text(encoding="utf-8")):
        ast.parse(program)


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs/README.md"
    listed = [(index.parent / link).resolve() for link in links(index.read_text(encoding="utf-8"))]
    assert sorted(listed) == sorted({*PAGES} - {index})


def test_the_tree_names_what_is_there() -> None:
    assert {name for name in tree() if not exists(name)} == set()


def test_the_tree_names_every_source() -> None:
    assert sources() - tree() == set()


def misread(text: str) -> list[str]:
    """Lines that GitHub and the site's Markdown read differently: what belongs to an item of a list is indented by four
    spaces after an empty line, and a list or table follows an empty line."""
    found = []
    before, fenced = "", False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        indent = len(line) - len(line.lstrip())
        if not fenced and line.strip():
            item = r" *([-*]|\d+\.) "
            begins = re.match(item, line) and not re.match(item, before) and not before.startswith(" ")
            if (begins and before) or (not before and 0 < indent < 4):
                found.append(line)
            if line.startswith("|") and before and not before.startswith(("|", "<!--")):
                found.append(line)
        fenced ^= fence
        before = line
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pages_read_alike_on_the_site(page: Path) -> None:
    assert misread(page.read_text(encoding="utf-8")) == []


def test_misread_markdown() -> None:
    assert misread("text\n\n- item\n\n    more\n- item\n  more\n\n```\n  code\n- code\n```\n\n| a |\n| b |") == []
    assert misread("text\n- item") == ["- item"]
    assert misread("1. item\n\n   more") == ["   more"]
    assert misread("text\n| a |") == ["| a |"]


def test_the_api_page_lists_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^<!-- ::: commlayer\.(\w+)(?: -->)?$", page, re.MULTILINE)
    assert sorted(listed) == sorted(commlayer.__all__)


@pytest.mark.parametrize(
    ("page", "name", "kind"),
    [
        ("elastic", "job", "Job"),
        ("elastic", "sampler", "Sampler"),
        ("local", "local", "LocalSteps"),
        ("publish", "publisher", "Publisher"),
        ("publish", "subscription", "Subscription"),
        ("publish", "version", "Version"),
        ("settings", "HookState", "HookState"),
    ],
)
def test_the_api_page_lists_the_members_that_a_page_uses(page: str, name: str, kind: str) -> None:
    api = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.search(rf"<!-- ::: commlayer\.(?:[\w.]+\.)?{kind}\n.*?members: \[(.*?)\]", api, re.DOTALL)
    assert listed
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    used = set(re.findall(rf"(?<![\w./-]){name}\.([a-z]\w*)", text)) - {"md"}
    assert used
    assert used - {each.strip() for each in listed[1].split(",")} == set()


def test_links_of_the_site() -> None:
    seen: list[Path] = []
    text = "[a](../README.md#x) ![b](overlap_pipeline.png) [c](../native/kernels/codec.h) [d](https://x.org/a) [e](#f)"
    assert site.converted(text, ROOT / "docs/loss.md", seen.append) == (
        "[a](index.md#x) ![b](overlap_pipeline.png) [c](files/native/kernels/codec.h.md) [d](https://x.org/a) [e](#f)"
    )
    assert seen == [ROOT / "README.md", ROOT / "docs/overlap_pipeline.png", ROOT / "native/kernels/codec.h"]
    assert site.converted("[a](docs/loss.md)", ROOT / "README.md", seen.append) == "[a](loss.md)"
    assert site.converted("[a](../README.md)", ROOT / "docs/tutorials/ddp.md", seen.append) == "[a](../pages.md)"
    assert site.converted("<!-- ::: commlayer.Policy -->", ROOT / "docs/api.md", seen.append) == "::: commlayer.Policy"


def test_the_api_page_lists_functions_with_the_names_of_their_modules() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for module in (commlayer.planner, commlayer.scheduler):
        names = [name for name in module.__all__ if (Path(str(module.__file__)).parent / f"{name}.py").exists()]
        assert names
        for name in names:  # a directive for the module would find the module of the same name
            assert f"<!-- ::: {module.__name__}.{name}.{name} -->" in page


def test_names_of_files_become_titles() -> None:
    titles = {"deploy.md": "Two machines"}
    page = ROOT / "docs/tutorials/ddp.md"
    text = "[deploy.md](../deploy.md#start) [here](../deploy.md) [a.md](../a.md)"
    assert site.titled(text, page, titles) == "[Two machines](../deploy.md#start) [here](../deploy.md) [a.md](../a.md)"


def test_navigation_of_the_site() -> None:
    index = "# Pages\n\n## One\n\n| page | subject |\n|---|---|\n| [A](a.md) | [x](x.md) |\n"
    index += "\n## Two\n\n| [B](../README.md) | b |\n"
    assert site.navigation(index) == [{"One": [{"A": "a.md"}]}, {"Two": [{"B": "index.md"}]}]


def test_sources_of_the_site(tmp_path: Path) -> None:
    site.write(tmp_path)
    made = sorted((tmp_path / "pages").rglob("*.md"))
    assert len(made) > len(PAGES)  # the files that they link to
    for page in made:
        if "files" not in page.parts:
            for link in links(page.read_text(encoding="utf-8")):
                assert not link.partition("#")[0] or (page.parent / link.partition("#")[0]).exists(), (page, link)
    assert "nav:" in (tmp_path / "mkdocs.yml").read_text(encoding="utf-8")


def test_loads_from_other_hosts_are_found() -> None:
    assert site.loads('<a href="https://x.org"><link rel="canonical" href="https://x.org"><script src="a.js">') == []
    assert site.loads("<script src=https://x.org/a.js></script><img src='//y.org/b.png'>") == [
        "https://x.org/a.js",
        "//y.org/b.png",
    ]


def has_figure(page: str, figure: str) -> bool:
    """Whether a cell of the page's tables begins with this figure, or with one that rounds to it."""
    if re.search(rf"\| {re.escape(figure)}(?![\d.])", page):
        return True
    digits = len(figure.partition(".")[2])
    return any(f"{float(cell):.{digits}f}" == figure for cell in re.findall(r"\| (\d+\.\d+)(?![\d.])", page))


def test_figures_of_the_readme_are_those_of_the_page_that_has_them() -> None:
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    pages = {
        "bench.first_light": "results",
        "bench.stress": "stress",
        "bench.time_to_loss": "training",
        "bench.compression": "compression",
        "bench.overlap": "overlap",
        "bench.overlap_gpt": "overlap",
        "bench.overlap_pipeline": "overlap",
        "bench.overlap_tp": "overlap",
    }
    measured = [line for line in rows if "`python -m " in line]
    assert len(measured) > 2 * len(pages)
    for line in measured:
        _, _, ours, other, ratio, command = (cell.strip() for cell in line.strip("|").split("|"))
        page = ROOT / f"docs/{pages[command.split()[2].strip('`')]}.md"
        figures = [cell.removesuffix(" s") for cell in (ours, other) if cell]
        if page.stem == "overlap":  # its columns have the unit
            figures = [figure.removesuffix(" ms") for figure in figures]
        figures += [ratio.removesuffix("x")] * bool(ratio)
        assert len(figures) >= 2, line
        text = page.read_text(encoding="utf-8")
        assert [figure for figure in figures if not has_figure(text, figure)] == [], line


def test_figures_of_the_comparison_are_those_of_the_pages_that_have_them() -> None:
    pages = {"bench.first_light": "results", "bench.stress": "stress", "bench.compression": "compression"}
    found = 0
    for line in (ROOT / "docs/comparison.md").read_text(encoding="utf-8").splitlines():
        if command := re.search(r"`python -m (bench\.\w+)", line):
            page = (ROOT / f"docs/{pages[command[1]]}.md").read_text(encoding="utf-8").replace("**", "")
            figures = re.findall(r"\d+(?:\.\d+)?(?: µs| ms| GB/s|%|x)", " | ".join(line.split(" | ")[1:3]))
            assert [figure for figure in figures if not has_figure(page, figure)] == [], line
            found += len(figures)
    assert found >= 12


def test_a_figure_may_be_rounded() -> None:
    page = "| a | 1.551 (1.5 to 1.6) | 95.4% | 11 µs |"
    assert has_figure(page, "1.55")
    assert has_figure(page, "95.4%")
    assert has_figure(page, "11 µs")
    assert not has_figure(page, "1.56")
    assert not has_figure(page, "1.5")


def test_names_of_a_tree() -> None:
    text = "one/     the first\n  a, b   files\n  two/   a folder\n    c    another\nbench/   last"
    assert names_of_tree(text) == {"one", "one/a", "one/b", "one/two", "one/two/c", "bench"}


def test_paths_in_a_text() -> None:
    assert paths("see `native/plan/plan.h`, docs/a.md. Not https://x.org/docs/b.md, nor out/docs/c.md") == [
        "native/plan/plan.h",
        "docs/a.md",
    ]
