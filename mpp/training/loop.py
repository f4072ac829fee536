"""The training loop of every training task: `Loop.train` takes the steps, each by `TrainingStep`.

The loop works for any task. A checkpoint holds all its state, so a killed run resumes exactly: the step, the weights,
the optimiser's state and, for a stream, how far it is read.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from mpp.config import TrainingConfig, require
from mpp.data.views import Batch
from mpp.errors import ReadFailed, UserError
from mpp.features.metrics import Sums, sum_over_processes
from mpp.runtime.messages import note, progress_bar
from mpp.runtime.processes import maximum_of_all, on_main_process
from mpp.runtime.signals import Ending, Preemption
from mpp.runtime.weights import BEST
from mpp.training.averaging import averaged_weights
from mpp.training.batches import training_batches
from mpp.training.branch import steps_to_keep
from mpp.training.checkpoint import Cursors, kept_steps, resume, save
from mpp.training.feed import Feed
from mpp.training.history import DEVICE_HOURS, EVALUATED, PFLOP, last_value, series
from mpp.training.log import Tracker, read_history
from mpp.training.parallel import start_compilers
from mpp.training.speed import Speed
from mpp.training.step import TrainingStep
from mpp.training.task import ImageTask
from mpp.training.watch import Watch


class Loop:
    """A run in progress, from its newest checkpoint on.

    Args:
        config: the whole config. The loop uses `run` and `optim`; the trackers note the rest.
        preemption: asked once a step whether to stop.
    """

    def __init__(self, task: ImageTask, config: TrainingConfig, folder: Path, flops: int, preemption: Preemption):
        self.task = task
        self.accelerator = task.accelerator
        self.run_config = config.run
        self.optim_config = config.optim
        self.folder = folder
        self.flops = flops
        self.preemption = preemption
        self.training_step = TrainingStep(task, self.optim_config)
        self.model = self.training_step.model
        self.torch_optimizer = self.training_step.optimizer.optimizer  # without accelerate's wrapper
        self.start, self.cursors = resume(self.accelerator, folder, self.model, self.torch_optimizer)
        self.look_at_checkpoints()
        self.saved_step = self.start  # of the newest checkpoint
        self.steps_to_keep = steps_to_keep(self.optim_config, self.run_config)
        self.feed = Feed(training_batches(task, self.start, self.cursors))  # forks: before any threads
        self.cursors_of_step: Cursors = {}
        """Position of each worker of a stream when the step is done."""
        if self.run_config.compile is True:
            start_compilers(self.accelerator.device)
        self.tracker = Tracker(self.accelerator, folder, config, self.start)
        self.watch = Watch(task, self.tracker, config)
        history = read_history(folder)  # up to this checkpoint
        self.speed = Speed(
            flops,
            task.layout.global_batch_size,
            self.accelerator.device,
            self.accelerator.num_processes,
            last_value(history, "speed/hours"),
            last_value(history, DEVICE_HOURS),
        )
        self.bar = progress_bar(
            total=self.run_config.steps,
            initial=self.start,
            unit="step",
            desc="training",
            disable=not self.accelerator.is_main_process,
        )

    def look_at_checkpoints(self) -> None:
        """Refuse a branch that has lost its first checkpoint, and note those to be kept that the run is past."""
        run = self.run_config
        if self.start == 0 and run.branch_from is not None:
            raise UserError(
                f"all checkpoints of {self.folder}, which branches from {run.branch_from}, are damaged; "
                f"delete {self.folder / 'checkpoints'}, and the same command starts from there again"
            )
        for step in run.keep_at or ():
            if step < self.start and step not in kept_steps(self.folder):
                note(f"run.keep_at: the checkpoint after step {step} cannot be kept, since the run is past it")

    def train(self) -> None:
        """Train from the newest checkpoint of the run's folder to its last step, then export.

        Raises:
            Diverged: a loss or gradient that is not finite; nothing was updated by it.
            ReadFailed: images cannot be read; the checkpoint is written.
            UserError: most images cannot be decoded, or the task refuses to continue, and a checkpoint is written; or a
                checkpoint cannot be written.
            Preempted: a signal asked for a stop; the checkpoint is written.
        """
        run = self.run_config
        if self.start == 0:
            self.watch.warn_of_settings()
        if self.start == 0 and run.eval_every > 0:
            self.evaluate_untrained()
        elif due(self.start, run.eval_every, run.steps) and not self.has_evaluation(self.start):
            self.evaluate(self.start)  # it failed when this step was done
        self.preemption.finishes_steps = True
        for step in range(self.start, run.steps):
            done = step + 1
            logged = due(done, run.log_every, run.steps)
            values, sums = self.training_step(step, self.batches_of_step(step), measure=logged)
            self.count_step()
            if step in (self.start, self.optim_config.frozen_steps):
                self.look_at_disk()
            if logged:
                scalars = self.log_step(done, values, sums)
                self.end_if_refused(done, scalars)
            if due(done, run.eval_every, run.steps):
                self.evaluate(done)
            if due(done, run.checkpoint_every, run.steps) or done in self.steps_to_keep:
                self.save(done)
        self.bar.close()
        with self.averaged_model() as model:
            if self.accelerator.is_main_process:
                self.task.export(model, self.folder)

    def batches_of_step(self, step: int) -> Iterator[Batch]:
        """This process's batches of a step, each taken when its forward pass is about to begin.

        Before processes communicate, which is in the last pass as a rule, all agree to continue. If one of them lacks
        its batch, or a signal came, the passes so far are dropped on all, and the run ends as before the step.
        """
        passes = self.task.layout.accumulation_steps
        each_pass = self.task.communicates_each_pass or self.training_step.parallel.communicates_each_pass
        if step == self.start + 1:
            each_pass = True  # DDP lays out its buckets again, together, before the first pass after a first step
        self.cursors_of_step = {}
        for number in range(passes):
            with self.speed.waiting():
                batch, failure = self.preemption.wait_for(self.feed.try_take) or (None, None)
            if batch is None or each_pass or number == passes - 1:
                self.end_unless_agreed(step, batch, failure)
            self.tracker.warn_unreadable(batch.unreadable)
            if batch.cursor is not None:
                worker, *cursor = batch.cursor.tolist()
                self.cursors_of_step[worker] = cursor
            yield batch

    def end_unless_agreed(self, step: int, batch: Batch | None, failure: UserError | None) -> None:
        """End the run, with a checkpoint, if a signal came or a process lacks its batch of this step."""
        ending = Ending.NONE
        if failure:
            ending = Ending.FAILURE
        elif batch is None:
            ending = Ending.SIGNAL  # it came while images were waited for
        ending = self.preemption.agreed(ending)
        if ending is Ending.NONE:
            return
        self.training_step.drop_passes()
        if ending is Ending.FAILURE:
            self.fail(step, failure)
        self.close_with_checkpoint(step)
        self.preemption.leave(f"after step {step}; a checkpoint is written" if step else "before its first step")

    def count_step(self) -> None:
        """Note that a step is done, and how far a stream is read."""
        self.cursors |= self.cursors_of_step
        self.speed.count_step()
        self.bar.update()

    def look_at_disk(self) -> None:
        """Raise UserError, on all processes, where the disk has no room for a checkpoint.

        After a first step, since the optimiser has its tensors then; those of a frozen encoder come later.
        """
        size = self.training_step.checkpoint_bytes()
        free = on_main_process(self.accelerator, lambda: shutil.disk_usage(self.folder).free)
        allowed = f"on a disk that has room for a checkpoint of {size / 1e6:.3g} MB"
        require(free >= size, "run.dir", self.folder, allowed)

    def log_step(self, done: int, values: dict[str, Tensor | float], sums: Sums) -> dict[str, float]:
        """Log the scalars of the step that was done last, and return them."""
        scalars = {name: float(value) for name, value in values.items()}
        scalars |= self.task.describe(sum_over_processes(sums))
        waited = maximum_of_all(self.feed.reset_wait())  # the others wait for the one that waits for its images
        scalars |= self.speed.read(waited)
        scalars[PFLOP] = self.flops * done / 1e15
        scalars["unreadable"] = len(self.tracker.read_unreadable())
        self.tracker.log(done, scalars)
        self.bar.set_postfix_str(f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s")
        return scalars

    def end_if_refused(self, done: int, scalars: dict[str, float]) -> None:
        """End the run, with a checkpoint, if the task refuses to continue after a step with these scalars."""
        try:
            self.task.refuse_to_continue(scalars)
        except UserError as error:
            self.close_with_checkpoint(done)
            raise type(error)(f"{error}; a checkpoint after step {done} is written") from None

    def evaluate_untrained(self) -> None:
        """Log scalars of the untrained model: the baseline of each later evaluation."""
        self.model.eval()
        with self.held_out_reading(0), self.training_step.parallel.whole_model() as model:
            scalars = self.task.evaluate_untrained(model)
        if scalars:
            self.tracker.log(0, scalars)

    def evaluate(self, done: int) -> None:
        """Evaluate on the held-out images, log the scalars, and report the verdict."""
        self.model.eval()
        for buffer in self.model.buffers():
            broadcast(buffer)  # each process has its own batch norm statistics; the main process's are exported
        with self.held_out_reading(done), self.averaged_model() as model:
            self.tracker.log(done, self.task.evaluate(model, done, self.tracker))
            if self.run_config.keep_best and self.accelerator.is_main_process and self.watch.is_best():
                self.task.export(model, self.folder, BEST)
        with self.speed.paused():
            self.watch.report(done)

    @contextmanager
    def held_out_reading(self, done: int) -> Iterator[None]:
        """While open, held-out images are read, which does not count as training time; a failure ends the run."""
        try:
            with self.speed.paused():
                yield
        except ReadFailed as error:
            if self.accelerator.num_processes > 1:
                raise  # the others are elsewhere in the evaluation: no checkpoint can be agreed upon
            self.fail(done, error)

    def has_evaluation(self, done: int) -> bool:
        """Whether an evaluation after step `done` is logged; the main process knows."""
        history = read_history(self.folder) if self.accelerator.is_main_process else []
        logged = any(step == done for step, _ in series(history, EVALUATED))
        return any(gather_object([logged]))

    @contextmanager
    def averaged_model(self) -> Iterator[nn.Module]:
        """The whole model as it is evaluated and exported: its weights are their Polyak average, if there is one."""
        averages = nullcontext() if self.optim_config.average is None else averaged_weights(self.torch_optimizer)
        with averages, self.training_step.parallel.whole_model() as model:
            yield model

    def save(self, done: int) -> None:
        """Write a checkpoint, unless it is there; the steps before it are verified to be finite."""
        if done == self.saved_step:
            return
        self.training_step.finite.verify()
        with self.speed.paused():
            save(
                self.accelerator,
                self.folder,
                done,
                self.model,
                self.torch_optimizer,
                self.cursors,
                keep=self.run_config.keep_checkpoints,
                always=self.steps_to_keep,
            )
        self.saved_step = done

    def close_with_checkpoint(self, done: int) -> None:
        """Close the progress bar and write a checkpoint: the caller then ends the run before its last step."""
        self.bar.close()
        self.save(done)

    def fail(self, done: int, failure: UserError | None) -> NoReturn:
        """Write a checkpoint, then raise on every process the failure of any of them to read images."""
        self.close_with_checkpoint(done)
        if self.preemption.agreed():  # the images may be there when the run is started again
            self.preemption.leave(f"after step {done}, while images could not be read")
        error = next(each for each in gather_object([failure]) if each)
        saved = f"a checkpoint after step {done} is written, " if done else ""
        raise type(error)(f"{error}; {saved}and the same command continues")


def due(step: int, every: int, last: int) -> bool:
    """Whether something done once in `every` steps is done after step `step`; it is after the last step."""
    return every > 0 and (step % every == 0 or step == last)
