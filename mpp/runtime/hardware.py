"""What this process computes with."""

import ctypes
import os
import sys

import torch

TRUE = ("1", "true", "t", "yes", "y", "on")  # as Accelerate reads its variables
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def uses_gpu() -> bool:
    """Whether it runs on a GPU: there is one, and the launcher was not told `--cpu`."""
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in TRUE


def device() -> str:
    """What torch calls it."""
    return "cuda" if uses_gpu() else "cpu"


def bf16_is_native() -> bool:
    """Whether bf16 is computed by the hardware, not emulated."""
    if uses_gpu():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not in every torch
    return any(getattr(torch.cpu, ask, bool)() for ask in asks)


def arithmetic() -> str:
    """What computes matrix products: where two processes have the same, the bits of their products are."""
    kind = "bf16" if bf16_is_native() else "fp32"
    if not uses_gpu():
        return f"{kind} by {torch.backends.cpu.get_cpu_capability()}"
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{kind} by CUDA {card.major}.{card.minor} with {card.multi_processor_count} multiprocessors"


def reuse_memory() -> None:
    """Keep the memory that an update on the CPU frees for the next one, up to 1 GB, in place of handing it back.

    Else each update asks the kernel for its pages again, which is a fifth of its time. glibc's allocator alone knows
    this. What the environment says of it (`MALLOC_...` or `GLIBC_TUNABLES`) comes first.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt and not chosen:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # its largest; larger tensors are still handed back
        mallopt(M_TRIM_THRESHOLD, 2**30)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
