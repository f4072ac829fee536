"""Full disks, and caches outside the run folder: the one that cannot be written, and the variable that names another.

Libraries put prepared, downloaded and compiled files below the home folder. Where that cannot be written, as in a
container or on a full disk, the data and the weights are not to blame.
"""

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from huggingface_hub import constants

from mpp.errors import one_line

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class Cache(NamedTuple):
    """A folder in which a library keeps prepared, downloaded or compiled files."""

    variable: str
    """Variable of the environment that names it."""
    value: str
    """Value of the variable, or its default."""
    folder: Path


def caches() -> list[Cache]:
    """The caches of the libraries that mpp uses."""
    home = constants.HF_HOME
    found = []
    for variable, default in (("HF_DATASETS_CACHE", f"{home}/datasets"), ("HF_HUB_CACHE", constants.HF_HUB_CACHE)):
        value = os.environ.get(variable)
        if value:
            found.append(Cache(variable, value, absolute(value)))
        else:
            found.append(Cache("HF_HOME", home, absolute(default)))
    found.append(Cache("HF_HOME", home, absolute(home)))  # the token and the modules

    below_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    defaults = {"TORCH_HOME": below_home / "torch", "TRITON_CACHE_DIR": Path("~/.triton")}
    for variable, folder in defaults.items():
        value = os.environ.get(variable) or str(folder)
        found.append(Cache(variable, value, absolute(value)))
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it when it compiles
    if compiled:
        found.append(Cache("TORCHINDUCTOR_CACHE_DIR", compiled, absolute(compiled)))
    return found


def absolute(folder: str | Path) -> Path:
    """A folder by its absolute path, as errors name it."""
    return Path(folder).expanduser().absolute()


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error comes from a disk, or a user's share of it, that is full."""
    words = [os.strerror(number) for number in DISK_IS_FULL]
    while error is not None:
        if any(each in str(error) for each in words):  # safetensors has an error of its own, without errno
            return True
        error = error.__cause__ or error.__context__
    return False


def unwritable_cache(error: BaseException | None) -> str | None:
    """The message for an error that comes from a cache that cannot be written; None: it comes from something else."""
    while error is not None:
        cache = cache_of(error)
        if cache is not None:
            origin = "" if cache.variable in os.environ else " (by default)"
            problem = f"a cache that cannot be written: {one_line(error)}"
            allowed = "a folder that can be written, with space left"
            return f"{cache.variable} is {cache.value}{origin}, {problem}; it must be {allowed}"
        error = error.__cause__ or error.__context__
    return None


def cache_of(error: BaseException) -> Cache | None:
    """The cache that cannot be written, if this error is of a file in it."""
    name = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(name, str):
        return None
    path = Path(name).absolute()
    for cache in caches():
        is_concerned = path.is_relative_to(cache.folder) or cache.folder.is_relative_to(path)
        if is_concerned and (error.errno in DISK_IS_FULL or not is_writable(cache.folder)):
            return cache
    return None


def is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder, which is created if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
