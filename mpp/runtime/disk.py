"""Files that survive the machine."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
