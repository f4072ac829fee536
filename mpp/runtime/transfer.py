"""Copies of a batch to the device, which continue while a GPU computes."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are copied to a GPU."""
    return torch.cuda.Stream(device)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of a batch on the device.

    On CUDA they are copied on a stream of their own. The host queues a pass while the GPU computes the one before, so
    the copy is done by the time the pass begins. It waits for nothing: its memory is of its own stream.
    """
    if device.type != "cuda":
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    copying = copy_stream(device)
    computing = torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copying)
    for copy in copies:
        copy.record_stream(computing)  # its memory is not reused before the pass is computed
    return copies
