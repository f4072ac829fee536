"""Training batches, one forward pass's at a time: waiting for them, undecodable images, copies to the device."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mpp.data.views import Batch
from mpp.errors import UserError

RECENT_IMAGES = 1024  # latest images, most of which must be decodable; at least those of a batch
MIN_IMAGES = 32  # fewer are too few to tell


class Feed:
    """Batches of this process, taken when they are needed.

    Args:
        batches: without end.
    """

    def __init__(self, batches: Iterable[Batch]):
        self.batches = iter(batches)
        self.recently_undecoded: deque[bool] = deque(maxlen=RECENT_IMAGES)
        """Whether each of the latest images could not be decoded."""
        self.waited = 0.0

    def take(self) -> Batch:
        """The next batch.

        Raises:
            ReadFailed: images cannot be read.
            UserError: most of the latest images cannot be decoded.
        """
        begin = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - begin
        self.count_undecoded(batch)
        return batch

    def try_take(self) -> tuple[Batch | None, UserError | None]:
        """The next batch, or the error in its place."""
        try:
            return self.take(), None
        except UserError as error:
            return None, error

    def reset_wait(self) -> float:
        """Seconds waited for batches since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def count_undecoded(self, batch: Batch) -> None:
        """Count images that could not be decoded; UserError if they are most of the latest ones."""
        undecoded, decoded = len(batch.unreadable), len(batch.images)
        if undecoded + decoded > self.recently_undecoded.maxlen:
            self.recently_undecoded = deque(self.recently_undecoded, maxlen=undecoded + decoded)
        self.recently_undecoded.extend([True] * undecoded)
        self.recently_undecoded.extend([False] * decoded)
        recent, bad = len(self.recently_undecoded), sum(self.recently_undecoded)
        if recent < MIN_IMAGES or bad <= recent / 2:
            return
        example = f", such as {batch.unreadable[-1]}" if batch.unreadable else ""
        raise UserError(f"{bad} of the last {recent} images cannot be decoded{example}")


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
