"""Samples of a stream that evaluation reads again and again: read once, and kept on disk.

Evaluation and the probe need the same few thousand images whenever a run starts. They lie in the cache of `datasets`
(HF_DATASETS_CACHE), mapped into memory, so that the processes of a machine share them and a restart reads nothing. The
library's `Dataset.from_generator` keeps rows there, too, but does not notice a file that a crash of the machine has
cut short.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from mpp.config import ImagesConfig
from mpp.data.data_path import BIRDS_FOLDER, describe_source
from mpp.data.folder import SHARD_BUILDERS
from mpp.errors import UserError, one_line
from mpp.runtime.files import complete, hold, short_digest, write_complete

CACHE_FOLDER = "mpp_stream_samples"  # in the cache: one folder for each sample, and nothing else
ROWS_FILE = "rows.arrow"
NOTES_FILE = "notes.json"
ROWS_PER_WRITE = 64  # these are held in memory
FileStamps = list[list[str]]
"""Name, size and stamp of each file, which tell a dataset from others. The folder that they are in does not matter."""
STAMP_FIELDS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of fsspec's file systems that change when a file does; the first that a file has is its stamp."""


def keep_rows(
    rows: Iterable[dict[str, Any]], features: datasets.Features, identity: dict[str, Any]
) -> datasets.Dataset:
    """The rows, mapped from disk; they are only read where they are not there yet.

    Several processes may call it at once: one of them writes. The file is complete or not used: it is written aside,
    synced, renamed, and noted last.

    Args:
        identity: values that identify these rows, as JSON.
    Raises:
        UserError: they cannot be written.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache / CACHE_FOLDER / short_digest([json.dumps(identity).encode()], digits=32)
    try:
        if not is_complete(folder):
            with hold(folder, "HF_DATASETS_CACHE", wait=True):
                if not is_complete(folder):
                    write_rows(folder, rows, features, identity)
    except OSError as error:
        what = "the images of the stream that are evaluated on cannot be kept there"
        raise UserError(f"HF_DATASETS_CACHE is {cache}; {what}: {error}; choose another") from error
    return datasets.Dataset.from_file(str(folder / ROWS_FILE))


def is_complete(folder: Path) -> bool:
    """Whether the rows are all there."""
    try:
        notes = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
        return notes["bytes"] == (folder / ROWS_FILE).stat().st_size
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def write_rows(
    folder: Path, rows: Iterable[dict[str, Any]], features: datasets.Features, identity: dict[str, Any]
) -> None:
    """Write the rows, then the notes that call them complete."""
    (folder / NOTES_FILE).unlink(missing_ok=True)
    with complete(folder / ROWS_FILE) as partial:
        file = pa.OSFile(str(partial), "wb")
        with file, ArrowWriter(stream=file, features=features, writer_batch_size=ROWS_PER_WRITE) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    notes = {"bytes": (folder / ROWS_FILE).stat().st_size, "of": identity}
    write_complete(folder / NOTES_FILE, json.dumps(notes, indent=1))


def list_stream_files(config: ImagesConfig) -> FileStamps | None:
    """The files of a stream; None, with a warning, where they cannot be listed.

    The library streams files of a hub that is out of reach from its cache.
    """
    path = str(BIRDS_FOLDER) if config.path is None else config.path
    try:
        files = list_files(path, config.revision)
        reason = "no files there"
    except Exception as error:  # clients of file systems raise errors of any type
        files = []
        reason = one_line(error)
    if not files:
        unlisted = f"{describe_source(config)} cannot be listed ({reason})"
        print(f"warning: {unlisted}; the images to evaluate on are read again at every start", file=sys.stderr)
        return None
    shards = [file for file in files if file[0].endswith(tuple(SHARD_BUILDERS))]
    return shards or files  # a folder of shards may have other files that change


def list_files(path: str, revision: str | None = None) -> FileStamps:
    """The files at a path, a URL, or a name of the hub. Their contents are not read."""
    system, root = fsspec.url_to_fs(as_url(path, revision))
    folder = root.split("*")[0].rpartition("/")[0]
    if system.isfile(root):
        infos = {root: system.info(root)}
    elif "*" in root:
        infos = system.glob(root, detail=True)
    else:
        infos = system.find(root, detail=True)
        folder = root
    files = []
    for name in sorted(infos):
        info = infos[name]
        stamps = [str(info[field]) for field in STAMP_FIELDS if field in info]
        files.append([name.removeprefix(folder), str(info.get("size")), *stamps[:1]])
    return files


def as_url(path: str, revision: str | None) -> str:
    """A path, a URL, or a name of the hub as fsspec takes it."""
    local = Path(path).expanduser()
    if local.exists():
        return str(local)
    if "://" in path:
        return path
    return f"hf://datasets/{path}@{revision}" if revision else f"hf://datasets/{path}"
