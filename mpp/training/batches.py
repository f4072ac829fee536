"""The training batches of a task: of files, of decoded images in memory, or of a stream."""

import dataclasses
from collections.abc import Iterable

from mpp.data.decoded_cache import in_memory
from mpp.data.loader import training_loader
from mpp.data.stream import stream_workers, streaming_loader
from mpp.data.views import Batch
from mpp.data.workers import loader_processes
from mpp.training.checkpoint import Cursors
from mpp.training.task import ImageTask


def training_batches(task: ImageTask, start: int, cursors: Cursors) -> Iterable[Batch]:
    """This process's batches from step `start` on; a stream continues from its cursors.

    Loader processes are forked here, those of evaluations too.
    """
    layout, steps = task.layout, task.run.steps
    views = task.views(task.train)
    if task.data.streaming:
        workers = stream_workers(views, layout, cursors)
    else:
        images_left = (steps - start) * layout.global_batch_size // layout.world_size  # of this process
        views = in_memory(views, images_left, task.accelerator.device)
        workers = loader_processes(views.data)
    views = dataclasses.replace(views, data=dataclasses.replace(views.data, workers=workers))
    task.fixed_view_loader.start()
    if task.data.streaming:
        return streaming_loader(views, layout, start, steps, cursors)
    return training_loader(views, layout, start, steps)
