"""The training batches of a task: of files, of decoded images in memory, or of a stream."""

import dataclasses
from collections.abc import Iterable

from accelerate.utils import gather_object

from mpp.data.decoded_cache import in_memory
from mpp.data.loader import training_loader
from mpp.data.stream import stream_workers, streaming_loader
from mpp.data.views import Batch, batch_bytes
from mpp.data.workers import loader_processes
from mpp.errors import UserError
from mpp.runtime.messages import note
from mpp.runtime.resources import LoaderRoom, loader_room
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
    workers = fit_workers(task, workers, as_before=bool(cursors))
    views = dataclasses.replace(views, data=dataclasses.replace(views.data, workers=workers))
    task.fixed_view_loader.start()
    if task.data.streaming:
        return streaming_loader(views, layout, start, steps, cursors)
    return training_loader(views, layout, start, steps)


def fit_workers(task: ImageTask, workers: int, as_before: bool) -> int:
    """As many of these loader processes as shared memory has room for; those of evaluations are limited likewise.

    Args:
        as_before: whether there must be so many as when the run began.
    Raises:
        UserError: not all of them fit, and their number was given.
    """
    evaluation_workers = task.fixed_view_loader.workers
    room = room_of_all(task, workers, evaluation_workers)
    task.fixed_view_loader.workers = room.evaluation_workers
    if room.workers < workers and as_before:
        raise UserError(f"a stream is resumed with {workers} loader processes, as before; {room.shortage}")
    if room.workers < workers and task.data.workers is not None:
        allowed = f"at most {room.workers} (0: the training process loads)"
        raise UserError(f"data.workers is {workers}; it must be {allowed}: {room.shortage}")
    if room.shortage:
        for_evaluations = f"{room.evaluation_workers} of {evaluation_workers} for evaluations"
        note(f"{room.workers} of {workers} loader processes (data.workers), and {for_evaluations}: {room.shortage}")
    return room.workers


def room_of_all(task: ImageTask, workers: int, evaluation_workers: int) -> LoaderRoom:
    """As many of these loader processes as shared memory has room for, on all machines."""
    room = LoaderRoom(workers, evaluation_workers)
    task.accelerator.wait_for_everyone()  # those that decode images for their cache take shared memory meanwhile
    if workers or evaluation_workers:
        size = batch_bytes(task.held_out_views, task.layout.largest_share)
        room = loader_room(workers, evaluation_workers, size)
    rooms = gather_object([room])  # no process has loader processes before all have looked; all have as many
    return LoaderRoom(
        min(each.workers for each in rooms),
        min(each.evaluation_workers for each in rooms),
        max(each.shortage for each in rooms),
    )
