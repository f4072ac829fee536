"""Strings that a user sees, docstrings, comments and pages are in plain English: the worst patterns stay out."""

import re

import pytest
from conftest import ROOT
from strings import remarks, shown_strings

PLAIN_WORDS = {
    r"(?<![{*])\bbeside\b(?!:)": "next to",
    r"\bin place of\b": "instead of",
    r"\b(go|goes|gone|going|went) on\b": "continue",
    r"\bput back\b": "restore",
    r"\banew\b": "again",
    r"\blooked at\b": "used, or sampled",
    r"\btold from\b": "compared with",
    r"\bunder way\b": "running",
    r"\b(that|which) is written\b": "to write",
    r"\ba floor\b": "a colour baseline",
    r"^(Which|What|Where|How|After how many) ": "the noun first",
}
"""Pattern -> the plain word."""
STRINGS = [*shown_strings(), *remarks()]
GENERATED_PAGES = ("table.md", "settings.md", "ATTRIBUTION.md")
PAGES = [
    page
    for folder in ("", "configs", "evaluation", "mpp", "tests", ".github")
    for page in (ROOT / folder).glob("**/*.md" if folder else "*.md")
    if page.name not in GENERATED_PAGES
]


@pytest.mark.parametrize("pattern", PLAIN_WORDS)
def test_strings_use_the_plain_word(pattern):
    found = [f"{each.place}: {each.text}" for each in STRINGS if re.search(pattern, each.text)]
    assert not found, f"write: {PLAIN_WORDS[pattern]}"


@pytest.mark.parametrize("pattern", [pattern for pattern in PLAIN_WORDS if not pattern.startswith("^")])
def test_pages_use_the_plain_word(pattern):
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(pattern, line):
                found.append(f"{page.relative_to(ROOT)}:{number}: {line}")
    assert not found, f"write: {PLAIN_WORDS[pattern]}"
