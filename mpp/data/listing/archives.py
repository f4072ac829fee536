"""Archives of image files: unpacked once, into the library's cache."""

import hashlib
import shutil
from pathlib import Path

import datasets

from mpp.runtime.lock import hold

ARCHIVES = (".zip", ".tar.gz", ".tgz")


def is_archive(name: str) -> bool:
    """Whether a file's name is that of an archive, in small or capital letters."""
    return name.lower().endswith(ARCHIVES)


def stem_of(name: str) -> str:
    """An archive's name without its ending."""
    return next(name[: -len(end)] for end in ARCHIVES if name.lower().endswith(end))


def unpacked(archive: Path) -> Path:
    """An archive's files in the library's cache, whole: known by the archive's place, size and time.

    The library alone would take what a full disk has left of them, or those of an earlier archive in that place.

    Returns:
        Their folder; the archive itself where it is none.
    """
    known = archive.resolve(), archive.stat().st_size, archive.stat().st_mtime_ns
    cache = Path(datasets.config.EXTRACTED_DATASETS_PATH).absolute()
    place = cache / hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    whole, aside = place / "files", place / "partial"
    with hold(place, "HF_DATASETS_CACHE", wait=True):
        if not whole.exists():
            shutil.rmtree(aside, ignore_errors=True)
            options = datasets.DownloadConfig(cache_dir=aside, disable_tqdm=True)
            made = Path(datasets.DownloadManager(download_config=options).extract(str(archive)))
            if not made.is_relative_to(aside):  # the user's own file, which is no archive
                return archive
            made.replace(whole)
            shutil.rmtree(aside, ignore_errors=True)
    return whole
