"""Messages to the user: printed by the first process, and once."""

import os
import sys
from functools import cache


def process_rank() -> int | None:
    """Rank of this process, as its launcher sets it before torch is loaded; None without a launcher."""
    rank = os.environ.get("RANK")
    return int(rank) if rank else None


def is_first_process() -> bool:
    """Whether this is the process that prints for all: rank 0, or the only one."""
    return not process_rank()


@cache
def tell(line: str) -> None:
    """Print a line about the command's work, unless the process has printed it before."""
    if is_first_process():
        print(line, flush=True)


@cache
def note(line: str) -> None:
    """Print a note for the user, unless the process has printed it before."""
    if is_first_process():
        print(f"note: {line}", flush=True)


@cache
def warn(line: str) -> None:
    """Print a warning on stderr, unless the process has printed it before."""
    if is_first_process():
        print(f"warning: {line}", file=sys.stderr, flush=True)


def shortened(names: list[str], most: int = 3) -> str:
    """The first names of a list, and the number of the others: "a, b, c and 7 more"."""
    shown = []
    for name in names[:most]:
        one_line = " ".join(name.split())
        shown.append(one_line or repr(name))
    text = ", ".join(shown)
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
