"""Begin and end of a command: one line for errors that the user can mend; threads, precision, processes."""

import os
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    patch_environment,
)
from tqdm import tqdm

from mpp.config import RunConfig, require
from mpp.errors import UserError
from mpp.runtime.hardware import bf16_is_native, is_set, reuse_memory, share_of_cores, uses_gpu
from mpp.runtime.messages import counted, process_rank, steady_output, warn
from mpp.runtime.processes import (
    BUILDING_TIMEOUT,
    DATA_PARALLEL,
    SHARDED,
    TRAINING_TIMEOUT,
    check_address,
    check_sharding,
    from_all,
    leave_the_others,
    no_answer,
    set_timeout,
    sharding,
)
from mpp.runtime.signals import Preempted

USER_ERROR_CODE = 2
INTERRUPTED_CODE = 130
OUT_OF_MEMORY = (
    "the GPU is out of memory; lower data.batch_size (accumulation makes up for it, so training stays the same; "
    "only contrastive training gets fewer negatives), or set model.activation_checkpointing (in fine-tuning: "
    "activation_checkpointing). `mpp memory` estimates the memory of pre-training"
)
OUT_OF_MEMORY_WORDS = (
    *("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"),
    *("Cuda failure 2 ", "Cuda failure 'out of memory'"),  # of NCCL
)
"""Messages where memory is short: torch's, which a compiler hands on as its own, and those of CUDA's libraries."""
OWN_WORK = {SHARDED: "false", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
"""Variables by which Accelerate would do by itself what mpp does: sharding and accumulation."""


def run_main(main: Callable[[], object]) -> None:
    """Run a command's main function. An error that the user can mend ends it with one line on stderr, exit code 2."""
    steady_output()
    try:
        main()
    except KeyboardInterrupt:  # before or after training, which handles it itself
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED_CODE)
    except Preempted:
        leave_the_others()
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        label = f"error (process {process_rank()})" if process_rank() else "error"
        sys.stderr.write(f"{label}: {message}\n")  # in one piece, as other processes write too
        sys.stderr.flush()
        sys.exit(USER_ERROR_CODE)
    leave_the_others()


def user_message(error: Exception) -> str | None:
    """The message of an error that the user can mend, in one line; None: it is a bug and keeps its traceback."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, UserError | OSError):  # an OSError is a full disk or the like, and no bug
        return str(error)
    return no_answer(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice."""
    return any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def start(run: RunConfig) -> Accelerator:
    """Set threads and precision and join the other processes.

    Raises:
        UserError: the launcher wants a precision or a parallelism that mpp does not have.
    """
    tqdm.monitor_interval = 0  # no thread that watches its bars: loader processes would be forked while it runs
    check_address()
    check_sharding()
    if uses_gpu():
        rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        require(rank < gpus, "LOCAL_RANK", rank, f"below {gpus}, the number of GPUs here: one process for each")
    precision, reason = choose_precision(run)
    accelerator = join_processes(run, precision)
    kind = accelerator.distributed_type
    require(kind in DATA_PARALLEL, "the launcher's distributed_type", kind.value, "MULTI_GPU, or FSDP of version 2")
    check_alike(precision)
    threads = choose_threads(run)
    torch.set_num_threads(threads)
    sharded = sharding(accelerator) is not None
    if accelerator.device.type == "cpu" and not sharded:  # a model is sharded where memory is short
        reuse_memory()
    if not uses_gpu() and not is_set("ACCELERATE_USE_CPU") and torch.cuda.device_count():
        warn(f"torch cannot use the GPU here: its driver may be too old for CUDA {torch.version.cuda}")
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
        AutocastKwargs(cache_enabled=not is_set(SHARDED)),
    ]
    with patch_environment(**OWN_WORK):
        accelerator = Accelerator(
            cpu=not uses_gpu(),
            mixed_precision="bf16" if precision == "bf16" else "no",
            project_dir=run.dir,
            dynamo_backend="no",  # run.compile decides; the launcher's wrapper would rename the weights of checkpoints
            kwargs_handlers=options,
        )
    set_timeout(BUILDING_TIMEOUT)
    return accelerator


def check_alike(precision: str) -> None:
    """Refuse processes that compute in different precisions, on machines of several kinds."""
    precisions = dict.fromkeys(from_all(precision))
    if len(precisions) > 1:
        raise UserError(f"the processes compute in {' and in '.join(precisions)}; run.precision must name one")


def choose_precision(run: RunConfig) -> tuple[str, str]:
    """The precision, "bf16" or "fp32", and why: the config decides, else the launcher, else the hardware."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if run.precision != "auto":
        overruled = "" if launcher in ("no", run.precision) else f"; the launcher's choice was {launcher}"
        return run.precision, f"run.precision{overruled}"
    require(launcher in ("bf16", "no"), "the launcher's mixed precision", launcher, "bf16 or no")
    if launcher == "bf16":
        return "bf16", "the launcher's choice"
    return ("bf16", "computed by this hardware") if bf16_is_native() else ("fp32", "no bf16 in this hardware")


def choose_threads(run: RunConfig) -> int:
    """Number of threads of this process: of the config, else OMP_NUM_THREADS, else its share of the cores.

    Launchers set OMP_NUM_THREADS=1 by themselves, so that 1 under them is no choice of the user.
    """
    if run.threads:
        return run.threads
    from_environment = os.environ.get("OMP_NUM_THREADS", "")
    is_launched = not os.environ.keys().isdisjoint(("ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE"))
    is_chosen = from_environment.isdecimal() and not (is_launched and from_environment == "1")
    return int(from_environment) if is_chosen else share_of_cores()
