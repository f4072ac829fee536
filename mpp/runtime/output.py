"""Text in and out, whatever the locale and the terminal.

Output ends no command: neither characters that a terminal cannot show, nor a terminal or a reader that is gone. Who
closes a terminal, or interrupts `mpp ... | tee log`, ends what reads the output, too. A run then still has a step to
finish and a checkpoint to write, and says so.
"""

import errno
import io
import os
import sys
from typing import TextIO

GONE = (errno.EIO, errno.EPIPE)  # of a closed terminal; of a pipe without a reader


def use_utf8() -> None:
    """Start this process again where its locale is ASCII: names of files, in configs and tables, are UTF-8.

    Python chooses the encoding of names when it starts. For LC_ALL=C it chooses UTF-8, unless PYTHONUTF8 is 0.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Output(io.FileIO):
    """A stream's file, whose writes are lost where nothing reads them any more."""

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return len(data)


def steady(stream: TextIO) -> TextIO:
    """The same stream, which shows as an escape what its encoding lacks, and outlives its reader."""
    stream.flush()
    file = io.BufferedWriter(Output(stream.fileno(), "wb", closefd=False))
    at_once = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=at_once)


def steady_output() -> None:
    """Let no output end this process, whatever it writes and whoever reads it. What replaced sys.stdout stays."""
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = steady(sys.stdout)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = steady(sys.stderr)


def printable(text: str) -> str:
    """The text with escapes for what UTF-8 lacks: bytes in names of files that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
