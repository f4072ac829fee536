"""Strings that a user sees are in plain English: the worst patterns stay out."""

import re

import pytest
from strings import shown_strings

PLAIN_WORDS = {
    r"(?<!{)\bbeside\b": "next to",
    r"\bin place of\b": "instead of",
    r"\b(go|goes|gone) on\b": "continue",
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
STRINGS = shown_strings()


@pytest.mark.parametrize("pattern", PLAIN_WORDS)
def test_strings_use_the_plain_word(pattern):
    found = [f"{each.place}: {each.text}" for each in STRINGS if re.search(pattern, each.text)]
    left = [line for line in found if not line.startswith(("mpp/data/decoding/", "mpp/prepare.py"))]
    assert not left, f"write: {PLAIN_WORDS[pattern]}"
