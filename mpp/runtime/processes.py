"""The processes of a run together: what they were launched as, what they exchange, how long they wait."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed import ProcessGroup, distributed_c10d

from mpp.config import require
from mpp.errors import UserError, one_line
from mpp.runtime.hardware import is_set

BUILDING_TIMEOUT = timedelta(hours=6)
"""Long enough for one process to download and prepare images while the others wait."""
TRAINING_TIMEOUT = timedelta(minutes=20)
"""Longer than any step, evaluation or checkpoint: a process that does not answer by then hangs."""
NO_ANSWER = "another process does not answer: it hangs, or it or its machine is gone; run the same command to resume"
LOST_CONNECTIONS = ("gloo/transport", "ncclRemoteError", "client socket")
"""Words of torch's errors where a process has died, hangs or never joined: of gloo, of NCCL, of the first meeting."""

SHARDED = "ACCELERATE_USE_FSDP"
"""Variable by which the launcher asks for `distributed_type: FSDP`."""
LOCAL_HOSTS = (None, "localhost", "127.0.0.1")
DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
REFUSED = ("FSDP_OFFLOAD_PARAMS", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_ACTIVATION_CHECKPOINTING")
"""Variables of the launcher's options of sharding that mpp does not carry out."""
T = TypeVar("T")


def check_address() -> None:
    """Refuse several machines where this one's name leads to itself: gloo would tell the others to find it there."""
    processes = os.environ.get("WORLD_SIZE", "1")
    several_machines = int(processes) > int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if not several_machines or os.environ.get("MASTER_ADDR") in LOCAL_HOSTS or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = socket.gethostname()
    with suppress(OSError):  # a name of IPv6 alone
        address = socket.gethostbyname(name)
        allowed = f"the network interface that all machines share, such as eth0: the name {name} leads to {address}"
        require(not address.startswith("127."), "GLOO_SOCKET_IFNAME", "not set", allowed)


def check_sharding() -> None:
    """Refuse options of sharding that would be dropped without a word."""
    if not is_set(SHARDED):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    require(version == "2", "the launcher's fsdp_version", version, "2 (--fsdp_version 2)")
    for variable in REFUSED:
        require(not is_set(variable), f"the launcher's {variable.lower()}", os.environ.get(variable), "false")


def sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """The launcher's settings for sharding; None: it did not ask for it, or there is only one process."""
    shards = is_set(SHARDED) and accelerator.num_processes > 1
    return FullyShardedDataParallelPlugin() if shards else None


def no_answer(error: BaseException | None) -> str | None:
    """Message for the user where another process does not answer any more; None: it is another error."""
    is_lost = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_CONNECTIONS)
    return NO_ANSWER if is_lost or isinstance(error, torch.distributed.DistStoreError) else None


def gloo_group() -> ProcessGroup:
    """All processes, connected by gloo: their exchange waits for no GPU, and takes no GPU memory.

    The first call builds the group. All processes have to make that call at the same place.
    """
    return gloo_group_like(torch.distributed.group.WORLD)


@lru_cache(maxsize=1)
def gloo_group_like(world: ProcessGroup) -> ProcessGroup:
    """A group of the same processes, by gloo."""
    return torch.distributed.new_group(backend="gloo", timeout=TRAINING_TIMEOUT)


def maximum_of_all(value: float) -> float:
    """The largest value of all processes, which have to call it together."""
    if not torch.distributed.is_initialized():
        return value
    maximum = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=gloo_group())
    return float(maximum)


def from_all(value: T) -> list[T]:
    """The values of all processes by rank, which have to call it together.

    By gloo: NCCL would not notice a process that fails meanwhile.
    """
    if not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=gloo_group())
    return values


def wait_for_all() -> None:
    """Wait until all processes are here: see `from_all`."""
    from_all(None)


@contextmanager
def ahead_of_others(is_first: bool) -> Iterator[None]:
    """Run the `with` block on the first process before all others, which read what it has cached."""
    if not is_first:
        wait_for_all()
    yield
    if is_first:
        wait_for_all()


def on_main_process(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """The result of `act`, called on the main process only, for all processes.

    Raises:
        UserError: on every process, if it raises a UserError or OSError.
    """
    outcome = attempt(act) if accelerator.is_main_process else None
    result, error = from_all(outcome)[0]
    if error is not None:
        raise error
    return result


def on_each_node(accelerator: Accelerator, act: Callable[[], T]) -> list[T]:
    """The results of `act`, called by one process of each node, for all processes.

    Raises:
        UserError: on every process, if it raises a UserError or OSError on a node.
    """
    outcome = attempt(act) if accelerator.is_local_main_process else None
    outcomes = [each for each in from_all(outcome) if each is not None]
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]


def attempt(act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """The result of `act`, or its UserError or OSError as a UserError: another process may wait for either."""
    try:
        return act(), None
    except (UserError, OSError) as error:
        return None, error if isinstance(error, UserError) else UserError(one_line(error))


def raise_together(failure: Exception | None) -> None:
    """Raise a failure of any process on all of them, which have to call it together: else they would wait for it."""
    for each in from_all(failure):
        if each is not None:
            raise each


def set_timeout(timeout: timedelta) -> None:
    """Set the time that this process waits, from now on, for another one before it gives up with an error."""
    set_of_group = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before 2.10
    if torch.distributed.is_initialized():
        for group in (torch.distributed.group.WORLD, gloo_group()):
            set_of_group(timeout, group)


def leave_the_others() -> None:
    """End the process groups, on all processes alike."""
    if torch.distributed.is_initialized():
        gloo_group_like.cache_clear()
        torch.distributed.destroy_process_group()
