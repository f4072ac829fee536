"""Pages of the documentation: links lead somewhere, and tables are whole."""

import re
from functools import lru_cache

import pytest
from conftest import ROOT

LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
CODE = re.compile(r"^ *`{3}.*?^ *`{3}$|(?:(?<=\n\n)|\A)(?: {4,}[^\n]*(?:\n|\Z))+|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
END_OF_CELL = re.compile(r"(?<!\\)\|")
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
MOST_LINES = 200
MOST_LINES_OF_THE_FRONT_PAGE = 120
MOST_LINES_IN_ALL = 3400
WRITTEN_BY_PROGRAMS = ("settings.md", "table.md", "ATTRIBUTION.md")


def pages():
    """All pages."""
    folders = [ROOT / name for name in ("mpp", "configs", "evaluation", "tests", ".github")]
    return sorted([ROOT / "README.md", *(page for folder in folders for page in folder.rglob("*.md"))])


@lru_cache
def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    counts, found = {}, set()
    for heading in HEADING.findall(page.read_text()):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "").replace("*", "")
        anchor = NOT_IN_ANCHORS.sub("", text.lower()).replace(" ", "-")
        number = counts.get(anchor, 0)
        counts[anchor] = number + 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page):
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells_as_its_header(page):
    """GitHub cuts off further cells and leaves missing ones empty, without a word."""
    for table in TABLE.findall(page.read_text()):
        header, *rows = table.splitlines()
        cells = len(END_OF_CELL.findall(header))
        assert [row for row in rows if len(END_OF_CELL.findall(row)) != cells] == []


def test_pages_are_short_enough_to_be_read():
    lines = {page: len(page.read_text().splitlines()) for page in pages() if page.name not in WRITTEN_BY_PROGRAMS}
    assert lines[ROOT / "README.md"] <= MOST_LINES_OF_THE_FRONT_PAGE
    assert max(lines.values()) <= MOST_LINES
    assert sum(lines.values()) <= MOST_LINES_IN_ALL
