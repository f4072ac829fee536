"""torch.compile of a run's model: whether it is used, how a run says so, and the error of a model that it cannot do."""

import importlib.util
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mpp.config import RunConfig
from mpp.errors import UserError
from mpp.runtime.hardware import uses_gpu
from mpp.runtime.start import user_message
from mpp.training.checkpoint import newest_step
from mpp.training.run_folder import group_of, saved_settings

OLDEST_TRITON_CARD = (7, 0)  # compute capability
MIN_COMPILED_STEPS = 2_000  # compiling takes minutes, and a fifth to a quarter of a step's time is gained
COMPILERS = ("torch._dynamo.", "torch._inductor.", "triton.")
MAX_CAUSE = 300  # characters of a message, in which a compiler may quote its whole command


def is_compiled(run: RunConfig, device: torch.device, before: bool | None) -> bool:
    """Whether a run's model is compiled: as given, else as before, else on a GPU if the run is long.

    Args:
        before: see `compiled_before`.
    """
    if run.compile != "auto":
        return run.compile
    if before is not None:
        return before
    return device.type == "cuda" and run.steps >= MIN_COMPILED_STEPS and can_compile(device)


def can_compile(device: torch.device) -> bool:
    """Whether inductor compiles for this GPU: Triton is here, knows the card, and has a C compiler."""
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name)
    knows_card = torch.cuda.get_device_capability(device) >= OLDEST_TRITON_CARD
    return has_compiler and knows_card and importlib.util.find_spec("triton") is not None


def compiled_before(folder: Path) -> bool | None:
    """Whether a run compiled its model when it last trained; None: it has no checkpoint yet, and may choose again."""
    if not newest_step(folder):
        return None
    return group_of(saved_settings(folder), "run").get("compile")


def describe_compiling(run: RunConfig, compiled: bool, before: bool | None) -> str:
    """Whether the model is compiled and why, in a line; empty where the user has said so or expects no compiling.

    Args:
        run: the settings as they were given.
        before: see `compiled_before`.
    """
    choice = "compiled" if compiled else "not compiled"
    if run.compile != "auto":
        changed = before is not None and before != compiled
        return f"{choice} from here on (run.compile): results differ by rounding" if changed else ""
    if not compiled and not uses_gpu():
        return ""
    if before is None:
        return (
            f"{choice} (run.compile auto: on a GPU, runs of at least {MIN_COMPILED_STEPS:,} steps are; "
            "decided when they begin)"
        )
    other = str(not compiled).lower()
    return f"{choice}, as when the run began (run.compile auto); with --run.compile {other} results differ by rounding"


@contextmanager
def explaining_failures(run: RunConfig) -> Iterator[None]:
    """While open, an error of torch's compilers in a compiled run is a UserError that says how to train without them.

    Errors that have a message for the user keep it: a GPU out of memory, a cache that cannot be written.
    """
    try:
        yield
    except Exception as error:
        if run.compile is True and user_message(error) is None and is_of_compiler(error):
            cause = short_cause(error)
            message = f"run.compile is true, and torch.compile fails ({cause}); --run.compile false trains without it"
            raise UserError(message) from error
        raise


def is_of_compiler(error: BaseException) -> bool:
    """Whether an exception is of a class of torch's compilers, or was raised in their code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_globals.get("__name__", "") if frames else ""
    return any(f"{module}.".startswith(COMPILERS) for module in (type(error).__module__, raised_in))


def short_cause(error: BaseException) -> str:
    """The cause of a failed compilation in a line: class, first line of the message, first error of a compiler."""
    cause = getattr(error, "inner_exception", None) or error
    lines = [" ".join(line.split()) for line in str(cause).splitlines() if line.strip()]
    quoted = [line for line in lines[1:] if "error:" in line.lower()]
    words = ": ".join(line.rstrip(":") for line in (type(cause).__name__, *lines[:1], *quoted[:1]))
    return words if len(words) <= MAX_CAUSE else f"{words[:MAX_CAUSE]}..."
