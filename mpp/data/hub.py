"""Datasets of the Hugging Face hub: which commit a run is of."""

import os
import re
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from mpp.config import ImagesConfig
from mpp.data.retry import NETWORK_ERRORS, answer_to, passes, retried
from mpp.errors import ReadFailed, UserError, one_line
from mpp.runtime.messages import tell

COMMIT = re.compile(r"[0-9a-f]{40}")
PATIENCE = 30  # seconds for the hub's answer


def is_url(path: str) -> bool:
    """Whether `data.path` is a URL that fsspec reads."""
    return "://" in path


def is_local(path: str | None) -> bool:
    """Whether there is a file or folder here of that name."""
    return path is not None and not is_url(path) and Path(path).expanduser().exists()


def may_be_of_the_hub(path: str | None) -> bool:
    """Whether `data.path` is spelled as names of the hub are, and not as a URL or as what can only be a path here."""
    return path is not None and not is_url(path) and not path.startswith((".", "/", "~")) and path.count("/") < 2


def of_the_hub(config: ImagesConfig) -> bool:
    """Whether `data.path` is a name of the hub's: no file or folder here, and no URL."""
    return may_be_of_the_hub(config.path) and not Path(config.path).exists()


def say_that_it_is_of_the_hub(config: ImagesConfig) -> None:
    """Say at once that `data.path` is taken for a dataset of the hub: the network may take its time, and a name of a
    folder may be misspelled.

    Raises:
        UserError: it is no name of the hub's either.
    """
    if not of_the_hub(config):
        return
    folder, name = os.path.split(config.path)
    try:
        validate_repo_id(config.path)
    except HFValidationError:
        here = f"there is no such file or folder in {Path.cwd()}, and the hub has no such names"
        raise UserError(f"data.path is {config.path}, which does not exist: {here}") from None
    near = get_close_matches(name, os.listdir(folder or ".") if os.path.isdir(folder or ".") else [])
    meant = f"; did you mean {os.path.join(folder, near[0])}?" if near else ""
    tell(f"data.path {config.path} is no file or folder in {Path.cwd()}: the hub is asked for it{meant}")


def commit_of(config: ImagesConfig, begun_with: str | None = None) -> str | None:
    """The commit that `data.revision` means now; None: the images are not the hub's, or the hub does not answer.

    Args:
        begun_with: the commit that was noted, which stays; a folder here may have the dataset's name by now.
    Raises:
        UserError: the hub refuses, or nobody can say what a revision is: the library would take from its cache what is
            the newest there, of whatever revision.
    """
    if not of_the_hub(config):
        return config.revision
    say_that_it_is_of_the_hub(config)
    if COMMIT.fullmatch(begun_with or config.revision or ""):
        return begun_with or config.revision
    ask = partial(HfApi().dataset_info, config.path, revision=config.revision, timeout=PATIENCE)
    try:
        return retried(ask, "the hub", config.read_retries, HfHubHTTPError).sha  # a node without internet does not wait
    except (ReadFailed, HFValidationError, *NETWORK_ERRORS) as error:
        refused = answer_to(error) is not None and not passes(error)
        if not refused and not config.revision:
            return None  # who loads the images says why, or has them in the cache: see `cached_commit`
        which = f" of revision {config.revision}" if config.revision else ""
        why = f"{one_line(error.__cause__ or error)} (and {Path.cwd()} has no such folder or file)"
        raise UserError(f"data.path is {config.path}{which}, which cannot be loaded: {why}") from error


def cached_commit(rows: Any) -> str | None:
    """The commit that the library's cache has these rows of; None: it does not say, or they are a stream."""
    files = [each["filename"] for each in getattr(rows, "cache_files", ())]
    return next((part for file in files for part in reversed(Path(file).parts) if COMMIT.fullmatch(part)), None)


def check_commit(splits: dict[str, Any], config: ImagesConfig) -> None:
    """Raise UserError where the library took another commit from its cache, since the hub does not answer."""
    files = [each["filename"] for rows in splits.values() for each in getattr(rows, "cache_files", ())]
    if COMMIT.fullmatch(config.revision or "") and not all(config.revision in file for file in files):
        raise UserError(f"the hub does not answer, and the newest in its cache is not of commit {config.revision}")
