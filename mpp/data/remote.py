"""Images that are far away: datasets of the hub, with the commit that a run reads, and shards at URLs."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import fsspec
import huggingface_hub
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.folder import SHARD_BUILDERS, shards_by_split, walk
from mpp.data.listing import share
from mpp.data.local import (
    declared_files,
    has_card_with_configs,
    list_folder,
    load_tars,
    refuse_list,
    refuse_streamed_files,
    warn_of_incomplete_sets,
)
from mpp.data.retry import NETWORK_ERRORS, SERVER_ERRORS, is_temporary, read_with_retries, server_response
from mpp.errors import ReadFailed, UserError, did_you_mean, one_line
from mpp.runtime.messages import tell

COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT_S = 30


def load_from_hub(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a dataset of the hub: by `datasets`, but for loose pictures and tar shards."""
    if huggingface_hub.constants.HF_HUB_OFFLINE and not streaming:
        folder = downloaded_pictures(config)
        if folder is not None:
            return list_downloaded(folder, config)
    builder = datasets.load_dataset_builder(config.path, name=config.name, revision=config.revision)
    if builder.config.data_files and not isinstance(builder, ImageFolder):  # a cache that is read offline has none
        warn_of_incomplete_sets(declared_files(builder), config)
    if isinstance(builder, WebDataset):
        return load_remote_tars(declared_files(builder), config, streaming)
    refuse_streamed_files(builder, streaming)
    if isinstance(builder, ImageFolder):
        folder = huggingface_hub.snapshot_download(config.path, repo_type="dataset", revision=config.revision)
        if not has_card_with_configs(folder):
            return list_downloaded(folder, config)
    refuse_list(config)
    splits = datasets.load_dataset(config.path, name=config.name, revision=config.revision, streaming=streaming)
    check_commit(splits, config)
    return splits


def list_downloaded(folder: str, config: ImagesConfig) -> dict[str, Any]:
    """The splits of loose pictures in the hub's cache."""
    splits, _ = share(partial(list_folder, folder, config, False), config)
    return splits


def downloaded_pictures(config: ImagesConfig) -> str | None:
    """The folder of loose pictures of a dataset in the hub's cache; None: there is none."""
    try:
        folder = huggingface_hub.snapshot_download(
            config.path, repo_type="dataset", revision=config.revision, local_files_only=True
        )
    except OSError:  # huggingface_hub's LocalEntryNotFoundError is one
        return None
    tree = walk(folder)
    is_loose = tree.images and not (tree.tables or tree.tars or has_card_with_configs(folder))
    return folder if is_loose else None


def load_remote_tars(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards at URLs: as streams, or downloaded and listed."""
    return load_tars(shards if streaming else datasets.DownloadManager().download(shards), config, streaming)


def load_url(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL that fsspec knows: of a file, of files by a pattern with *, or of a folder."""
    refuse_list(config)
    url = config.path
    ending = os.path.splitext(url)[1]
    if ending in SHARD_BUILDERS and "*" not in url:
        shards = {"train": [url]}
    else:
        shards, ending = find_shards(config)
        warn_of_incomplete_sets(shards, config)
    if ending == ".tar":
        return load_remote_tars(shards, config, streaming)
    escaped = {split: [file.replace("[", "[[]") for file in files] for split, files in shards.items()}
    return datasets.load_dataset(SHARD_BUILDERS[ending], data_files=escaped, streaming=streaming)


def find_shards(config: ImagesConfig) -> tuple[dict[str, list[str]], str]:
    """The shards of a folder's URL by the splits of their names and folders, or those of a pattern; and their ending.

    Raises:
        UserError: there are none, or of several kinds.
    """
    system, root = fsspec.url_to_fs(config.path)
    files = system.glob(root.replace("[", "[[]")) if "*" in root else system.find(root)
    by_ending: dict[str, list[str]] = {}
    for file in sorted(files):
        by_ending.setdefault(os.path.splitext(file)[1], []).append(file)
    endings = by_ending.keys() & SHARD_BUILDERS.keys()
    if len(endings) != 1:
        found = " and ".join(sorted(endings)) or "none"
        allowed = f"shards of one format of {', '.join(SHARD_BUILDERS)}"
        raise UserError(f"{config.group_name}.path is {config.path}; it must hold {allowed}: it has {found}")
    (ending,) = endings
    urls = [system.unstrip_protocol(file) for file in by_ending[ending]]
    if "*" in root:
        return {"train": urls}, ending
    start = system.unstrip_protocol(root).rstrip("/") + "/"
    return shards_by_split([url.removeprefix(start) for url in urls], start), ending


# --- the hub, and servers that are away ---


def from_a_server(load: Callable[[], dict[str, Any]], config: ImagesConfig) -> dict[str, Any]:
    """Call `load`, again while its server is away. Later reads are tried again only by mpp.

    A hub whose address the machine does not find is not asked again: its library has tried for 23 s by then, and a
    machine without internet stays so.

    `datasets` would try a stream's reads again for an hour, in which no signal is heard.
    """
    for name in ("OPEN", "READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
        setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0)
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    if is_hub_dataset(config) and huggingface_hub.constants.HF_HUB_OFFLINE:
        return load()  # offline by choice, for good
    retries = config.read_retries
    source = describe_source(config)
    if is_hub_dataset(config):
        source += f" (not a file or folder in {Path.cwd()}){did_you_mean(config.path)}"
        if not finds_host(huggingface_hub.constants.ENDPOINT):
            retries = 0
    return read_with_retries(load, f"the server of {source}", retries, SERVER_ERRORS)


def finds_host(url: str) -> bool:
    """Whether this machine can look up the address of a URL's host."""
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except socket.gaierror:
        return False
    return True


def announce_hub_lookup(config: ImagesConfig) -> None:
    """Print that `data.path` is looked up on the hub, before the network takes its time: it may be a misspelled folder.

    Raises:
        UserError: the hub has no such names either.
    """
    if not is_hub_dataset(config):
        return
    try:
        validate_repo_id(config.path)
    except HFValidationError:
        reason = f"{Path.cwd()} has no such file or folder, and it is not a valid name on the hub"
        raise UserError(f"{config.group_name}.path is {config.path}, which does not exist: {reason}") from None
    problem = f"{describe_source(config)} is not a file or folder in {Path.cwd()}"
    tell(f"{problem}: looking for it on the hub{did_you_mean(config.path)}")


def resolve_commit(config: ImagesConfig, begun_with: str | None = None) -> str | None:
    """The commit that `data.revision` means now; None: not a hub dataset, or the hub does not answer.

    Args:
        begun_with: the commit that the run began with, which stays, even if a local folder has the dataset's name now.
    Raises:
        UserError: the hub refuses, or cannot be asked about a revision: `datasets` would take the newest one in its
            cache, of whatever revision.
    """
    if not is_hub_dataset(config):
        return config.revision
    announce_hub_lookup(config)
    known = begun_with or config.revision
    if known and COMMIT_HASH.fullmatch(known):
        return known
    ask = partial(huggingface_hub.HfApi().dataset_info, config.path, revision=config.revision, timeout=HUB_TIMEOUT_S)
    try:
        # Only errors of the hub itself are tried again: there are nodes without internet.
        return read_with_retries(ask, "the hub", config.read_retries, HfHubHTTPError).sha
    except (ReadFailed, HFValidationError, *NETWORK_ERRORS) as error:
        refused = server_response(error) is not None and not is_temporary(error)
        if not refused and not config.revision:
            return None  # loading the images gives the reason, or finds them in the cache: see `cached_commit`
        revision = f" of revision {config.revision}" if config.revision else ""
        reason = f"{one_line(error.__cause__ or error)} (and {Path.cwd()} has no such folder or file)"
        raise UserError(
            f"{config.group_name}.path is {config.path}{revision}, which cannot be loaded: {reason}"
        ) from error


def cached_commit(rows: Any) -> str | None:
    """The commit in the path of the cache that holds these rows; None: the path has none, or the rows are a stream."""
    for file in cached_files(rows):
        for folder in reversed(Path(file).parts):
            if COMMIT_HASH.fullmatch(folder):
                return folder
    return None


def check_commit(splits: dict[str, Any], config: ImagesConfig) -> None:
    """Raise UserError where the hub did not answer and `datasets` took another commit from its cache."""
    if not COMMIT_HASH.fullmatch(config.revision or ""):
        return
    files = [file for rows in splits.values() for file in cached_files(rows)]
    if not all(config.revision in file for file in files):
        raise UserError(f"the hub does not answer, and the newest in its cache is not of commit {config.revision}")


def cached_files(rows: Any) -> Iterator[str]:
    """Paths of the cache files that hold these rows; streams have none."""
    for file in getattr(rows, "cache_files", ()):
        yield file["filename"]
