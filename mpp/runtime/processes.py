"""The processes of a run together: values that they exchange on their hosts, and timeouts of waiting."""

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import ProcessGroup

from mpp.errors import UserError
from mpp.runtime.workarounds import set_group_timeout

BUILDING_TIMEOUT = timedelta(hours=6)
"""Long enough for one process to download and prepare images while the others wait."""
TRAINING_TIMEOUT = timedelta(minutes=20)
"""Longer than any step, evaluation or checkpoint: a process that does not answer by then hangs."""
HANGS = "another process does not answer: it hangs, or its machine is gone; run the same command to resume"
GONE = "another process is gone, or its machine; run the same command to resume"


def no_answer(error: BaseException | None) -> str | None:
    """Message for the user where another process does not answer any more; None: it is another error."""
    if isinstance(error, RuntimeError) and "gloo/transport" in str(error):  # how its connection ended: in many ways
        return HANGS if "Timed out waiting" in str(error) else GONE
    if isinstance(error, torch.distributed.DistBackendError) and "ncclRemoteError" in str(error):
        return GONE  # where NCCL itself gives up waiting, it ends the process
    at_first = isinstance(error, torch.distributed.DistNetworkError) and "client socket" in str(error)
    if at_first or isinstance(error, torch.distributed.DistStoreError):
        return HANGS  # it did not join
    return None


def gloo_group() -> ProcessGroup:
    """All processes, connected by gloo: their exchange waits for no GPU, and takes no GPU memory.

    The first call builds the group. All processes have to make that call at the same place.
    """
    return gloo_group_like(torch.distributed.group.WORLD)


def maximum_of_all(value: float) -> float:
    """The largest value of all processes, which have to call it together."""
    if not torch.distributed.is_initialized():
        return value
    maximum = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=gloo_group())
    return float(maximum)


@lru_cache(maxsize=1)
def gloo_group_like(world: ProcessGroup) -> ProcessGroup:
    """A group of the same processes, by gloo."""
    return torch.distributed.new_group(backend="gloo", timeout=TRAINING_TIMEOUT)


def on_main_process(accelerator: Accelerator, act: Callable[[], object]) -> None:
    """Call `act` on the main process only; if it raises a ValueError or OSError, raise a UserError on every process."""
    problem = None
    if accelerator.is_main_process:
        try:
            act()
        except (ValueError, OSError) as error:
            problem = (type(error) if isinstance(error, UserError) else UserError, str(error))
    problems = [each for each in gather_object([problem]) if each]
    if problems:
        kind, message = problems[0]
        raise kind(message)


def broadcast_from_main(accelerator: Accelerator, get: Callable[[], Any]) -> Any:
    """The result of `get`, called on the main process, for all processes."""
    results: list[Any] = []
    on_main_process(accelerator, lambda: results.append(get()))
    return broadcast_object_list(results or [None])[0]


def set_timeout(timeout: timedelta) -> None:
    """Set the time that this process waits, from now on, for another one before it gives up with an error."""
    if torch.distributed.is_initialized():
        for group in (torch.distributed.group.WORLD, gloo_group()):
            set_group_timeout(timeout, group)


def leave_the_others() -> None:
    """End the process groups, on all processes alike."""
    if torch.distributed.is_initialized():
        gloo_group_like.cache_clear()
        torch.distributed.destroy_process_group()
