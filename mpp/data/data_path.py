"""The kinds of places that `data.path` and `probe.path` may name, and how messages call them."""

from pathlib import Path

from mpp.config import ImagesConfig

BIRDS_FOLDER = Path(__file__).parent.parent / "birds"
"""The package's photographs, which are used where `data.path` is not set."""


def describe_source(config: ImagesConfig) -> str:
    """The dataset's name in messages."""
    return f"{config.group_name}.path {config.path}" if config.path else "the package's birds"


def is_url(path: str) -> bool:
    """Whether `data.path` is a URL that fsspec reads."""
    return "://" in path


def as_pattern(path: str) -> str:
    """A path or URL with * as fsspec's `glob` takes it: to it, brackets would be sets of characters."""
    return path.replace("[", "[[]")


def is_local(path: str | None) -> bool:
    """Whether `data.path` is a file or folder on this machine."""
    return path is not None and not is_url(path) and Path(path).expanduser().exists()


def is_hub_dataset(config: ImagesConfig) -> bool:
    """Whether `data.path` is looked up on the Hugging Face hub: NAME or OWNER/NAME, and not on this machine."""
    path = config.path
    if path is None or is_url(path):
        return False
    return not path.startswith((".", "/", "~")) and path.count("/") < 2 and not Path(path).exists()
