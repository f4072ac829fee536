"""Progress bars, in terminals and in logs."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*iterable: Any, **options: Any) -> tqdm:
    """tqdm's bar; in a log file, where it cannot be redrawn, a line every half minute."""
    return tqdm(*iterable, mininterval=0.1 if sys.stderr.isatty() else 30, dynamic_ncols=True, **options)
