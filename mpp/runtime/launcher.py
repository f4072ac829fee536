"""The launcher's wishes, read from the environment; those that mpp cannot fulfil are refused."""

import ipaddress
import os
import socket

from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object

from mpp.config import RunConfig, require
from mpp.errors import UserError
from mpp.runtime.hardware import is_set
from mpp.runtime.messages import note

SHARDED = "ACCELERATE_USE_FSDP"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
PROCESS_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables by which launchers say how many processes they started."""
DATA_PARALLEL = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def check_launcher() -> None:
    """Raise UserError where the launcher was asked for something that mpp does not do, or did not do it itself."""
    check_process_count()
    check_address()
    check_sharding()


def asks_for_sharding() -> bool:
    """Whether the launcher's configuration is of `distributed_type: FSDP`."""
    return is_set(SHARDED)


def sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """The launcher's settings for sharding; None: it did not ask for it, or there is only one process."""
    if not asks_for_sharding() or accelerator.num_processes == 1:
        return None
    return FullyShardedDataParallelPlugin()


def check_sharding() -> None:
    """Refuse options of sharding that mpp does not have: they would be dropped without a word."""
    if not asks_for_sharding():
        return
    version = os.environ.get("FSDP_VERSION", "1")
    require(version == "2", "the launcher's fsdp_version", version, "2 (--fsdp_version 2)")
    refused = {
        "fsdp_offload_params": ("FSDP_OFFLOAD_PARAMS", "the GPUs hold all shards"),
        "use_parallelism_config": ("ACCELERATE_USE_PARALLELISM_CONFIG", "there are shards of all processes"),
        "fsdp_activation_checkpointing": (
            "FSDP_ACTIVATION_CHECKPOINTING",
            "--model.activation_checkpointing true does this",
        ),
    }
    for option, (variable, reason) in refused.items():
        require(not is_set(variable), f"the launcher's {option}", os.environ.get(variable), f"false: {reason}")


def check_sharding_settings(run: RunConfig) -> None:
    """Refuse settings of sharding where the launcher did not ask for it: they have no effect."""
    if asks_for_sharding():
        return
    for name in ("shard_over", "sync_gradients"):
        value = getattr(run, name)
        default = getattr(RunConfig, name)
        needed = "the launcher shards the model (distributed_type: FSDP)"
        require(value == default, f"run.{name}", value, f"{default} or left out: it has no effect unless {needed}")


def note_idle_settings(run: RunConfig, processes: int, passes: int) -> None:
    """Note settings of several processes that these processes leave without effect; all of them have to call it.

    Args:
        processes: of the run.
        passes: forward passes of a step.
    """
    if processes == 1:
        for name in ("reduction", "shard_over", "sync_gradients"):
            value = getattr(run, name)
            if value != getattr(RunConfig, name):
                note(f"run.{name} {value} has no effect here: there is one process")
        return
    if run.shard_over == "node" and processes_per_node() == processes:
        note("run.shard_over node has no effect here: all processes are on one machine")
    if run.sync_gradients == "last_pass" and passes == 1:
        note("run.sync_gradients last_pass has no effect here: a step has one forward pass")


def processes_per_node() -> int:
    """Processes of each machine.

    Raises:
        UserError: the launcher does not say how many there are, or machines differ.
    """
    counts = gather_object([os.environ.get("LOCAL_WORLD_SIZE", "unknown")])
    alike = len(set(counts)) == 1 and counts[0] not in ("1", "unknown")
    found = ", ".join(sorted(set(counts)))
    allowed = f"all, unless all nodes have the same number of processes, above 1 (LOCAL_WORLD_SIZE is {found})"
    require(alike, "run.shard_over", "node", allowed)
    return int(counts[0])


def check_distributed_type(accelerator: Accelerator) -> None:
    """Refuse ways to distribute a model that mpp does not have."""
    if accelerator.distributed_type not in DATA_PARALLEL:
        kind = accelerator.distributed_type.value
        allowed = "MULTI_GPU, or FSDP with fsdp_version 2"
        raise UserError(f"the launcher's configuration asks for {kind}; it must be {allowed}")


def check_process_count() -> None:
    """Refuse to run as one process where the launcher was asked for several.

    `accelerate launch --cpu --num_processes 2` (and a MULTI_CPU config file) starts one process, with the address of
    a meeting point where it would wait for itself.
    """
    in_a_job = "SLURM_JOB_ID" in os.environ  # which may bring an address along
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and not in_a_job
    alone = not any(name in os.environ for name in PROCESS_COUNTS)
    if launched and alone and "MASTER_ADDR" in os.environ:
        raise UserError(
            "the launcher was asked for several processes and started one; on CPUs use "
            "`accelerate launch --multi_gpu --num_processes N` (which starts N processes, with or without GPUs)"
        )


def check_address() -> None:
    """Refuse several machines where others cannot reach this one by the first of its own addresses.

    gloo would tell the others to find this machine there, or at 127.0.0.1 where its name has no address of its own.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    meets_here = os.environ.get("MASTER_ADDR") in (None, "localhost", "127.0.0.1")
    if processes <= processes_here or meets_here or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = socket.gethostname()
    own_addresses = [address for address in addresses_of(name) if is_own(address)]
    if own_addresses and not ipaddress.ip_address(own_addresses[0]).is_loopback:
        return
    problem = "resolves to no address of its own"
    if own_addresses:
        problem = f"resolves to {own_addresses[0]}, which other machines cannot reach"
    allowed = "the network interface that they share, such as eth0"
    raise UserError(f"this machine's name, {name}, {problem}; GLOO_SOCKET_IFNAME must be {allowed}")


def addresses_of(name: str) -> list[str]:
    """Addresses that a host's name resolves to."""
    try:
        return [address[0] for *_, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's: a socket can listen at it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True
