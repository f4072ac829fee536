"""The training batches of a task: loaded, taken one forward pass's at a time, copied to the device."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpp.data.loader import in_memory, training_loader
from mpp.data.stream import streaming_loader
from mpp.data.views import Batch
from mpp.errors import UserError
from mpp.training.checkpoint import Cursors
from mpp.training.task import ImageTask

RECENT_IMAGES = 1024  # latest images, most of which must be decodable; at least those of a batch
MIN_IMAGES = 32  # fewer are too few to tell


def training_batches(task: ImageTask, start: int, cursors: Cursors) -> Iterable[Batch]:
    """This process's batches from step `start` on, of files or decoded images; a stream continues from its cursors.

    Loader processes are forked here, those of evaluations too.
    """
    layout, steps = task.layout, task.run.steps
    views = task.views(task.train)
    if not task.data.streaming:
        images_left = (steps - start) * layout.global_batch_size // layout.world_size  # of this process
        views = in_memory(views, images_left, task.accelerator.device)
    task.fixed_view_loader.start()
    if task.data.streaming:
        return streaming_loader(views, layout, start, steps, cursors)
    return training_loader(views, layout, start, steps)


class Feed:
    """Batches of this process, taken when they are needed.

    Args:
        batches: without end.
        is_for_gpu: whether a GPU computes with them.
    """

    def __init__(self, batches: Iterable[Batch], is_for_gpu: bool = False):
        self.batches = iter(batches)
        self.is_for_gpu = is_for_gpu
        self.recently_undecoded: list[bool] = []
        """Whether each of the latest images could not be decoded."""
        self.waited = 0.0
        self.gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Events of a GPU before and after each wait."""

    def take(self) -> Batch:
        """The next batch.

        Raises:
            ReadFailed: images cannot be read.
            UserError: most of the latest images cannot be decoded.
        """
        with self.waiting():
            batch = next(self.batches)
        self.count_undecoded(batch)
        return batch

    def try_take(self) -> tuple[Batch | None, UserError | None]:
        """The next batch, or the error in its place."""
        try:
            return self.take(), None
        except UserError as error:
            return None, error

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While open, a batch is waited for: by the host, and by a GPU as far as it has done all that is queued."""
        if self.is_for_gpu:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self.gaps.append((before, after))
        else:
            begin = time.perf_counter()
            yield
            self.waited += time.perf_counter() - begin

    def reset_wait(self) -> float:
        """Seconds that the device waited for batches since the last call; a GPU has to be done with them."""
        waited = self.waited + sum(before.elapsed_time(after) for before, after in self.gaps) / 1000
        self.waited = 0.0
        self.gaps.clear()
        return waited

    def count_undecoded(self, batch: Batch) -> None:
        """Count images that could not be decoded; UserError if they are most of the latest ones."""
        outcomes = [True] * len(batch.unreadable) + [False] * len(batch.images)
        latest = self.recently_undecoded + outcomes
        self.recently_undecoded = latest[-max(RECENT_IMAGES, len(outcomes)) :]
        recent, bad = len(self.recently_undecoded), sum(self.recently_undecoded)
        if recent >= MIN_IMAGES and bad > recent / 2:
            example = f", such as {batch.unreadable[-1]}" if batch.unreadable else ""
            raise UserError(f"{bad} of the last {recent} images cannot be decoded{example}")


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of a batch on the device; the host does not wait for pinned ones."""
    return [tensor.to(device, non_blocking=True) for tensor in tensors]
