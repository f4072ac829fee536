"""The training batches of a task: of files, of decoded images in memory, or of a stream."""

from collections.abc import Iterable

from mpp.data.loader import in_memory, training_loader
from mpp.data.stream import streaming_loader
from mpp.data.views import Batch
from mpp.training.checkpoint import Cursors
from mpp.training.task import ImageTask


def training_batches(task: ImageTask, start: int, cursors: Cursors) -> Iterable[Batch]:
    """This process's batches from step `start` on; a stream continues from its cursors.

    Loader processes are forked here, those of evaluations too.
    """
    layout, steps = task.layout, task.run.steps
    views = task.views(task.train)
    if task.data.streaming:
        task.fixed_view_loader.start()
        return streaming_loader(views, layout, start, steps, cursors)
    images_left = (steps - start) * layout.global_batch_size // layout.world_size  # of this process
    views = in_memory(views, images_left, task.accelerator.device)
    task.fixed_view_loader.start()
    return training_loader(views, layout, start, steps)
