"""The start of a process: threads, precision, trackers, and the other processes by Accelerate."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker, get_available_trackers
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    gather_object,
)

from mpp.config import RunConfig, require
from mpp.errors import UserError
from mpp.runtime.hardware import bf16_is_native, reuse_memory, share_of_cores, uses_gpu
from mpp.runtime.launcher import (
    ACCUMULATION,
    SHARDED,
    asks_for_sharding,
    check_distributed_type,
    check_launcher,
    check_sharding_settings,
    sharding,
)
from mpp.runtime.messages import counted
from mpp.runtime.processes import BUILDING_TIMEOUT, TRAINING_TIMEOUT, set_timeout
from mpp.runtime.workarounds import correct_thread_count, stop_progress_thread, without_variables


def start(run: RunConfig) -> Accelerator:
    """Set threads and precision and join the other processes.

    Raises:
        UserError: the launcher promised several processes and started one, or wants a precision or a parallelism
            that mpp does not have; a tracker is not installed.
    """
    require(sys.platform != "win32", "the system", "Windows", "Linux or macOS; WSL (wsl --install) is a Linux")
    correct_thread_count()
    stop_progress_thread()
    check_launcher()
    check_sharding_settings(run)
    check_trackers(run)
    precision, reason = choose_precision(run)
    accelerator = join_processes(run, precision)
    check_distributed_type(accelerator)
    check_alike(precision, "run.precision must name one")
    threads = choose_threads(run)
    torch.set_num_threads(threads)
    sharded = sharding(accelerator) is not None
    if accelerator.device.type == "cpu" and not sharded:  # a model is sharded where memory is short
        reuse_memory()
    count = accelerator.num_processes
    each = " each" if count > 1 else ""
    accelerator.print(
        f"{counted(count, 'process', 'processes')} on {accelerator.device.type}, "
        f"{counted(threads, 'CPU thread')}{each}, {precision} ({reason}){', sharded (FSDP2)' if sharded else ''}"
    )
    return accelerator


def start_alone(run: RunConfig, what: str) -> Accelerator:
    """Start a command that is one process.

    Args:
        what: beginning of the error, such as "a file is written".
    Raises:
        UserError: a launcher started several.
    """
    accelerator = start(run)
    if accelerator.num_processes > 1:
        raise UserError(f"{what} by one process: start it with python, without a launcher")
    return accelerator


def join_processes(run: RunConfig, precision: str) -> Accelerator:
    """Accelerate's view of all processes, which have all joined."""
    AcceleratorState._reset_state()  # one process may do several runs, one after the other, each in its own precision
    sent = DDPCommunicationHookType.BF16 if run.reduction == "bf16" else DDPCommunicationHookType.NO
    options = [
        InitProcessGroupKwargs(timeout=TRAINING_TIMEOUT),
        DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=sent),  # else gradients are held twice
        # With its cache, autocast would hold a bf16 copy of all shards that were gathered.
        AutocastKwargs(cache_enabled=not asks_for_sharding()),
    ]
    with without_variables(SHARDED, ACCUMULATION):  # mpp shards and accumulates by itself
        accelerator = Accelerator(
            cpu=not uses_gpu(),
            mixed_precision="bf16" if precision == "bf16" else "no",
            log_with=trackers(run) or None,
            project_dir=run.dir,
            dynamo_backend="no",  # run.compile decides; the launcher's wrapper would rename the weights of checkpoints
            kwargs_handlers=options,
        )
    set_timeout(BUILDING_TIMEOUT)
    return accelerator


def trackers(run: RunConfig) -> list[GeneralTracker | str]:
    """Accelerate's trackers: by name, or as objects where a resumed run needs other options (see `Tracker`)."""
    chosen: list[GeneralTracker | str] = []
    for name in run.trackers:
        if name == "tensorboard":
            chosen.append(TensorBoardTracker(run_name="", logging_dir=run.dir))
        elif name == "wandb":
            chosen.append(WandBTracker(run.project, name=Path(run.dir).name, resume="allow"))
        else:
            chosen.append(name)
    return chosen


def check_trackers(run: RunConfig) -> None:
    """Refuse trackers that do not exist or are not installed: Accelerate would drop the latter without a word."""
    installed = sorted(map(str, get_available_trackers()))
    missing = [name for name in run.trackers if name not in installed]
    if missing:
        raise UserError(f"run.trackers: {', '.join(missing)} not installed; installed are {', '.join(installed)}")


def check_alike(precision: str, allowed: str) -> None:
    """Refuse processes that compute in different precisions, on machines of several kinds."""
    precisions = dict.fromkeys(gather_object([precision]))
    if len(precisions) > 1:
        raise UserError(f"the processes compute in {' and in '.join(precisions)}; {allowed}")


def choose_precision(run: RunConfig) -> tuple[str, str]:
    """The precision, "bf16" or "fp32", and why: the config decides, else the launcher, else the hardware."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = launcher if run.precision == "auto" else run.precision
    if wanted == "bf16" and uses_gpu() and not bf16_is_native():
        mend = "leave out run.precision" if run.precision == "bf16" else "run.precision fp32 overrules the launcher"
        raise UserError(f"bf16 is emulated on this GPU, slower than fp32: {mend}")
    if run.precision != "auto":
        if launcher in ("no", run.precision):
            return run.precision, "run.precision"
        return run.precision, f"run.precision; the launcher's choice was {launcher}"
    if launcher == "bf16":
        return "bf16", "the launcher's choice"
    if launcher != "no":
        raise UserError(f"the launcher's mixed precision is {launcher}; it must be bf16 or no")
    if bf16_is_native():
        return "bf16", "computed by this hardware"
    return "fp32", "no bf16 in this hardware"


def choose_threads(run: RunConfig) -> int:
    """Number of threads of this process: of the config, else OMP_NUM_THREADS above 1, else its share of the cores.

    `accelerate launch` sets OMP_NUM_THREADS=1 by itself, so that 1 is no choice of the user.
    """
    if run.threads:
        return run.threads
    from_environment = int(os.environ.get("OMP_NUM_THREADS") or 1)
    if from_environment > 1:
        return from_environment
    return share_of_cores()
