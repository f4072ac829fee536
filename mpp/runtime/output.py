"""Text in and out, whatever the locale and the terminal.

Output never ends a command: neither characters that a terminal cannot show, nor a terminal or a reader that is gone.
Closing a terminal, or interrupting `mpp ... | tee log`, ends the reader of the output, too. A run then still has a step
to finish and a checkpoint to write.
"""

import errno
import io
import os
import sys
from typing import TextIO

READER_IS_GONE = (errno.EIO, errno.EPIPE)
"""Errors of a closed terminal, and of a pipe without a reader."""


def use_utf8() -> None:
    """Start this process again where its locale is ASCII: names of files, in configs and tables, are UTF-8.

    Python chooses the encoding of names when it starts. For LC_ALL=C it chooses UTF-8, unless PYTHONUTF8 is 0.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=by_line)


def steady_output() -> None:
    """Let no output end this process, whatever it writes and whatever reads it. Replacements of sys.stdout stay."""
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = steady(sys.stdout)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = steady(sys.stderr)


def printable(text: str) -> str:
    """The text with escapes for bytes that are not UTF-8, as in some names of files."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
