"""Datasets of the Hugging Face hub: the note that one is looked up, and the commit that a run reads."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from mpp.config import ImagesConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.retry import NETWORK_ERRORS, is_temporary, read_with_retries, server_response
from mpp.errors import ReadFailed, UserError, did_you_mean, one_line
from mpp.runtime.messages import tell

COMMIT_HASH = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT_S = 30


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
    ask = partial(HfApi().dataset_info, config.path, revision=config.revision, timeout=HUB_TIMEOUT_S)
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
