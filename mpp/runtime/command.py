"""Ends of a command: errors that the user can mend are one line, bugs keep their traceback."""

import sys
from collections.abc import Callable

import torch

from mpp.errors import UserError
from mpp.runtime.caches import unwritable_cache
from mpp.runtime.messages import process_rank
from mpp.runtime.output import steady_output, use_utf8
from mpp.runtime.processes import leave_the_others, no_answer
from mpp.runtime.signals import Preempted

USER_ERROR_CODE = 2
INTERRUPTED_CODE = 130
OUT_OF_MEMORY = (
    "the GPU is out of memory; lower data.batch_size (accumulation makes up for it, so training stays the same; "
    "only contrastive training gets fewer negatives), or set model.activation_checkpointing (in fine-tuning: "
    "activation_checkpointing). `mpp memory` estimates the memory of pre-training"
)
OUT_OF_MEMORY_WORDS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Messages of CUDA's libraries when memory is short; torch has an error of its own."""
TOO_FEW_GPUS = "there are more processes than GPUs; start one a GPU, or all on CPUs (CUDA_VISIBLE_DEVICES= mpp ...)"


def run_main(main: Callable[[], object]) -> None:
    """Run a command's main function. An error that the user can mend ends it with one line on stderr, exit code 2."""
    use_utf8()
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
        rank = process_rank()
        label = "error" if rank is None else f"error (process {rank})"
        sys.stderr.write(f"{label}: {message}\n")  # in one piece, as other processes write too
        sys.stderr.flush()
        sys.exit(USER_ERROR_CODE)
    leave_the_others()


def user_message(error: Exception) -> str | None:
    """The message of an error that the user can mend, in one line; None: it is a bug and keeps its traceback."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, torch.distributed.DistBackendError) and "Duplicate GPU" in str(error):
        return TOO_FEW_GPUS
    message = no_answer(error) or unwritable_cache(error)
    if message is not None:
        return message
    if isinstance(error, UserError | OSError):  # an OSError is a full disk or the like, and no bug
        return str(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice. A compiler that tries its kernels hands such an error on as its own."""
    error = getattr(error, "inner_exception", error)
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY_WORDS)
