"""Images that are far away: datasets of the hub, and shards at URLs."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import fsspec
import huggingface_hub
from datasets.data_files import get_data_patterns, resolve_pattern
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.hub import check_commit
from mpp.data.listing.formats import SHARD_BUILDERS
from mpp.data.listing.tars import stream_shards
from mpp.data.listing.tree import walk_folder
from mpp.data.local import (
    declared_files,
    has_card_with_configs,
    refuse_list,
    refuse_streamed_files,
    share_folder_listing,
    share_tar_listing,
    warn_of_incomplete_sets,
)
from mpp.data.retry import SERVER_ERRORS, read_with_retries
from mpp.errors import UserError, did_you_mean
from mpp.runtime.messages import shortened


def load_from_hub(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a dataset of the hub: by `datasets`, but for loose pictures and tar shards."""
    if huggingface_hub.constants.HF_HUB_OFFLINE and not streaming:
        folder = downloaded_pictures(config)
        if folder is not None:
            return share_folder_listing(folder, config, streaming=False).splits
    builder = datasets.load_dataset_builder(config.path, name=config.name, revision=config.revision)
    if builder.config.data_files and not isinstance(builder, ImageFolder):  # a cache that is read offline has none
        warn_of_incomplete_sets(declared_files(builder), config)
    if isinstance(builder, WebDataset):
        return load_remote_tars(declared_files(builder), config, streaming)
    refuse_streamed_files(builder, streaming)
    if isinstance(builder, ImageFolder):
        folder = Path(huggingface_hub.snapshot_download(config.path, repo_type="dataset", revision=config.revision))
        if not has_card_with_configs(folder):
            return share_folder_listing(folder, config, streaming=False).splits
    refuse_list(config)
    splits = datasets.load_dataset(config.path, name=config.name, revision=config.revision, streaming=streaming)
    check_commit(splits, config)
    return splits


def downloaded_pictures(config: ImagesConfig) -> Path | None:
    """The folder of loose pictures of a dataset in the hub's cache; None: there is none."""
    try:
        downloaded = huggingface_hub.snapshot_download(
            config.path, repo_type="dataset", revision=config.revision, local_files_only=True
        )
    except OSError:  # huggingface_hub's LocalEntryNotFoundError is one
        return None
    tree = walk_folder(downloaded)
    is_loose = tree.folders and not tree.shards and not has_card_with_configs(Path(downloaded))
    return Path(downloaded) if is_loose else None


def load_remote_tars(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards at URLs: as streams, or downloaded and indexed."""
    if streaming:
        return {split: stream_shards(files, config) for split, files in shards.items()}
    return share_tar_listing(datasets.DownloadManager().download(shards), config)


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


def load_url(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL."""
    refuse_list(config)
    name, patterns_by_split = find_shards(config.path, config.group_name)
    shards = {split: files_matching(patterns) for split, patterns in patterns_by_split.items()}
    is_one_shard = Path(config.path).suffix in SHARD_BUILDERS and "*" not in config.path
    if not is_one_shard:
        warn_of_incomplete_sets(shards, config)
    if name == SHARD_BUILDERS[".tar"]:
        return load_remote_tars(shards, config, streaming)
    return datasets.load_dataset(name, data_files=patterns_by_split, streaming=streaming)


def files_matching(patterns: list[str]) -> list[str]:
    """The URLs of the files of a split, each once.

    Args:
        patterns: those by which `datasets` finds splits, most of which match nothing; or a URL, which is not asked for.
    Raises:
        FileNotFoundError: no file matches any of them.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        if "*" not in pattern:
            files[pattern] = None
            continue
        with suppress(FileNotFoundError):
            files |= dict.fromkeys(resolve_pattern(pattern, base_path=""))
    if not files:
        raise FileNotFoundError(f"no file matches {shortened(patterns)}")
    return list(files)


def find_shards(url: str, group: str = "data") -> tuple[str, dict[str, list[str]]]:
    """The builder of `datasets` for the shards at a URL that fsspec knows, and the files of each split, or patterns.

    Args:
        url: of a file, of files by a pattern with *, or of a folder, whose files' names or folders have the splits.
    """
    extension = Path(url).suffix
    if extension in SHARD_BUILDERS:
        pattern = without_sets(url) if "*" in url else url
        return SHARD_BUILDERS[extension], {"train": [pattern]}
    system, root = fsspec.url_to_fs(url)
    extensions = {Path(file).suffix for file in system.find(root)} & SHARD_BUILDERS.keys()
    if len(extensions) != 1:
        raise UserError(
            f"{group}.path is {url}; it must hold shards of one format of {', '.join(SHARD_BUILDERS)}: it has "
            f"{' and '.join(sorted(extensions)) or 'none'}"
        )
    (extension,) = extensions
    folder = without_sets(url.rstrip("/"))
    patterns_by_split = {}
    for split, patterns in get_data_patterns(folder).items():
        narrowed = [with_extension(pattern, extension) for pattern in patterns]
        patterns_by_split[str(split)] = [f"{folder}/{pattern}" for pattern in narrowed]
    return SHARD_BUILDERS[extension], patterns_by_split


def without_sets(url: str) -> str:
    """A pattern in which brackets are no sets of characters, but part of a name."""
    return url.replace("[", "[[]")


def with_extension(pattern: str, extension: str) -> str:
    """A pattern of `datasets`, narrowed to files with this extension: others may be next to them."""
    if pattern.endswith("**"):
        return f"{pattern}/*{extension}"
    return pattern.removesuffix(".*").removesuffix(extension) + extension
