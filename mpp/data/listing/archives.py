"""Archives of image files: unpacked once, into the cache of `datasets`."""

import hashlib
import shutil
from pathlib import Path

import datasets

from mpp.runtime.lock import hold

ARCHIVE_EXTENSIONS = (".zip", ".tar.gz", ".tgz")


def is_archive(name: str) -> bool:
    """Whether a file's name is that of an archive, in small or capital letters."""
    return name.lower().endswith(ARCHIVE_EXTENSIONS)


def archive_stem(name: str) -> str:
    """An archive's name without its extension."""
    for extension in ARCHIVE_EXTENSIONS:
        if name.lower().endswith(extension):
            return name[: -len(extension)]
    return name


def unpack_archive(archive: Path) -> Path | None:
    """The folder of an archive's files in the cache, complete: known by the archive's path, size and time.

    `datasets` itself would take the files that a full disk left, or those of an earlier archive at the same path.

    Returns:
        None: the file is no archive.
    """
    status = archive.stat()
    identity = (archive.resolve(), status.st_size, status.st_mtime_ns)
    cache = Path(datasets.config.EXTRACTED_DATASETS_PATH).absolute()
    place = cache / hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    complete = place / "files"
    partial = place / "partial"
    with hold(place, "HF_DATASETS_CACHE", wait=True):
        if not complete.exists():
            shutil.rmtree(partial, ignore_errors=True)
            options = datasets.DownloadConfig(cache_dir=partial, disable_tqdm=True)
            unpacked = Path(datasets.DownloadManager(download_config=options).extract(str(archive)))
            if not unpacked.is_relative_to(partial):  # the user's own file, which is no archive
                return None
            unpacked.replace(complete)
            shutil.rmtree(partial, ignore_errors=True)
    return complete
