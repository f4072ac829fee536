"""Text for the user: each line once and by the first process, whatever the locale, the terminal and its reader.

Output never ends a command. Closing a terminal, or interrupting `mpp ... | tee log`, ends the reader of the output,
too; a run then still has a step to finish and a checkpoint to write.
"""

import errno
import io
import os
import sys
from functools import cache
from typing import Any, TextIO

READER_IS_GONE = (errno.EIO, errno.EPIPE)
"""Errors of a closed terminal, and of a pipe without a reader."""


def process_rank() -> str:
    """Rank of this process, as its launcher sets it before torch is loaded; empty without a launcher."""
    return os.environ.get("RANK", "")


def is_first_process() -> bool:
    """Whether this is the process that prints for all: rank 0, or the only one."""
    return process_rank() in ("", "0")


@cache
def tell(line: str, to_stderr: bool = False) -> None:
    """Print a line about the command's work, unless the process has printed it before."""
    if is_first_process():
        print(line, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def note(line: str) -> None:
    """Print a note for the user, unless the process has printed it before."""
    tell(f"note: {line}")


def warn(line: str) -> None:
    """Print a warning on stderr, unless the process has printed it before."""
    tell(f"warning: {line}", to_stderr=True)


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things: "1 image", "2 images", "2 classes".

    Args:
        plural: of the noun, where it is not the noun with an s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def shortened(names: list[str], most: int = 3) -> str:
    """The first names of a list, and the number of the others: "a, b, c and 7 more"."""
    text = ", ".join(" ".join(name.split()) or repr(name) for name in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def progress_bar(*iterable: Any, **options: Any) -> Any:
    """tqdm's bar; in a log file, where it cannot be redrawn, a line every half minute."""
    from tqdm import tqdm

    return tqdm(*iterable, mininterval=0.1 if sys.stderr.isatty() else 30, dynamic_ncols=True, **options)


def printable(text: str) -> str:
    """The text with escapes for bytes that are not UTF-8, as in some names of files."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class SteadyFile(io.FileIO):
    """File of a stream, whose writes are dropped when nothing reads them any more."""

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in READER_IS_GONE:
                raise
            return len(data)


def steady(stream: TextIO) -> TextIO:
    """The same stream, which escapes characters that its encoding lacks, and outlives its reader."""
    stream.flush()
    file = io.BufferedWriter(SteadyFile(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)


def steady_output() -> None:
    """Let no output end this process, whatever it writes and whatever reads it. Replacements of sys.stdout stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, steady(stream))
