"""Links to paths that `datasets` would take for patterns or URLs."""

import os
import re
from pathlib import Path

import datasets

from mpp.runtime.files import short_digest

LINKS_FOLDER = "mpp_links"  # in the cache of `datasets`
PLAIN_PATH = re.compile(r"[\w./+,=@ -]+", re.ASCII)


def plain_path(path: Path) -> str:
    """A path to the same file or folder without signs that `datasets` reads as a pattern or a URL: a link, if need be.

    The link's name depends only on the path: `datasets` finds its cached data by that name.
    """
    target = os.path.abspath(path)
    if PLAIN_PATH.fullmatch(target):
        return target
    folder = Path(datasets.config.HF_DATASETS_CACHE) / LINKS_FOLDER / short_digest([os.fsencode(target)])
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / (path.name if PLAIN_PATH.fullmatch(path.name) else f"images{path.suffix}")
    if not link.is_symlink():
        partial = folder / f"{os.getpid()}.partial"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        partial.replace(link)
    return str(link)
