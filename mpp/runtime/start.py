"""A process's start: threads, precision, Accelerate, and how its errors look."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker, get_available_trackers
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    gather_object,
)
from tqdm.std import tqdm

from mpp.config import RunConfig, require
from mpp.errors import UserError
from mpp.runtime.caches import unwritable_cache
from mpp.runtime.hardware import TRUE, bf16_is_native, cores, reuse_memory, uses_gpu
from mpp.runtime.messages import process_rank
from mpp.runtime.output import steady_output, use_utf8
from mpp.runtime.processes import BUILDING, TRAINING, leave_the_others, no_answer, set_timeout
from mpp.runtime.signals import Preempted

SHARDED, ACCUMULATION = "ACCELERATE_USE_FSDP", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
OUT_OF_MEMORY = (
    "the GPU is out of memory; lower data.batch_size (accumulation makes up for it: what is trained is the same; but "
    "contrastive training gets fewer negatives), or set model.activation_checkpointing (of fine-tuning: "
    "activation_checkpointing). `mpp memory` counts what pre-training takes"
)
TOO_FEW = "there are more processes than GPUs; start one a GPU, or all on CPUs (CUDA_VISIBLE_DEVICES= mpp ...)"
FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")  # how CUDA's libraries say it


def command(main: Callable[[], None]) -> None:
    """Run a command's main function: what the user can mend ends it with one line on stderr and exit code 2."""
    use_utf8()
    steady_output()
    try:
        main()
    except KeyboardInterrupt:  # before or after training, which handles it itself
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except Preempted:
        leave_the_others()
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        rank = process_rank()
        label = "error" if rank is None else f"error (process {rank})"
        sys.stderr.write(f"{label}: {message}\n")  # in one piece, as other processes write too
        sys.stderr.flush()
        sys.exit(2)
    leave_the_others()


def user_message(error: Exception) -> str | None:
    """What a user is told of an error, in one line; None: it is a bug and keeps its traceback."""
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FULL):
        return OUT_OF_MEMORY
    if isinstance(error, torch.distributed.DistBackendError) and "Duplicate GPU" in str(error):
        return TOO_FEW
    if unanswered := no_answer(error):
        return unanswered
    if unwritable := unwritable_cache(error):
        return unwritable
    return str(error) if isinstance(error, UserError | OSError) else None  # a full disk is nobody's bug


def start(run: RunConfig) -> Accelerator:
    """Set threads and precision and join the other processes.

    Raises:
        UserError: the launcher promised several processes and started one, or wants a precision or a parallelism
            that there is not; a tracker is not installed.
    """
    require(sys.platform != "win32", "the system", "Windows", "Linux or macOS; WSL (wsl --install) is a Linux")
    if not os.environ.get("OMP_NUM_THREADS", "unset"):
        del os.environ["OMP_NUM_THREADS"]  # empty, which Accelerate takes for a number
    tqdm.monitor_interval = 0  # progress bars have no thread, beside which loader processes would be forked
    check_promise()
    check_address()
    check_sharding()
    check_trackers(run)
    precision, reason = choose_precision(run)
    AcceleratorState._reset_state()  # one process may do several runs, one after the other, each in its own precision
    sent = DDPCommunicationHookType.BF16 if run.reduction == "bf16" else DDPCommunicationHookType.NO
    cached = not asks_for_sharding()  # else autocast would hold a bf16 copy of all shards that were gathered
    with unset(SHARDED), unset(ACCUMULATION):  # mpp shards and accumulates by itself
        accelerator = Accelerator(
            cpu=not uses_gpu(),
            mixed_precision="bf16" if precision == "bf16" else "no",
            log_with=trackers(run) or None,
            project_dir=run.dir,
            dynamo_backend="no",  # run.compile decides; the launcher's wrapper would rename the weights of checkpoints
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=TRAINING),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook=sent),  # else held twice
                AutocastKwargs(cache_enabled=cached),
            ],
        )
    set_timeout(BUILDING)  # all have joined
    if accelerator.distributed_type not in DATA_PARALLEL:
        asked = accelerator.distributed_type.value
        raise UserError(
            f"the launcher's configuration asks for {asked}; it must be MULTI_GPU, or FSDP with fsdp_version 2"
        )
    check_alike(precision, "run.precision must name one")
    threads = choose_threads(run, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(threads)
    if accelerator.device.type == "cpu" and not sharding(accelerator):  # who shares a model is short of memory
        reuse_memory()
    accelerator.print(
        f"{accelerator.num_processes} process{'es' * (accelerator.num_processes > 1)} on {accelerator.device.type}, "
        f"{threads} CPU threads each, {precision} ({reason}){', sharded (FSDP2)' if sharding(accelerator) else ''}"
    )
    return accelerator


def start_alone(run: RunConfig, what: str) -> Accelerator:
    """The same for a command that is one process; UserError where a launcher started several."""
    accelerator = start(run)
    if accelerator.num_processes > 1:
        raise UserError(f"{what} by one process: start it with python, without a launcher")
    return accelerator


@contextmanager
def unset(variable: str) -> Iterator[None]:
    """Meanwhile the environment is without a variable."""
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        os.environ.update({variable: value} if value is not None else {})


def asks_for_sharding() -> bool:
    """Whether the launcher's configuration is of `distributed_type: FSDP`."""
    return os.environ.get(SHARDED, "").lower() in TRUE


def sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """The launcher's settings for sharding; None: it did not ask for it, or there is one process alone."""
    return FullyShardedDataParallelPlugin() if asks_for_sharding() and accelerator.num_processes > 1 else None


def check_sharding() -> None:
    """Refuse what the launcher can ask for, and what is not here: it would be dropped without a word."""
    if not asks_for_sharding():
        return
    version = os.environ.get("FSDP_VERSION", "1")
    require(version == "2", "the launcher's fsdp_version", version, "2 (--fsdp_version 2)")
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower()
    require(offload not in TRUE, "the launcher's fsdp_offload_params", offload, "false; the GPUs hold all shards")
    mesh = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower()
    require(mesh not in TRUE, "the launcher's use_parallelism_config", mesh, "false: there are shards of all processes")
    again = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower()
    require(
        again not in TRUE,
        *("the launcher's fsdp_activation_checkpointing", again),
        "false: --model.activation_checkpointing true does this",
    )


def trackers(run: RunConfig) -> list[GeneralTracker | str]:
    """Accelerate's trackers; our own objects where a resumed run has more to say when they are opened: see Tracker."""
    own: dict[str, Callable[[], GeneralTracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run_name="", logging_dir=run.dir),
        "wandb": lambda: WandBTracker(run.project, name=Path(run.dir).name, resume="allow"),
    }
    return [own[name]() if name in own else name for name in run.trackers]


def check_trackers(run: RunConfig) -> None:
    """Refuse trackers that do not exist or are not installed: Accelerate would drop the latter without a word."""
    installed = sorted(map(str, get_available_trackers()))
    missing = [name for name in run.trackers if name not in installed]
    if missing:
        raise UserError(f"run.trackers: {', '.join(missing)} not installed; installed are {', '.join(installed)}")


def check_promise() -> None:
    """Refuse to run alone where the launcher was asked for several processes.

    `accelerate launch --cpu --num_processes 2` (and a MULTI_CPU config file) starts one process, with the address of
    a meeting point and nobody to meet.
    """
    env = os.environ
    launched = "ACCELERATE_MIXED_PRECISION" in env and "SLURM_JOB_ID" not in env  # jobs may bring an address along
    alone = not any(name in env for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"))
    if launched and alone and "MASTER_ADDR" in env:
        raise UserError(
            "the launcher was asked for several processes and started one; on CPUs use "
            "`accelerate launch --multi_gpu --num_processes N` (which starts N processes, with or without GPUs)"
        )


def check_address() -> None:
    """Refuse several machines where this one's name leads to itself alone, or nowhere.

    gloo would tell the others that it is at 127.0.0.1.
    """
    env, name = os.environ, socket.gethostname()
    several = int(env.get("WORLD_SIZE", 1)) > int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", 1)))
    local = env.get("MASTER_ADDR") in (None, "localhost", "127.0.0.1")
    if not several or local or "GLOO_SOCKET_IFNAME" in env:
        return
    try:
        found = [(kind, *address) for kind, *_, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    own = next((address for kind, *address in found if is_own(kind, address)), None)
    if own is None or own[0].startswith("127.") or own[0] == "::1":
        where = (
            f"resolves to {own[0]}, which other machines cannot reach" if own else "resolves to no address of its own"
        )
        allowed = "the network interface that they share, such as eth0"
        raise UserError(f"this machine's name, {name}, {where}; GLOO_SOCKET_IFNAME must be {allowed}")


def is_own(kind: socket.AddressFamily, address: list) -> bool:
    """Whether a socket can listen at an address: it is this machine's."""
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.bind(tuple(address))
    except OSError:
        return False
    return True


def check_alike(precision: str, allowed: str) -> None:
    """Refuse processes that compute in other precisions, on machines of several kinds."""
    found = dict.fromkeys(gather_object([precision]))
    if len(found) > 1:
        raise UserError(f"the processes compute in {' and in '.join(found)}; {allowed}")


def choose_precision(run: RunConfig) -> tuple[str, str]:
    """("bf16" or "fp32", why): the config's word wins, then the launcher's, then what the hardware computes in."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    asked = launcher if run.precision == "auto" else run.precision
    if asked == "bf16" and uses_gpu() and not bf16_is_native():
        mend = "leave out run.precision" if run.precision == "bf16" else "run.precision fp32 overrules the launcher"
        raise UserError(f"bf16 is asked for, which this GPU emulates, slower than fp32: {mend}")
    if run.precision != "auto":
        overruled = launcher not in ("no", run.precision)
        return run.precision, f"run.precision{f', over the launcher, which says {launcher}' if overruled else ''}"
    if launcher == "bf16":
        return "bf16", "the launcher's choice"
    if launcher != "no":
        raise UserError(f"the launcher's mixed precision is {launcher}; it must be bf16 or no")
    return ("bf16", "computed by this hardware") if bf16_is_native() else ("fp32", "no bf16 in this hardware")


def choose_threads(run: RunConfig, local_processes: int) -> int:
    """Threads of this process. `accelerate launch` sets OMP_NUM_THREADS=1 by itself: 1 is nobody's choice."""
    chosen = int(os.environ.get("OMP_NUM_THREADS") or 1)
    return run.threads or (chosen if chosen > 1 else max(1, cores() // local_processes))
