"""The training loop of every training task: from a batch to a checkpoint.

`Loop.train` is the loop over steps, and over the batches of each. `TrainingStep` computes: forward, loss, backward,
clip, step. A checkpoint holds all state of both, so a killed run resumes exactly: the step, the weights, the
optimiser's state and, for a stream, how far it is read.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpp.config import OptimConfig, TrainingConfig
from mpp.data.views import Batch
from mpp.errors import Diverged, ReadFailed, UserError
from mpp.features.metrics import Sums, add_sums, sum_over_processes
from mpp.runtime.messages import note, progress_bar, shortened
from mpp.runtime.processes import maximum_of_all, on_main_process, sharding
from mpp.runtime.randomness import Stream, random_words
from mpp.runtime.signals import Ending, Preemption
from mpp.runtime.weights import BEST
from mpp.training.batches import Feed, training_batches
from mpp.training.branch import steps_to_keep
from mpp.training.checkpoint import Cursors, kept_steps, resume, save
from mpp.training.history import EVALUATED, PFLOP, series
from mpp.training.log import Speed, Tracker, read_history
from mpp.training.optim import averaged_weights, build_optimizer, learning_rate
from mpp.training.parallel import Replicated, Sharded, refuse_unlike_weights, whole_tensor
from mpp.training.task import ImageTask
from mpp.training.watch import Watch

MAX_NAMED_IMAGES = 16  # in the message of a step that is not finite
MAX_UNVERIFIED = 1_000  # steps, whose losses and images' indices are kept
Values = dict[str, Tensor | float]
"""Scalars of a step, perhaps on the device."""


class Loop:
    """A run in progress, from its newest checkpoint on.

    Args:
        config: the whole config. The loop uses `run` and `optim`; the trackers note the rest.
        flops: executed by a step.
        preemption: asked before each forward pass whether to stop.
    """

    def __init__(self, task: ImageTask, config: TrainingConfig, folder: Path, flops: int, preemption: Preemption):
        self.task = task
        self.accelerator = task.accelerator
        self.run_config = config.run
        self.optim_config = config.optim
        self.folder = folder
        self.flops = flops
        self.preemption = preemption
        self.training_step = TrainingStep(task, config.optim)
        self.model = self.training_step.model
        self.torch_optimizer = self.training_step.optimizer.optimizer  # without accelerate's wrapper
        self.start, self.cursors = resume(self.accelerator, folder, self.model, self.torch_optimizer)
        if self.start == 0 and config.run.branch_from is not None:  # it began with one
            damaged = folder / "checkpoints"
            raise UserError(f"all checkpoints of the branch are damaged; delete {damaged} to begin it again")
        past = [step for step in config.run.keep_at or () if step < self.start and step not in kept_steps(folder)]
        if past:
            note(f"run.keep_at: the run is past the steps {past}, whose checkpoints cannot be kept")
        self.saved_step = self.start  # of the newest checkpoint
        self.steps_to_keep = steps_to_keep(config.optim, config.run)
        batches = training_batches(task, self.start, self.cursors)  # forks: before any threads
        self.feed = Feed(batches, is_for_gpu=self.accelerator.device.type == "cuda")
        self.tracker = Tracker(self.accelerator, folder, config, self.start)
        self.watch = Watch(task, self.tracker, config)
        self.speed = Speed(flops, task.layout.global_batch_size, self.accelerator, read_history(folder))
        self.bar = progress_bar(
            total=config.run.steps,
            initial=self.start,
            unit="step",
            desc="training",
            disable=not self.accelerator.is_main_process,
        )

    def train(self) -> None:
        """Train from the newest checkpoint of the run's folder to its last step, then export.

        Raises:
            Diverged: a loss or gradient that is not finite; nothing of it is saved.
            ReadFailed: images cannot be read; the checkpoint is written.
            UserError: most images cannot be decoded, or the task refuses to continue, and a checkpoint is written; or a
                checkpoint cannot be written.
            Preempted: a signal asked for a stop; the checkpoint is written.
        """
        run = self.run_config
        self.evaluate_at_start()
        self.preemption.finishes_steps = True
        for step in range(self.start, run.steps):
            done = step + 1
            logged = due(done, run.log_every, run.steps)
            cursors: Cursors = {}
            self.training_step.begin(step, measure=logged)
            for _ in range(self.task.layout.accumulation_steps):
                batch = self.next_batch(step)
                self.training_step.add_pass(batch)
                cursors |= cursor_of(batch)
            values, sums = self.training_step.finish()
            self.cursors |= cursors
            self.speed.steps += 1
            self.bar.update()
            if logged:
                self.log_step(done, values, sums)
            if due(done, run.eval_every, run.steps):
                self.evaluate(done)
            if due(done, run.checkpoint_every, run.steps) or done in self.steps_to_keep:
                self.save(done)
        self.bar.close()
        with self.whole_model() as model:
            if self.accelerator.is_main_process:
                self.task.export(model, self.folder)

    # --- a batch ---

    def next_batch(self, step: int) -> Batch:
        """This process's batch of the next forward pass of a step.

        Processes wait for each other in a pass, so all agree before it. If one of them lacks its batch, or a signal
        came, the passes so far are dropped on all, and the run ends as before the step.
        """
        batch, failure = self.preemption.wait_for(self.feed.try_take) or (None, None)
        ending = Ending.NONE
        if failure:
            ending = Ending.FAILURE
        elif batch is None:
            ending = Ending.SIGNAL  # it came while images were waited for
        ending = self.preemption.agreed(ending)
        if ending is not Ending.NONE:
            self.training_step.drop_passes()
            self.end(step, failure)
        self.tracker.warn_unreadable(batch.unreadable)
        return batch

    def end(self, done: int, failure: UserError | None) -> NoReturn:
        """Write a checkpoint, then end the run on every process: by a signal, or a failure of any, such as to read."""
        self.bar.close()
        self.save(done)
        failures = [each for each in gather_object([failure]) if each is not None]
        if self.preemption.agreed() or not failures:  # the images may be there when the run is started again
            self.preemption.leave(f"after step {done}; a checkpoint is written" if done else "before its first step")
        saved = f"a checkpoint after step {done} is written, " if done else ""
        raise type(failures[0])(f"{failures[0]}; {saved}and the same command continues")

    # --- metrics and evaluation ---

    def log_step(self, done: int, values: Values, sums: Sums) -> None:
        """Log the scalars of the step that was done last; end the run if the task refuses to continue after them."""
        scalars = {name: float(value) for name, value in values.items()}
        scalars |= self.task.describe(sum_over_processes(sums))
        waited = maximum_of_all(self.feed.reset_wait())  # the others wait for the one that waits for its images
        scalars |= self.speed.read(waited)
        scalars[PFLOP] = self.flops * done / 1e15
        scalars["unreadable"] = len(self.tracker.read_unreadable())
        self.tracker.log(done, scalars)
        self.bar.set_postfix_str(f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s")
        try:
            self.task.refuse_to_continue(scalars)
        except UserError as refusal:
            self.end(done, refusal)

    def evaluate_at_start(self) -> None:
        """Evaluate the untrained model, the baseline of all that follows; or again where reading failed before."""
        run = self.run_config
        if self.start == 0:
            self.watch.warn_of_settings()
            if run.eval_every > 0:
                self.evaluate_untrained()
        elif due(self.start, run.eval_every, run.steps) and not self.has_evaluation(self.start):
            self.evaluate(self.start)

    def has_evaluation(self, done: int) -> bool:
        """Whether an evaluation after step `done` is logged."""
        return on_main_process(self.accelerator, lambda: done in dict(series(read_history(self.folder), EVALUATED)))

    def evaluate_untrained(self) -> None:
        """Log scalars of the untrained model."""
        with self.evaluated_model(0) as model:
            scalars = self.task.evaluate_untrained(model)
        if scalars:
            self.tracker.log(0, scalars)

    def evaluate(self, done: int) -> None:
        """Evaluate on the held-out images, log the scalars, and report the verdict."""
        for buffer in self.model.buffers():
            broadcast(buffer)  # each process has its own batch norm statistics; the main process's are exported
        with self.evaluated_model(done) as model:
            self.tracker.log(done, self.task.evaluate(model, done, self.tracker))
            if self.run_config.keep_best and self.accelerator.is_main_process and self.watch.is_best():
                self.task.export(model, self.folder, BEST)
        with self.speed.paused():
            self.watch.report(done)

    @contextmanager
    def evaluated_model(self, done: int) -> Iterator[nn.Module]:
        """The whole model in eval mode, while held-out images are read, which does not count as training time.

        If images cannot be read, the run ends, on all processes together: see `FixedViewLoader`.
        """
        self.model.eval()
        try:
            with self.speed.paused(), self.whole_model() as model:
                yield model
        except ReadFailed as failure:
            self.end(done, failure)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The whole model as it is evaluated and exported: its weights are their Polyak average, if there is one."""
        self.training_step.verify()
        averages = nullcontext() if self.optim_config.average is None else averaged_weights(self.torch_optimizer)
        with averages, self.training_step.parallel.whole_model() as model:
            yield model

    # --- a checkpoint ---

    def save(self, done: int) -> None:
        """Write a checkpoint, unless it is there, of weights that are finite and the same on all processes."""
        if done == self.saved_step:
            return
        self.training_step.verify()
        refuse_unlike_weights(self.model, done)
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


class TrainingStep:
    """An optimiser step: `begin`, `add_pass` with each batch, `finish`; or all of it in a call."""

    def __init__(self, task: ImageTask, optim: OptimConfig):
        self.task = task
        self.optim_config = optim
        self.accelerator = task.accelerator
        self.layout = task.layout
        kind = Sharded if sharding(self.accelerator) else Replicated
        self.parallel = kind(task.model, self.accelerator, partial(build_optimizer, config=optim), task.run)
        self.model, self.wrapped, self.optimizer = self.parallel.model, self.parallel.wrapped, self.parallel.optimizer
        self.verifies_each_step = self.accelerator.device.type == "cpu"
        self.unverified: list[StepRecord] = []

    def __call__(self, step: int, batches: Iterable[Batch], measure: bool) -> tuple[Values, Sums]:
        """Do one step without a loop: see `begin` and `finish`."""
        self.begin(step, measure)
        for batch in batches:
            self.add_pass(batch)
        return self.finish()

    def begin(self, step: int, measure: bool) -> None:
        """Begin a step.

        Args:
            step: from 0.
            measure: whether the task's sums are wanted.
        """
        self.step, self.measure = step, measure
        self.wrapped.train()
        self.rate = learning_rate(self.optim_config, step, self.task.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group.get("lr_scale", 1.0)
        self.losses: list[Tensor] = []
        """This process's, by forward pass, each divided so that their sum is its loss of the step."""
        self.indices: list[Tensor] = []
        self.sums: Sums = {}
        self.earlier_statistics: list[tuple[Tensor, Tensor]] = []
        """Running statistics of batch norms, which each pass changes, and their values before a step of several."""
        if self.layout.accumulation_steps > 1:
            norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
            buffers = [buffer for norm in norms for buffer in norm.buffers()]
            self.earlier_statistics = [(buffer, buffer.clone()) for buffer in buffers]

    def add_pass(self, batch: Batch) -> None:
        """Forward and backward pass of a batch; processes share gradients in the last one."""
        number = len(self.losses)
        is_last = number == self.layout.accumulation_steps - 1
        torch.manual_seed(self.seed_of(number))  # so that a resumed run repeats dropout
        with nullcontext() if is_last else self.parallel.without_sync():
            loss, measured = self.task.loss(self.wrapped, batch, self.measure)
            loss = loss / self.layout.loss_divisor(number)
            self.accelerator.backward(loss)
        self.losses.append(loss.detach())
        self.indices.append(batch.indices)
        self.sums = add_sums(self.sums, measured)

    def drop_passes(self) -> None:
        """Undo the passes of a step that is not finished: the model is as before the step."""
        self.optimizer.zero_grad()
        for buffer, earlier in self.earlier_statistics:
            buffer.copy_(earlier)

    def finish(self) -> tuple[Values, Sums]:
        """Clip the gradient, check that it is finite, and step.

        Returns:
            Scalars (loss, gradient norm, learning rate, and the task's own); the task's sums, empty unless measured.
        """
        if self.step < self.optim_config.frozen_steps:
            for parameter in self.model.encoder.parameters():
                parameter.grad = None  # the optimiser takes, and clipping counts, only those with a gradient
        clipped = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optim_config.clip or math.inf)
        norm = whole_tensor(clipped)
        loss = self.accelerator.reduce(sum(self.losses), "mean")
        is_finite = torch.stack([loss, norm]).isfinite().all()
        self.unverified.append(StepRecord(self.step, is_finite, self.losses, self.indices))
        if self.measure or self.verifies_each_step or len(self.unverified) >= MAX_UNVERIFIED:
            self.verify()
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"loss": loss, "optim/lr": self.rate, "optim/grad_norm": norm}
        return values | self.task.after_step(self.model, self.step), self.sums

    def verify(self) -> None:
        """Raise Diverged on every process, naming step and images, if a step since the last call was not finite.

        Reading a GPU's numbers would wait for it in each step. So there it is called when metrics are logged, and
        before anything is evaluated or saved; on a CPU, before the weights change.
        """
        if not self.unverified or torch.stack([record.is_finite for record in self.unverified]).all():
            self.unverified.clear()
            return
        first = next(record for record in self.unverified if not record.is_finite)
        images = []
        suspects = []
        for loss, indices in zip(first.losses, first.indices, strict=True):
            images += indices.tolist()
            if not loss.isfinite():
                suspects += indices.tolist()
        suspects, images = gather_object(suspects), gather_object(images)
        names = sorted(map(self.task.train.image_name, suspects or images))
        raise Diverged(
            f"loss or gradient of step {first.step} is not finite (nothing of it is saved; images "
            f"{shortened(names, MAX_NAMED_IMAGES)}); the last checkpoint is intact: "
            "check these images, or begin again with a lower optim.lr in a new run.dir"
        )

    def seed_of(self, number: int) -> int:
        """The seed of all that a pass draws inside the model: distinct for (seed, step, forward pass, rank)."""
        place = number * self.layout.world_size + self.layout.rank
        word = random_words(Stream.MODEL, self.task.run.seed, self.step, place, 1)[0]
        return int(word >> np.uint64(1))  # 63 bits


class StepRecord(NamedTuple):
    """The numbers that tell whether a step was finite, and the images that were in it."""

    step: int
    is_finite: Tensor
    """Whether its loss and the norm of its gradient are, of all processes."""
    losses: list[Tensor]
    """This process's losses, by forward pass."""
    indices: list[Tensor]
    """Indices of this process's images, by forward pass."""


def cursor_of(batch: Batch) -> Cursors:
    """The place to which the worker that read a batch of a stream has come; empty for other batches."""
    if batch.cursor is None:
        return {}
    worker, *cursor = batch.cursor.tolist()
    return {worker: cursor}


def due(step: int, every: int, last: int) -> bool:
    """Whether something done once in `every` steps is done after step `step`; it is after the last step."""
    return every > 0 and (step % every == 0 or step == last)
