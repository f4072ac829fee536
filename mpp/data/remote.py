"""Servers: those that are away, and the hub's commits of a dataset, of which a run reads one."""

import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.retry import NETWORK_ERRORS, SERVER_ERRORS, is_temporary, read_with_retries, server_response
from mpp.errors import ReadFailed, UserError, did_you_mean, one_line
from mpp.runtime.messages import tell

COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT_S = 30


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, and no branch."""
    return COMMIT_HASH.fullmatch(revision or "") is not None


def from_a_server(load: Callable[[], dict[str, Any]], config: ImagesConfig) -> dict[str, Any]:
    """Call `load`, again while its server is away. Later reads are tried again only by mpp.

    A hub whose address the machine does not find is not asked again: its library has tried for 23 s by then, and a
    machine without internet stays so.

    `datasets` would try a stream's reads again for an hour, in which no signal is heard.
    """
    for name in ("OPEN", "READ", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
        setattr(datasets.config, f"STREAMING_{name}_RETRY_INTERVAL", 0)
        setattr(datasets.config, f"STREAMING_{name}_MAX_RETRIES", 1)  # only those of OPEN and READ count
    retries = config.read_retries
    source = describe_source(config)
    if is_hub_dataset(config):
        source += f" ({not_here(config)})"
        if huggingface_hub.constants.HF_HUB_OFFLINE or not finds_host(huggingface_hub.constants.ENDPOINT):
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
    """Print that `data.path` is looked up on the hub, before the network takes its time: a folder may be meant."""
    if is_hub_dataset(config):
        tell(f"{describe_source(config)} is {not_here(config)}: looking for it on the hub")


def not_here(config: ImagesConfig) -> str:
    """That `data.path` is no file here, in words, with the most similar name."""
    folder = Path(config.path).parent
    names = map(str, folder.iterdir()) if folder.is_dir() else ()
    return f"not a file or folder in {Path.cwd()}{did_you_mean(config.path, names)}"


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
    if is_commit(known):
        return known
    ask = partial(huggingface_hub.HfApi().dataset_info, config.path, revision=config.revision, timeout=HUB_TIMEOUT_S)
    try:
        # Only errors of the hub itself are tried again: there are nodes without internet.
        return read_with_retries(ask, "the hub", config.read_retries, HfHubHTTPError).sha
    except (ReadFailed, HFValidationError, *NETWORK_ERRORS) as error:
        if config.revision is None and (server_response(error) is None or is_temporary(error)):
            return None  # loading the images gives the reason, or finds them in the cache: see `cached_commit`
        reason = f"{one_line(error.__cause__ or error)} (and {Path.cwd()} has no such folder or file)"
        raise UserError(f"{config.group_name}.path is {config.path}, which cannot be loaded: {reason}") from error


def cached_commit(rows: Any) -> str | None:
    """The commit in the path of the cache that holds these rows; None: the path has none, or the rows are a stream."""
    files = getattr(rows, "cache_files", ())
    folders = Path(files[0]["filename"]).parts if files else ()
    return next(filter(is_commit, reversed(folders)), None)
