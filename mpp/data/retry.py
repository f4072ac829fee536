"""Reads that are tried again: disks and servers go away, and come back.

A file that cannot be read now is not a file that cannot be decoded. The first may be all right in a minute, and so may
all the others; the second will never be.
"""

import tarfile
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from datasets.exceptions import DatasetsError
from fsspec.exceptions import FSTimeoutError
from huggingface_hub.errors import OfflineModeIsEnabled
from pyarrow import ArrowException

from mpp.data.workers import allow_warning_again, warn_once
from mpp.errors import ReadFailed, one_line
from mpp.runtime.weights import HTTPError

try:
    from aiohttp import ClientError  # of fsspec over HTTP
except ImportError:
    ClientError = ConnectionError

T = TypeVar("T")
NETWORK_ERRORS = (OSError, FSTimeoutError, HTTPError, ClientError)
"""Errors of a disk or a server that has gone away."""
LOADING_ERRORS = (
    *NETWORK_ERRORS,
    EOFError,
    ValueError,
    RuntimeError,
    ImportError,
    tarfile.TarError,
    ArrowException,
    DatasetsError,
)
"""Errors of the `datasets` library and of the libraries below it where images cannot be loaded."""
SERVER_ERRORS = (HTTPError, ClientError, ConnectionError, TimeoutError, FSTimeoutError)
"""Errors of servers only: a local dataset that is not there raises none of them."""
LASTING_STATUS_CODES = (400, 401, 403, 404, 410, 416)  # answers of a server that will be the same in a minute
MAX_PAUSE_S = 60


def read_with_retries(
    read: Callable[[], T],
    name: str,
    retries: int,
    errors: type[Exception] | tuple[type[Exception], ...] = NETWORK_ERRORS,
) -> T:
    """Call `read`, again while it raises `errors`, and return its result.

    Args:
        name: of the file or server that is read, for messages.
        retries: how often it is tried again, after pauses of 1, 2, 4, ... and at most 60 seconds.
    Raises:
        ReadFailed: it failed once more.
    """
    for attempt in count():
        try:
            result = read()
        except errors as error:
            reason = one_line(error)
            if not is_temporary(error):
                raise ReadFailed(f"{name} cannot be read: {reason}") from error
            pauses = [min(2**number, MAX_PAUSE_S) for number in range(retries)]
            if attempt == retries:
                tried = f", tried for {sum(pauses)} s" if retries else ""
                raise ReadFailed(f"{name} cannot be read{tried}: {reason}") from error
            warn_once(f"warning: {name} cannot be read: {reason}; it and others are tried again for {sum(pauses)} s")
            time.sleep(pauses[attempt])
        else:
            if attempt:
                allow_warning_again()
            return result


def is_temporary(error: Exception) -> bool:
    """Whether a read that failed may succeed in a minute: not where a server's answer will stay the same."""
    if isinstance(error, OfflineModeIsEnabled):
        return False
    return getattr(server_response(error), "status_code", None) not in LASTING_STATUS_CODES


def server_response(error: BaseException | None) -> object | None:
    """The server's response in an error, or in the errors that caused it; None: there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response
        error = error.__cause__ or error.__context__
    return None
