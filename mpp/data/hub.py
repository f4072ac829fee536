"""Data sets of the Hugging Face hub: which commit a run is of."""

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from mpp.config import ImagesConfig
from mpp.data.reading import NETWORK_ERRORS

COMMIT = re.compile(r"[0-9a-f]{40}")
PATIENCE = 30  # seconds for the hub's answer


def of_the_hub(config: ImagesConfig) -> bool:
    """Whether `data.path` is a name of the hub's: no file or folder here, and no URL."""
    path = config.path
    return path is not None and "://" not in path and path.count("/") <= 1 and not Path(path).expanduser().exists()


def commit_of(config: ImagesConfig) -> str | None:
    """The commit that `data.revision` means now; None: the images are not the hub's, or the hub does not say."""
    if not of_the_hub(config) or (config.revision and COMMIT.fullmatch(config.revision)):
        return config.revision
    try:
        return HfApi().dataset_info(config.path, revision=config.revision, timeout=PATIENCE).sha
    except (HfHubHTTPError, *NETWORK_ERRORS):  # no such data set, no access, no hub: who loads the images says so
        return None
