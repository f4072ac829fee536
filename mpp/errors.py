"""Errors that the user can mend; every other exception is a bug."""

import re
import zlib
from collections.abc import Iterable
from difflib import get_close_matches
from zipfile import BadZipFile

ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
"""Begin of the system's messages."""
NPZ_ERRORS = (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error)
"""Errors of numpy for an .npz file that was cut off, is damaged, or is another kind of file."""


class UserError(ValueError):
    """Something that the user can mend: a setting, a file, a machine. Commands print it as one line.

    Every other exception is a bug of ours or of a library, and keeps its traceback.
    """


class ReadFailed(UserError):
    """A file cannot be read, though it was tried again: a disk or a server has gone away."""


def one_line(error: BaseException) -> str:
    """The message of a library's error in one line, without the system's number; its class, where it has no message."""
    message = " ".join(str(error).split())
    return ERROR_NUMBER.sub("", message) or type(error).__name__


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about a word that does not exist: the most similar name of all; empty: none is near."""
    return "".join(f" (did you mean {name}?)" for name in get_close_matches(word, [*names], n=1))


class Undecodable(UserError):
    """None of many images in a row can be decoded.

    Args:
        first: the first of them, and why.
    """

    def __init__(self, message: str, first: str = ""):
        super().__init__(message)
        self.first = first


class Unavailable(UserError):
    """An encoder or its images lack something that a picture or an evaluation needs; the message names it.

    Pages, sets of pictures and comparisons leave that one out, and say so.
    """


class UnreadableImage(Exception):
    """The bytes are no image that can be shown."""


class Diverged(UserError, FloatingPointError):
    """A loss or gradient is not finite."""
