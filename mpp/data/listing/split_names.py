"""Names of splits: the words for them in names of folders and shards and in cells of lists, and their order."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Word -> split."""
USUAL_SPLITS = [*dict.fromkeys(SPLIT_WORDS.values())]
ANY_SPLIT_WORD = "|".join(SPLIT_WORDS)
SPLIT_WORD_INSIDE = re.compile(rf"(?:^|[^a-z])({ANY_SPLIT_WORD})(?:[^a-z]|$)")
SPLIT_WORD_AT_END = re.compile(rf"(?:^|[^a-z])({ANY_SPLIT_WORD})$")
NUMBERED_SHARD = re.compile(r"(\w+)-\d+-of-\d+\.")
SHARD_OF_SET = re.compile(r"(.*?([^/]+))-(\d+)-of-(\d+)\.\w+")
"""Path of a shard that says how many there are: its beginning, the set's name, the shard's number, the set's size."""


def split_order(name: str) -> tuple[int, str]:
    """A key that sorts splits in the usual order: training first."""
    position = USUAL_SPLITS.index(name) if name in USUAL_SPLITS else len(USUAL_SPLITS)
    return position, name


def split_of_cell(value: Any) -> str | None:
    """The split that a list's cell names; None: the cell is blank."""
    if value is None:
        return None
    text = str(value).strip()
    return SPLIT_WORDS.get(text.lower(), text) or None


def split_of_shard(path: str, folders: Sequence[str]) -> str:
    """The split of a shard by its name: NAME of NAME-00000-of-00012, or a word such as train, val or test.

    Args:
        folders: names of the folders around it, whose words count if its own name has none.
    Returns:
        train, where there is no such word and no NAME.
    """
    name = os.path.basename(path)
    numbered = NUMBERED_SHARD.match(name)
    own_words = () if numbered and not SPLIT_WORD_AT_END.search(numbered[1].lower()) else (name,)
    for text in (*own_words, *reversed(folders)):
        word = SPLIT_WORD_INSIDE.search(text.lower())
        if word:
            return SPLIT_WORDS[word[1]]
    return numbered[1] if numbered else "train"


def incomplete_sets(paths: Iterable[str]) -> list[str]:
    """Lines about sets of shards of which some are not there, or that are there in several sizes, by their names."""
    numbers_by_size: dict[tuple[str, str], dict[int, set[str]]] = {}
    for path in paths:
        if shard := SHARD_OF_SET.fullmatch(path):
            sizes = numbers_by_size.setdefault((shard[1], shard[2]), {})
            sizes.setdefault(int(shard[4]), set()).add(shard[3])
    lines = []
    for (_, name), sizes in numbers_by_size.items():
        for size, numbers in sizes.items():
            if len(numbers) < size:
                lines.append(f"{len(numbers)} of {size} shards are there of {name}: the others' images are missing")
        if len(sizes) > 1:
            counts = " and ".join(map(str, sorted(sizes)))
            lines.append(f"there are sets of {counts} shards of {name}: their images may count twice")
    return lines
