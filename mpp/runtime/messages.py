"""What a command tells its user: on one process, and once."""

import os
import sys
from functools import cache


def on_first_process() -> bool:
    """Whether this is the process that speaks for all: of rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@cache
def tell(line: str) -> None:
    """Print what this command works on, unless it has printed it before."""
    if on_first_process():
        print(line, flush=True)


@cache
def note(line: str) -> None:
    """Print what a user may want to know, unless this command has printed it before."""
    if on_first_process():
        print(f"note: {line}", flush=True)


@cache
def warn(line: str) -> None:
    """Print a warning on stderr, unless this command has printed it before."""
    if on_first_process():
        print(f"warning: {line}", file=sys.stderr, flush=True)


def shortened(names: list[str], most: int = 3) -> str:
    """The first of some names, and how many more there are: "a, b, c and 7 more"."""
    shown = ", ".join(" ".join(name.split()) or repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
