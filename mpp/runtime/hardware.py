"""What this process computes with."""

import os

import torch

TRUE = ("1", "true", "t", "yes", "y", "on")  # as Accelerate reads its variables


def uses_gpu() -> bool:
    """Whether it runs on a GPU: there is one, and the launcher was not told `--cpu`."""
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in TRUE


def bf16_is_native() -> bool:
    """Whether bf16 is computed by the hardware, not emulated."""
    if uses_gpu():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not in every torch
    return any(getattr(torch.cpu, ask, bool)() for ask in asks)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
