"""Messages to the user: printed by the first process, and once."""

import os
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path


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


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things: "1 image", "2 images", "2 classes".

    Args:
        plural: of the noun, where it is not the noun with an s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def did_you_mean(path: str) -> str:
    """A file or folder with a similar name to one that does not exist, for the end of a message; empty without one."""
    missing = Path(path)
    neighbours = [neighbour.name for neighbour in missing.parent.glob("*")]
    similar = get_close_matches(missing.name, neighbours, n=1)
    return f"; did you mean {missing.with_name(similar[0])}?" if similar else ""


def shortened(names: list[str], most: int = 3) -> str:
    """The first names of a list, and the number of the others: "a, b, c and 7 more".

    A name with a comma is in quotes: it would read as two.
    """
    shown = []
    for name in names[:most]:
        one_line = " ".join(name.split())
        shown.append(f'"{one_line}"' if "," in one_line else one_line or repr(name))
    text = ", ".join(shown)
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
