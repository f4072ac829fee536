"""Images that are far away: datasets of the hub, and shards at URLs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import huggingface_hub
from datasets.data_files import get_data_patterns
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from mpp.config import ImagesConfig, require
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.hub import check_commit
from mpp.data.listing import tars
from mpp.data.listing.folders import Walk
from mpp.data.listing.formats import SHARDS
from mpp.data.listing.table import shared
from mpp.data.local import listing_key, listing_of, says_splits
from mpp.data.retry import SERVER_ERRORS, retried
from mpp.errors import UserError


def load_from_hub(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of a dataset of the hub: by the library, but for loose pictures and tar shards."""
    known = dict(name=config.name, revision=config.revision)
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    if offline and (folder := downloaded_pictures(config)) and not streaming:
        return pictures_in(folder, config)
    builder = datasets.load_dataset_builder(config.path, **known)
    if isinstance(builder, WebDataset):
        return load_far_shards(
            {str(split): [*files] for split, files in builder.config.data_files.items()}, config, streaming
        )
    if isinstance(builder, ImageFolder):
        if streaming:
            without = "leave out data.streaming, or make shards by mpp prepare"
            raise UserError(f"data.path holds image files, no shards: {without}")
        folder = Path(huggingface_hub.snapshot_download(config.path, repo_type="dataset", revision=config.revision))
        if not says_splits(folder):
            return pictures_in(folder, config)
    require(config.labels is None, "data.labels", config.labels, "left out: it is for folders of image files")
    splits = datasets.load_dataset(config.path, streaming=streaming, **known)
    check_commit(splits, config)
    return splits


def pictures_in(folder: Path, config: ImagesConfig) -> dict[str, Any]:
    """The splits of loose pictures that were downloaded."""
    return shared(describe_source(config), lambda: listing_of(folder, config, False), listing_key(config, False)).splits


def downloaded_pictures(config: ImagesConfig) -> Path | None:
    """Where the hub's cache has the loose pictures of a dataset; None: it has none."""
    try:
        known = dict(repo_type="dataset", revision=config.revision, local_files_only=True)
        folder = Path(huggingface_hub.snapshot_download(config.path, **known))
    except OSError:  # huggingface_hub's LocalEntryNotFoundError is one
        return None
    tree = Walk(str(folder)).tree
    return folder if tree.folders and not tree.shards and not says_splits(folder) else None


def load_far_shards(shards: dict[str, list[str]], config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of tar shards at URLs: as streams, or downloaded and indexed."""
    if streaming:
        return {split: tars.stream_of(files, config) for split, files in shards.items()}
    here = datasets.DownloadManager().download(shards)
    return shared(
        describe_source(config), lambda: tars.list_shards(here, config), listing_key(config, streaming)
    ).splits


def from_a_server(load: Callable[[], dict[str, Any]], config: ImagesConfig) -> dict[str, Any]:
    """What `load` loads, tried again while its server is away; later reads are tried again by us alone.

    The library would try a stream's reads again for an hour, in which no signal is heard.
    """
    for name in ("OPEN", "READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
        setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0)
    datasets.config.STREAMING_OPEN_MAX_RETRIES = datasets.config.STREAMING_READ_MAX_RETRIES = 1
    offline = is_hub_dataset(config) and huggingface_hub.constants.HF_HUB_OFFLINE  # by choice, for good
    return load() if offline else retried(load, "the server of the images", config.read_retries, SERVER_ERRORS)


def load_url(config: ImagesConfig, streaming: bool) -> dict[str, Any]:
    """The splits of the shards at a URL."""
    require(config.labels is None, "data.labels", config.labels, "left out: it is for folders of image files")
    kind, files = files_at(config.path)
    if kind == SHARDS[".tar"]:
        found = {split: [*files_like(patterns)] for split, patterns in files.items()}
        return load_far_shards(found, config, streaming)
    return datasets.load_dataset(kind, data_files=files, streaming=streaming)


def files_like(patterns: str | list[str]) -> Iterator[str]:
    """The URLs of the files that patterns mean, each once, in order."""
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        system, path = fsspec.url_to_fs(pattern)
        found |= dict.fromkeys(map(system.unstrip_protocol, sorted(system.glob(path)) if "*" in path else [path]))
    yield from found


def files_at(url: str) -> tuple[str, dict[str, Any]]:
    """The kind of the shards at a URL that fsspec knows, and the files of each split.

    Args:
        url: of a file, of files by a pattern with *, or of a folder, whose files' names or folders say their split.
    """
    if Path(url).suffix in SHARDS:
        return SHARDS[Path(url).suffix], {"train": url}
    system, root = fsspec.url_to_fs(url)
    ends = {Path(file).suffix for file in system.find(root)} & SHARDS.keys()
    if len(ends) != 1:
        raise UserError(f"it must hold files of one sort of {', '.join(SHARDS)}; it has {sorted(ends) or 'none'}")
    end, folder = ends.pop(), url.rstrip("/")
    return SHARDS[end], {
        str(split): [f"{folder}/{pattern_of(pattern, end)}" for pattern in patterns]
        for split, patterns in get_data_patterns(url).items()
    }


def pattern_of(pattern: str, end: str) -> str:
    """The library's pattern, for files with this ending alone: there may be others beside them."""
    if pattern.endswith("**"):
        return f"{pattern}/*{end}"
    return pattern.removesuffix(".*").removesuffix(end) + end
