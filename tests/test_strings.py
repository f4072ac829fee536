"""Strings of the code, docstrings, comments and pages are in plain English: the worst patterns stay out."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from conftest import ROOT
from test_pages import WRITTEN_BY_PROGRAMS, pages

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
SEVERAL_WORDS = re.compile(r"[A-Za-z].*\s.*[A-Za-z]", re.DOTALL)


def shown_in_code():
    """Place and text of each string of several words, and of each comment."""
    for path in (path for folder in ("mpp", "evaluation") for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        constants = [node for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "value", None), str)]
        found = [(node.lineno, node.value) for node in constants if SEVERAL_WORDS.search(node.value)]
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        found += [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
        for line, text in found:
            yield f"{path.relative_to(ROOT)}:{line}", " ".join(text.split())


def lines_of_pages() -> Iterator[tuple[str, str]]:
    for page in pages():
        if page.name not in WRITTEN_BY_PROGRAMS:
            for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
                yield f"{page.relative_to(ROOT)}:{number}", line


CODE, PAGES = [*shown_in_code()], [*lines_of_pages()]


@pytest.mark.parametrize("pattern", PLAIN_WORDS)
def test_strings_and_pages_use_the_plain_word(pattern):
    texts = CODE if pattern.startswith("^") else CODE + PAGES
    found = [f"{place}: {text}" for place, text in texts if re.search(pattern, text)]
    assert not found, f"write: {PLAIN_WORDS[pattern]}"
