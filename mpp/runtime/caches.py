"""Caches outside the run folder: which one cannot be written, and the variable that names another.

Libraries put what they prepare, download and compile below the home folder. Where that cannot be written, as in a
container or on a full disk, the data and the weights are not to blame.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from huggingface_hub import constants

from mpp.errors import one_line

FULL = (errno.ENOSPC, errno.EDQUOT)


def caches() -> Iterator[tuple[str, str, Path]]:
    """The variable that names a cache, its value (or default), and the folder that it means."""
    home, given = constants.HF_HOME, os.environ
    for variable, folder in (("HF_DATASETS_CACHE", f"{home}/datasets"), ("HF_HUB_CACHE", constants.HF_HUB_CACHE)):
        own = given.get(variable)
        yield (variable, own, absolute(own)) if own else ("HF_HOME", home, absolute(folder))
    yield "HF_HOME", home, absolute(home)  # the token and the modules
    below_home = Path(given.get("XDG_CACHE_HOME") or "~/.cache")
    of_torch: dict[str, str | Path] = {"TORCH_HOME": below_home / "torch", "TRITON_CACHE_DIR": "~/.triton"}
    for variable, default in of_torch.items():
        folder = given.get(variable) or default
        yield variable, str(folder), absolute(folder)
    if compiled := given.get("TORCHINDUCTOR_CACHE_DIR"):  # torch sets it when it compiles
        yield "TORCHINDUCTOR_CACHE_DIR", compiled, absolute(compiled)


def absolute(folder: str | Path) -> Path:
    """A folder as errors name it."""
    return Path(folder).expanduser().absolute()


def unwritable_cache(error: BaseException | None) -> str | None:
    """Which cache cannot be written, where this is what an error comes from; None: it comes from something else."""
    while error is not None:
        name = getattr(error, "filename", None)
        if isinstance(error, OSError) and isinstance(name, str):
            for variable, value, folder in caches():
                touched = Path(name).absolute()
                concerned = touched.is_relative_to(folder) or folder.is_relative_to(touched)
                if concerned and (error.errno in FULL or not is_writable(folder)):
                    origin = "" if variable in os.environ else " (by default)"
                    refused = f"{variable} is {value}{origin}, a cache that cannot be written: {one_line(error)}"
                    return f"{refused}; it must be a folder that can be written, with space left"
        error = error.__cause__ or error.__context__
    return None


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or in one that can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
