"""Images of a stream that are looked at again and again: read once, and kept on disk.

Evaluation and the probe need the same few thousand images whenever a run starts. They lie in the cache of `datasets`
(HF_DATASETS_CACHE), mapped into memory, so that the processes of a machine share them and a restart reads nothing. The
library's `Dataset.from_generator` keeps rows there, too, but does not notice what a crash of the machine cut short.
"""

import hashlib
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
from mpp.data.listing.formats import SHARDS
from mpp.errors import UserError, one_line
from mpp.runtime.files import complete, write_complete
from mpp.runtime.lock import hold

FOLDER = "mpp_stream_samples"  # in the cache: one folder for each sample, and nothing else
ROWS, NOTES = "rows.arrow", "notes.json"
BLOCK = 64  # rows written at a time: what bounds the memory
Files = list[list[str]]
"""What tells data from others: name, size and stamp of each file. Where they lie does not matter."""
STAMPS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")  # fsspec's words


def keep(rows: Iterable[dict[str, Any]], features: datasets.Features, identity: dict[str, Any]) -> datasets.Dataset:
    """The rows, mapped from disk; they are only read where they are not there yet.

    Several processes may call it at once: one of them writes. The file is complete or not used: it is written aside,
    synced, renamed, and noted last.

    Args:
        identity: what the rows are of, as JSON: other rows have another.
    Raises:
        UserError: they cannot be written.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache / FOLDER / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    try:
        if not is_whole(folder):
            with hold(folder, "HF_DATASETS_CACHE", wait=True):
                if not is_whole(folder):
                    write(folder, rows, features, identity)
    except OSError as error:
        what = "the images of the stream that are evaluated on cannot be kept there"
        raise UserError(f"HF_DATASETS_CACHE is {cache}; {what}: {error}; choose another") from error
    return datasets.Dataset.from_file(str(folder / ROWS))


def is_whole(folder: Path) -> bool:
    """Whether the rows are all there."""
    try:
        return json.loads((folder / NOTES).read_text(encoding="utf-8"))["bytes"] == (folder / ROWS).stat().st_size
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False


def write(folder: Path, rows: Iterable[dict[str, Any]], features: datasets.Features, identity: dict[str, Any]) -> None:
    """Write the rows block by block, then the notes that call them complete."""
    (folder / NOTES).unlink(missing_ok=True)
    with complete(folder / ROWS) as partial:
        file = pa.OSFile(str(partial), "wb")
        with file, ArrowWriter(stream=file, features=features, writer_batch_size=BLOCK) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    notes = {"bytes": (folder / ROWS).stat().st_size, "of": identity}
    write_complete(folder / NOTES, json.dumps(notes, indent=1))


def list_files(config: ImagesConfig) -> Files | None:
    """The files of a stream; None, with a warning, where they cannot be listed.

    Of a hub that is out of reach, the library streams what it has from earlier.
    """
    try:
        found, reason = (
            files_of(str(BIRDS_FOLDER) if config.path is None else config.path, config.revision),
            "no files there",
        )
    except Exception as error:  # clients of file systems raise whatever they like
        found, reason = [], one_line(error)
    if found:  # a folder of shards may have other files that change
        return [each for each in found if each[0].endswith(tuple(SHARDS))] or found
    unlisted = f"{describe_source(config)} cannot be listed ({reason})"
    print(f"warning: {unlisted}; the images to evaluate on are read at every start", file=sys.stderr)
    return None


def files_of(path: str, revision: str | None = None) -> Files:
    """The files at a path, a URL, or a name of the hub. Nothing of their contents is read."""
    local = Path(path).expanduser()
    of_hub = f"hf://datasets/{path}{f'@{revision}' if revision else ''}"
    url = str(local) if local.exists() else path if "://" in path else of_hub
    system, root = fsspec.url_to_fs(url)
    if system.isfile(root):
        found = {root: system.info(root)}
    else:
        found = system.glob(root, detail=True) if "*" in root else system.find(root, detail=True)
    folder = root.split("*")[0].rpartition("/")[0] if "*" in root or root in found else root
    stamps = {name: [str(info[key]) for key in STAMPS if key in info][:1] for name, info in found.items()}
    return [[name.removeprefix(folder), str(found[name].get("size")), *stamps[name]] for name in sorted(found)]
