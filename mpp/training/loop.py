"""The one training loop: whatever is trained here, it is trained by `fit`.

It knows a model, a loss, batches, an optimiser and a schedule, and nothing of what they mean. All of its state is the
step, the weights and the optimiser's, so that a killed run goes on exactly.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from tqdm import tqdm

from mpp.config import OptimConfig, RunConfig
from mpp.data.views import Batch, BatchLayout
from mpp.errors import ReadFailed, UserError
from mpp.metrics import Sums, total
from mpp.runtime.preemption import Ending, Preemption
from mpp.training.checkpoint import Places, restore, save_checkpoint, snapshot
from mpp.training.feed import Feed
from mpp.training.optim import averaged_weights
from mpp.training.parallel import prepare
from mpp.training.tracking import HELD_OUT_LOSS, Speed, Tracker, last_step, progress_bar
from mpp.training.update import Update


class Task(Protocol):
    """What is trained: a loss on batches, and what is to be seen of it."""

    model: nn.Module

    def batches(self, start: int, places: Places) -> Iterable[Batch]:
        """This process's batches from update `start` on; a stream goes on from its places."""

    def name(self, index: int) -> str:
        """What a person finds a training image by."""

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        """Mean loss of a batch on the device and, if asked, sums for `describe`. `model` is wrapped for training."""

    def describe(self, sums: Sums) -> dict[str, float]:
        """Sums over all batches and processes to scalars."""

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        """Scalars on held-out images, all of them on the main process; may log pictures. `model` is in eval mode."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the trained encoder, from the main process. `model` is without wrappers."""


def due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many updates is done after update `step`; the last one counts."""
    return every > 0 and (step % every == 0 or step == last)


def fit(loop: "Loop", preemption: Preemption) -> None:
    """Train from the newest checkpoint of the run's folder to its last step, then export.

    Args:
        preemption: which is asked once a step.
    Raises:
        Diverged: a loss or gradient that is not finite; nothing was updated by it.
        ReadFailed: images cannot be read; the checkpoint is written.
        UserError: most images cannot be decoded; the checkpoint is written. Or it cannot be written.
        Preempted: a signal asked for a stop; the checkpoint is written.
    """
    run = loop.run
    if loop.start and due(loop.start, run.eval_every, run.steps) and not loop.evaluated(loop.start):
        loop.evaluate(loop.start)  # it failed when this step was done
    for step in range(loop.start, run.steps):
        done = step + 1
        micro, failure = loop.feed.attempt()
        ending = preemption.agreed(failed=failure is not None)
        if ending is Ending.FAILURE:
            loop.fail(step, failure)
        if ending is Ending.SIGNAL and step > loop.start:
            loop.stop(step)
            preemption.leave(f"after step {step}; a checkpoint is written")
        loop.train(step, micro)
        if due(done, run.eval_every, run.steps):
            loop.evaluate(done)
        if due(done, run.checkpoint_every, run.steps):
            loop.save(done)
    loop.bar.close()
    loop.export()


class Loop:
    """A run under way, from its newest checkpoint on: what is done in a step, around it, and where it ends.

    Args:
        config: the whole config, for the trackers alone.
        flops: executed by an update.
    """

    def __init__(
        self,
        task: Task,
        accelerator: Accelerator,
        run: RunConfig,
        optim: OptimConfig,
        layout: BatchLayout,
        folder: Path,
        config: Any,
        flops: int,
    ):
        self.task, self.accelerator, self.run, self.optim, self.layout = task, accelerator, run, optim, layout
        self.folder, self.flops = folder, flops
        self.parallel = prepare(task.model, accelerator, optim, run)
        self.model, self.optimizer = self.parallel.model, self.parallel.optimizer.optimizer  # without wrappers
        self.start, self.places = resume(accelerator, folder, self.model, self.optimizer)
        self.saved = self.start  # the step of the newest checkpoint
        self.tracker = Tracker(accelerator, folder, config, self.start)
        self.update = Update(task, accelerator, self.parallel.trained, self.parallel.optimizer, optim, layout, run)
        self.speed, self.bar = (
            Speed(flops, layout.images, accelerator.device),
            progress(accelerator, run.steps, self.start),
        )
        self.feed = Feed(task.batches(self.start, self.places), layout.accumulation_steps)

    def train(self, step: int, micro: list[Batch]) -> None:
        """Do update `step` (from 0) on its batches, and log it where that is due."""
        done = step + 1
        log = due(done, self.run.log_every, self.run.steps)
        values, sums = self.update(step, micro, measure=log)
        self.places |= places_after(micro)
        self.speed.updates += 1
        self.tracker.warn_unreadable(self.feed.undecoded)
        self.bar.update()
        if log:
            scalars = {name: float(value) for name, value in values.items()} | self.task.describe(total(sums))
            scalars |= self.speed.read(self.feed) | {"compute/pflop": self.flops * done / 1e15}
            scalars |= {"unreadable": self.tracker.count_unreadable()}
            self.tracker.log(done, scalars)
            self.bar.set_postfix_str(f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s")

    def evaluate(self, done: int) -> None:
        """Evaluate on the held-out images, and log what was found."""
        self.model.eval()
        for buffer in self.model.buffers():
            broadcast(buffer)  # a batch norm's means are each process's own; the main process's are exported
        try:
            with self.speed.paused(), self.trained() as model:
                self.tracker.log(done, self.task.evaluate(model, done, self.tracker))
        except ReadFailed as error:
            if self.accelerator.num_processes > 1:
                raise  # the others are elsewhere in the evaluation: no checkpoint can be agreed upon
            self.fail(done, error)

    def evaluated(self, done: int) -> bool:
        """Whether an evaluation after update `done` is logged; the main process knows."""
        logged = self.accelerator.is_main_process and last_step(self.folder, HELD_OUT_LOSS) == done
        return any(gather_object([logged]))

    @contextmanager
    def trained(self) -> Iterator[nn.Module]:
        """The whole model as it is evaluated and exported: its weights are their Polyak average, where there is one."""
        averaged = averaged_weights(self.optimizer, average=self.optim.average is not None)
        with averaged, self.parallel.whole() as model:
            yield model

    def save(self, step: int) -> None:
        """Write a checkpoint, of finite updates alone, unless it is there."""
        if step == self.saved:
            return
        self.update.check_finite()
        with self.speed.paused():
            checkpoint(
                self.accelerator, self.folder, step, self.model, self.optimizer, self.places, self.run.keep_checkpoints
            )
        self.saved = step

    def stop(self, step: int) -> None:
        """End before the last step, with a checkpoint."""
        self.bar.close()
        self.save(step)

    def fail(self, step: int, failure: UserError | None) -> NoReturn:
        """Raise on every process what went wrong with the images on any."""
        self.stop(step)
        error = next(each for each in gather_object([failure]) if each)
        saved = f"a checkpoint after step {step} is written, " if step else ""
        raise type(error)(f"{error}; {saved}and the same command goes on")

    def export(self) -> None:
        """Write the trained encoder."""
        with self.trained() as model:
            if self.accelerator.is_main_process:
                self.task.export(model, self.folder)


def resume(accelerator: Accelerator, folder: Path, model: nn.Module, optimizer) -> tuple[int, Places]:
    """Load the newest complete checkpoint, if there is one: the updates that are done, and this process's places."""
    start, places = restore(folder, model, optimizer)
    if len(set(gather_object([start]))) > 1:
        raise UserError(f"run.dir is {folder}, which not all processes see alike; all nodes must share it")
    if start:
        accelerator.print(f"resuming {folder} after step {start}")
    return start, own_places(places, accelerator)


def places_after(batches: list[Batch]) -> Places:
    """How far the lanes that these batches came from are in their stream."""
    found = (batch.place.tolist() for batch in batches if batch.place is not None)
    return {lane: place for lane, *place in found}


def own_places(places: list[Places], accelerator: Accelerator) -> Places:
    """Of the places in the stream that a checkpoint has for each process, this one's."""
    if any(places) and len(places) != accelerator.num_processes:
        raise UserError(
            f"{accelerator.num_processes} processes; a stream is resumed with as many as before ({len(places)})"
        )
    return places[accelerator.process_index] if any(places) else {}


def checkpoint(
    accelerator: Accelerator, folder: Path, step: int, model: nn.Module, optimizer, places: Places, keep: int
) -> None:
    """Save from the main process; UserError on every process where that fails."""
    problem, everywhere = None, gather_object([places])
    tensors = snapshot(model, optimizer, wanted=accelerator.is_main_process)
    if accelerator.is_main_process:
        try:
            save_checkpoint(folder, step, tensors, keep, everywhere)
        except (ValueError, OSError) as error:
            problem = str(error)
    problems = [each for each in gather_object([problem]) if each]
    if problems:
        raise UserError(problems[0])


def progress(accelerator: Accelerator, steps: int, start: int) -> tqdm:
    """The progress bar: steps, time left, loss, images/s; on the main process."""
    return progress_bar(
        total=steps,
        initial=start,
        unit="step",
        desc="training",
        disable=not accelerator.is_main_process,
    )
