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


def is_local(path: str | None) -> bool:
    """Whether `data.path` is a file or folder on this machine."""
    return path is not None and not is_url(path) and Path(path).expanduser().exists()


def could_be_hub_name(path: str | None) -> bool:
    """Whether `data.path` is spelled as NAME or OWNER/NAME, as datasets of the Hugging Face hub are."""
    if path is None or is_url(path):
        return False
    return not path.startswith((".", "/", "~")) and path.count("/") < 2


def is_hub_dataset(config: ImagesConfig) -> bool:
    """Whether `data.path` is looked up on the Hugging Face hub: spelled as its names are, and not on this machine."""
    return could_be_hub_name(config.path) and not Path(config.path).exists()
