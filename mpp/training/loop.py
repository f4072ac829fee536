"""The one training loop: whatever is trained here, it is trained by `Loop.train`, an `Update` at a time.

It knows a model, a loss, batches, an optimiser and a schedule, and nothing of what they mean. All of its state is the
step, the weights and the optimiser's, so that a killed run goes on exactly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from mpp.data.views import Batch
from mpp.errors import ReadFailed, UserError
from mpp.features.metrics import Sums, total
from mpp.runtime.processes import maximum_of_all
from mpp.runtime.progress import progress_bar
from mpp.runtime.signals import Ending, Preemption
from mpp.runtime.weights import BEST
from mpp.training.checkpoint import resume, save
from mpp.training.feed import Feed
from mpp.training.health import EVALUATED
from mpp.training.log import Speed, Tracker, last_step
from mpp.training.optim import averaged_weights
from mpp.training.parallel import start_compilers
from mpp.training.step import Update
from mpp.training.task import ImageTask
from mpp.training.watch import Watch


class Loop:
    """A run under way, from its newest checkpoint on.

    Args:
        config: the whole config, of which `run` and `optim` are used, and the trackers note the rest.
        flops: executed by an update.
        preemption: which is asked once a step.
    """

    def __init__(self, task: ImageTask, config: Any, folder: Path, flops: int, preemption: Preemption):
        self.task, self.accelerator, self.run, self.optim = task, task.accelerator, config.run, config.optim
        self.folder, self.flops, self.preemption = folder, flops, preemption
        self.update = Update(task, self.optim)
        self.parallel = self.update.parallel
        self.model, self.optimizer = self.parallel.model, self.parallel.optimizer.optimizer  # without wrappers
        self.start, self.cursors = resume(self.accelerator, folder, self.model, self.optimizer)
        self.saved = self.start  # the step of the newest checkpoint
        batches = task.batches(self.start, self.cursors)  # forks: before any threads
        self.feed = Feed(batches, task.layout.accumulation_steps)
        if self.run.compile:
            start_compilers(self.accelerator.device)
        self.tracker = Tracker(self.accelerator, folder, config, self.start)
        self.watch = Watch(task, self.tracker, self.run, self.optim)
        self.speed = Speed(flops, task.layout.images, self.accelerator.device)
        self.bar = progress_bar(
            total=self.run.steps,
            initial=self.start,
            unit="step",
            desc="training",
            disable=not self.accelerator.is_main_process,
        )

    def train(self) -> None:
        """Train from the newest checkpoint of the run's folder to its last step, then export.

        Raises:
            Diverged: a loss or gradient that is not finite; nothing was updated by it.
            ReadFailed: images cannot be read; the checkpoint is written.
            UserError: most images cannot be decoded, or the task says stop; the checkpoint is written. Or it cannot be.
            Preempted: a signal asked for a stop; the checkpoint is written.
        """
        run = self.run
        if self.start and due(self.start, run.eval_every, run.steps) and not self.evaluated(self.start):
            self.evaluate(self.start)  # it failed when this step was done
        if self.start == 0:
            self.begin()
        self.preemption.finish_step = True
        for step in range(self.start, run.steps):
            micro = self.next_batches(step)
            done, log = step + 1, due(step + 1, run.log_every, run.steps)
            values, sums = self.update(step, micro, measure=log)
            self.count(micro)
            if log:
                self.log(done, values, sums)
            if due(done, run.eval_every, run.steps):
                self.evaluate(done)
            if due(done, run.checkpoint_every, run.steps):
                self.save(done)
        self.bar.close()
        with self.averaged_model() as model:
            if self.accelerator.is_main_process:
                self.task.export(model, self.folder)

    def next_batches(self, step: int) -> list[Batch]:
        """This process's batches of update `step`; on a signal, or without images on any process, all end the run."""
        micro, failure = self.preemption.wait_for(self.feed.attempt) or ([], None)
        ending = self.preemption.agreed(Ending.FAILURE if failure else Ending.NONE if micro else Ending.SIGNAL)
        if ending is Ending.FAILURE:
            self.fail(step, failure)
        if ending is Ending.SIGNAL:
            self.stop(step)
            self.preemption.leave(f"after step {step}; a checkpoint is written" if step else "before its first step")
        return micro

    def count(self, micro: list[Batch]) -> None:
        """Note what an update was made of: how far a stream is read, and images that could not be decoded."""
        reached = (batch.cursor.tolist() for batch in micro if batch.cursor is not None)
        self.cursors |= {worker: cursor for worker, *cursor in reached}
        self.speed.updates += 1
        self.tracker.warn_unreadable(self.feed.undecoded)
        self.bar.update()

    def log(self, done: int, values: dict[str, Tensor | float], sums: Sums) -> None:
        """The scalars of the update that was done last."""
        scalars = {name: float(value) for name, value in values.items()} | self.task.describe(total(sums))
        self.feed.waited = maximum_of_all(self.feed.waited)  # the others wait for the one that waits for its images
        scalars |= self.speed.read(self.feed) | {"compute/pflop": self.flops * done / 1e15}
        scalars |= {"unreadable": self.tracker.count_unreadable()}
        self.tracker.log(done, scalars)
        try:
            self.task.check(scalars)
        except UserError as error:
            self.stop(done)
            raise type(error)(f"{error}; a checkpoint after step {done} is written") from None
        self.bar.set_postfix_str(f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s")

    def begin(self) -> None:
        """Log what the untrained features know: what those of each evaluation are compared with."""
        self.model.eval()
        with self.reading(0), self.parallel.whole_model() as model:
            scalars = self.task.begin(model)
        if scalars:
            self.tracker.log(0, scalars)

    def evaluate(self, done: int) -> None:
        """Evaluate on the held-out images, log what was found, and say how the run is."""
        self.model.eval()
        for buffer in self.model.buffers():
            broadcast(buffer)  # a batch norm's means are each process's own; the main process's are exported
        with self.reading(done), self.averaged_model() as model:
            self.tracker.log(done, self.task.evaluate(model, done, self.tracker))
            if self.run.keep_best and self.accelerator.is_main_process and self.watch.best():
                self.task.export(model, self.folder, BEST)
        with self.speed.paused():
            self.watch(done)

    @contextmanager
    def reading(self, done: int) -> Iterator[None]:
        """Held-out images are read meanwhile, which takes none of the training's time; a failure ends the run."""
        try:
            with self.speed.paused():
                yield
        except ReadFailed as error:
            if self.accelerator.num_processes > 1:
                raise  # the others are elsewhere in the evaluation: no checkpoint can be agreed upon
            self.fail(done, error)

    def evaluated(self, done: int) -> bool:
        """Whether an evaluation after update `done` is logged; the main process knows."""
        logged = self.accelerator.is_main_process and last_step(self.folder, EVALUATED) == done
        return any(gather_object([logged]))

    @contextmanager
    def averaged_model(self) -> Iterator[nn.Module]:
        """The whole model as it is evaluated and exported: its weights are their Polyak average, where there is one."""
        averaged = averaged_weights(self.optimizer, average=self.optim.average is not None)
        with averaged, self.parallel.whole_model() as model:
            yield model

    def save(self, step: int) -> None:
        """Write a checkpoint, of finite updates alone, unless it is there."""
        if step == self.saved:
            return
        self.update.finite.verify()
        with self.speed.paused():
            keep = self.run.keep_checkpoints
            save(self.accelerator, self.folder, step, self.model, self.optimizer, self.cursors, keep)
        self.saved = step

    def stop(self, step: int) -> None:
        """End before the last step, with a checkpoint."""
        self.bar.close()
        self.save(step)

    def fail(self, step: int, failure: UserError | None) -> NoReturn:
        """Raise on every process what went wrong with the images on any."""
        self.stop(step)
        if self.preemption.asked_of_any():  # the images may be there when the run is started again
            self.preemption.leave(f"after step {step}, while images could not be read")
        error = next(each for each in gather_object([failure]) if each)
        saved = f"a checkpoint after step {step} is written, " if step else ""
        raise type(error)(f"{error}; {saved}and the same command goes on")


def due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many updates is done after update `step`; the last one counts."""
    return every > 0 and (step % every == 0 or step == last)
