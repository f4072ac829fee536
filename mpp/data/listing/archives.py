"""Archives of image files: unpacked once, into the cache of `datasets`."""

import os
import shutil
import zipfile
from pathlib import Path

import datasets

from mpp.runtime.files import hold, short_digest, write_complete

ARCHIVE_EXTENSIONS = (".zip", ".tar.gz", ".tgz")
COUNT_FILE = "count"  # next to the files: how many there are


def is_archive(name: str) -> bool:
    """Whether a file's name is that of an archive, in small or capital letters."""
    return name.lower().endswith(ARCHIVE_EXTENSIONS)


def archive_stem(name: str) -> str:
    """An archive's name without its extension."""
    for extension in ARCHIVE_EXTENSIONS:
        if name.lower().endswith(extension):
            return name[: -len(extension)]
    return name


def is_zip(archive: Path) -> bool:
    """Whether a file is a zip archive, by its name and its content."""
    return archive.name.lower().endswith(".zip") and zipfile.is_zipfile(archive)


def unzip(archive: Path, folder: Path) -> Path:
    r"""Unpack a zip archive into a folder; \ is between folders too, as Windows PowerShell 5 writes it."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(archive) as file:
        for entry in file.infolist():
            entry.filename = entry.filename.replace("\\", "/")
            file.extract(entry, folder)  # which leaves out `..` and the first /
    return folder


def untar(archive: Path, cache: Path) -> Path | None:
    """The folder in a cache into which `datasets` unpacks an archive; None: the file is no archive."""
    options = datasets.DownloadConfig(cache_dir=cache, disable_tqdm=True)
    unpacked = Path(datasets.DownloadManager(download_config=options).extract(str(archive)))
    return unpacked if unpacked.is_relative_to(cache) else None  # else it is the file itself


def count_files(folder: Path) -> int:
    """Number of files in a folder and all below it."""
    return sum(len(files) for _, _, files in os.walk(folder))


def is_whole(place: Path) -> bool:
    """Whether the files of an archive are all there."""
    try:
        count = int((place / COUNT_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    files = place / "files"
    return files.is_dir() and count_files(files) == count


def unpack_archive(archive: Path) -> Path | None:
    """The folder of an archive's files in the cache, complete: known by the archive's path, size and time.

    `datasets` itself would take the files that a full disk left, or those of an earlier archive at the same path. Where
    some are gone, since clusters delete old files, all are unpacked again.

    Returns:
        None: the file is no archive.
    """
    status = archive.stat()
    identity = (archive.resolve(), status.st_size, status.st_mtime_ns)
    cache = Path(datasets.config.EXTRACTED_DATASETS_PATH).absolute()
    place = cache / short_digest([repr(identity).encode()])
    complete = place / "files"
    partial = place / "partial"
    if is_whole(place):  # perhaps in a cache of others, where nothing can be locked
        return complete
    with hold(place, "HF_DATASETS_CACHE", wait=True):
        if not is_whole(place):
            for folder in (partial, complete):
                shutil.rmtree(folder, ignore_errors=True)
            unpacked = unzip(archive, partial / "files") if is_zip(archive) else untar(archive, partial)
            if unpacked is None:
                return None
            write_complete(place / COUNT_FILE, str(count_files(unpacked)))
            unpacked.replace(complete)
            shutil.rmtree(partial, ignore_errors=True)
    return complete
