"""Makes empty files, 100 a folder, and times how mpp lists them: python tests/listing_speed.py NEW_FOLDER 1280000."""

import resource
import sys
import time
from pathlib import Path

from mpp.config import SourceConfig
from mpp.data.sources import load_splits


def peak_gb() -> float:
    """The most memory that this process has taken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    for folder in range(0, count, 100):
        (root / f"{folder:07d}").mkdir(parents=True)
        for file in range(100):
            (root / f"{folder:07d}" / f"{file}.jpg").touch()
    before, begun = peak_gb(), time.perf_counter()
    load_splits(SourceConfig(path=str(root)))
    print(f"{count} files: {time.perf_counter() - begun:.2f} s, {peak_gb() - before:.2f} GB more memory")
