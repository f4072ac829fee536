"""Paths that libraries take for patterns or URLs, under other names."""

import hashlib
import os
import re
from pathlib import Path

import datasets

FOLDER = "mpp_links"  # in the library's cache
PLAIN = re.compile(r"[\w./+,=@ -]+", re.ASCII)


def plain_path(path: Path) -> str:
    """A path to the same file or folder without signs that the library reads as a pattern or a URL: a link, if need be.

    The link's name depends on the path alone, by which the library knows what it has cached.
    """
    whole = os.path.abspath(path)
    if PLAIN.fullmatch(whole):
        return whole
    links = Path(datasets.config.HF_DATASETS_CACHE) / FOLDER / hashlib.sha256(os.fsencode(whole)).hexdigest()[:16]
    links.mkdir(parents=True, exist_ok=True)
    link = links / (path.name if PLAIN.fullmatch(path.name) else f"images{path.suffix}")
    if not link.is_symlink():
        aside = links / f"{os.getpid()}.partial"
        aside.unlink(missing_ok=True)
        aside.symlink_to(whole)
        aside.replace(link)
    return str(link)
