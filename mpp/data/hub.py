"""Data sets of the Hugging Face hub: which commit a run is of."""

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mpp.config import ImagesConfig
from mpp.data.reading import NETWORK_ERRORS

COMMIT = re.compile(r"[0-9a-f]{40}")
PATIENCE = 30  # seconds for the hub's answer


def of_the_hub(config: ImagesConfig) -> bool:
    """Whether `data.path` is a name of the hub's: no file or folder here, and no URL."""
    path = config.path
    if path is None or "://" in path or path.startswith((".", "/", "~")) or path.count("/") > 1:
        return False
    return not Path(path).exists()


def commit_of(config: ImagesConfig) -> str | None:
    """The commit that `data.revision` means now; None: the images are not the hub's, or the hub does not say."""
    if not of_the_hub(config) or (config.revision and COMMIT.fullmatch(config.revision)):
        return config.revision
    try:
        return HfApi().dataset_info(config.path, revision=config.revision, timeout=PATIENCE).sha
    except (HfHubHTTPError, HFValidationError, *NETWORK_ERRORS):  # who loads the images says why
        return None
