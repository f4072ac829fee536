"""Reads that are tried again: disks and servers go away, and come back.

A file that cannot be read now is not a file that cannot be decoded. The first may be all right in a minute, and so may
all the others; the second will never be.
"""

import tarfile
import time
import zipfile
from collections.abc import Callable
from typing import TypeVar

from datasets.exceptions import DatasetsError
from fsspec.exceptions import FSTimeoutError
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from pyarrow import ArrowException

from mpp.data.workers import forget_said, say_once
from mpp.errors import ReadFailed, one_line

T = TypeVar("T")
HTTPError = HfHubHTTPError.__mro__[1]
"""What the hub's client raises: an error of the library that it is built on, which is no OSError in all releases."""
NETWORK_ERRORS = (OSError, FSTimeoutError, HTTPError)
"""What a disk or a server that has gone away raises."""
LOADING_ERRORS = (
    *(OSError, EOFError, ValueError, RuntimeError, ImportError, tarfile.TarError, zipfile.BadZipFile),
    *(ArrowException, DatasetsError, HfHubHTTPError, *NETWORK_ERRORS),
)
"""What the library and those below it raise for what a user sees as one: images cannot be loaded."""
SERVER_ERRORS = (HfHubHTTPError, HTTPError, ConnectionError, TimeoutError, FSTimeoutError)
"""What a server alone raises: a dataset that is not there is none of these."""
REFUSALS = (400, 401, 403, 404, 410, 416)  # answers that stay as they are
LONGEST_PAUSE = 60  # seconds


def pause(attempt: int, error: Exception | None = None) -> int:
    """Seconds to wait after the failed `attempt` (from 0): as long as the server asks for, where its answer says so."""
    asked = getattr(answer_to(error), "headers", {}).get("Retry-After", "")
    return min(max(2**attempt, int(asked) if asked.isdecimal() else 0), LONGEST_PAUSE)


def passes(error: Exception) -> bool:
    """Whether what failed may work in a minute: not where a server has answered that it will not."""
    refused = getattr(answer_to(error), "status_code", None) in REFUSALS
    return not refused and not isinstance(error, OfflineModeIsEnabled)


def answer_to(error: BaseException | None) -> object | None:
    """The answer of a server that an error comes from, perhaps through other errors; None: there is none."""
    while error is not None and getattr(error, "response", None) is None:
        error = error.__cause__ or error.__context__
    return getattr(error, "response", None)


def retried(
    read: Callable[[], T],
    name: str,
    retries: int,
    errors: type[Exception] | tuple[type[Exception], ...] = NETWORK_ERRORS,
) -> T:
    """What `read` returns, tried again while it raises `errors`.

    Args:
        name: what is read, for messages.
        retries: how often, after pauses of 1, 2, 4, ... and at most 60 seconds.
    Raises:
        ReadFailed: it failed once more.
    """
    patience = sum(map(pause, range(retries)))
    for attempt in range(retries + 1):
        try:
            result = read()
        except errors as error:
            reason = one_line(error)
            if not passes(error):
                raise ReadFailed(f"{name} cannot be read: {reason}") from error
            if attempt == retries:
                raise ReadFailed(f"{name} cannot be read, tried for {patience} s: {reason}") from error
            say_once(f"warning: {name} cannot be read: {reason}; it and others are tried again for {patience} s")
            time.sleep(pause(attempt, error))
        else:
            if attempt:
                forget_said()
            return result
    raise AssertionError
