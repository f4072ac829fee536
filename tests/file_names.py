"""Names of files and folders that a file system takes, however awkward."""

import os
import re

from hypothesis import strategies as st

from mpp.data.folder import SPLIT_WORDS

ACUTE = "\u00e9"
DECOMPOSED = "e\u0301"  # the same letter
AWKWARD_NAMES = [
    *("a b", " a", "a ", ACUTE, DECOMPOSED, "猫", "😀", "-x", "#1", "100%", "a%20b", "[v1]", "{a,b}", "a::b", "*"),
    *("?", "~", "$HOME", "\\", "a\nb", "a..", "'", '"', "NA", "null", "nan", "None", "True", "x" * 240),
]
NUMBER_START = re.compile(r"\s*[+-]?[0-9.]")


def is_visible_name(text: str) -> bool:
    """Whether an image can be called so, and is not hidden."""
    return not text.startswith(".") and len(os.fsencode(f"{text}.png")) <= 255


def is_class_name(text: str) -> bool:
    """Whether a folder of this name is a class. Numbers have a test of their own."""
    return bool(text.strip()) and text.lower() not in SPLIT_WORDS and not NUMBER_START.match(text)


CHARACTERS = st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",))
FILE_NAMES = (st.sampled_from(AWKWARD_NAMES) | st.text(CHARACTERS, min_size=1, max_size=8)).filter(is_visible_name)
CLASS_NAMES = FILE_NAMES.filter(is_class_name)
