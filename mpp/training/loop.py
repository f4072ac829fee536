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

import torch
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn

from mpp.config import OptimConfig, TrainingConfig
from mpp.data.loader import in_memory, training_loader
from mpp.data.stream import streaming_loader
from mpp.data.views import Batch
from mpp.errors import Diverged, ReadFailed, UserError
from mpp.features.metrics import Sums, add_sums, sum_over_processes
from mpp.runtime.messages import progress_bar, shortened
from mpp.runtime.processes import on_main_process, raise_together, sharding
from mpp.runtime.randomness import Stream, random_words
from mpp.runtime.signals import Preemption
from mpp.runtime.weights import BEST
from mpp.training.checkpoint import Cursors, delete_other_checkpoints, resume, save_checkpoint, snapshot
from mpp.training.history import EVALUATED, series
from mpp.training.log import Speed, Tracker, read_history
from mpp.training.optim import averaged_weights, build_optimizer, learning_rate
from mpp.training.parallel import Replicated, Sharded, refuse_unlike_weights, whole_tensor
from mpp.training.run_folder import steps_to_keep
from mpp.training.task import ImageTask
from mpp.training.verdict import Watch

MAX_NAMED_IMAGES = 16  # in the message of a step that is not finite
RECENT_IMAGES = 1024  # latest images, most of which must be decodable; at least those of a batch
MIN_IMAGES = 32  # fewer are too few to tell
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
        self.folder = folder
        self.preemption = preemption
        self.training_step = TrainingStep(task, config.optim)
        self.model = self.training_step.model
        self.torch_optimizer = self.training_step.optimizer.optimizer  # without accelerate's wrapper
        self.start, self.cursors = resume(self.accelerator, folder, self.model, self.torch_optimizer)
        self.saved_step = self.start  # of the newest checkpoint
        self.steps_to_keep = steps_to_keep(config.optim, config.run)
        self.batches = training_batches(task, self.start, self.cursors)  # forks: before any threads
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
            UserError: most images cannot be decoded, and a checkpoint is written; or one cannot be written.
            Preempted: a signal asked for a stop; the checkpoint is written.
        """
        run = self.run_config
        with self.bar:  # an error begins a line of its own
            self.evaluate_at_start()
            self.preemption.finishes_steps = True
            for step in range(self.start, run.steps):
                done = step + 1
                logged = due(done, run.log_every, run.steps)
                self.training_step.begin(step, measure=logged)
                for _ in range(self.task.layout.accumulation_steps):
                    self.training_step.add_pass(self.next_batch(step))
                values, sums = self.training_step.finish()
                self.cursors |= self.training_step.cursors
                self.speed.steps += 1
                self.bar.update()
                if logged:
                    self.log_step(done, values, sums)
                if due(done, run.eval_every, run.steps):
                    self.evaluate(done)
                if due(done, run.checkpoint_every, run.steps) or done in self.steps_to_keep:
                    self.save(done)
        with self.evaluated_model(run.steps) as model:
            if self.accelerator.is_main_process:
                self.task.export(model, self.folder)

    # --- a batch ---

    def next_batch(self, step: int) -> Batch:
        """This process's batch of the next forward pass of a step.

        Processes wait for each other in a pass, so all agree before it. If one of them lacks its batch, or a signal
        came, the passes so far are dropped on all, and the run ends as before the step.
        """
        with self.speed.waiting():
            batch = self.preemption.wait_for(self.load_batch)
        failure = batch if isinstance(batch, UserError) else None
        if self.preemption.agreed(failure is not None):
            self.training_step.drop_passes()
            self.end(step, failure)
        self.tracker.warn_unreadable(batch.unreadable)
        return batch

    def load_batch(self) -> Batch | UserError:
        """The next batch, or the error in its place."""
        try:
            return next(self.batches)
        except UserError as error:
            return error

    def end(self, done: int, failure: UserError | None) -> None:
        """Write a checkpoint, then end the run on every process: by a signal, or a failure of any, such as to read."""
        self.bar.close()
        self.save(done)
        if self.preemption.agreed():  # after a failure, too: the images may be there when the run is started again
            self.preemption.leave(f"after step {done}; a checkpoint is written" if done else "before its first step")
        saved = f"a checkpoint after step {done} is written, " if done else ""
        raise_together(failure and type(failure)(f"{failure}; {saved}and the same command continues"))

    # --- metrics and evaluation ---

    def log_step(self, done: int, values: Values, sums: Sums) -> None:
        """Log the scalars of the step that was done last."""
        self.training_step.verify()
        scalars = {name: float(value) for name, value in values.items()}
        scalars |= self.task.describe(sum_over_processes(sums))
        scalars |= self.speed.read(done)
        scalars["unreadable"] = len(self.tracker.read_unreadable())
        self.tracker.log(done, scalars)
        shown = f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s"
        self.bar.set_postfix_str(shown, refresh=False)  # in a file each would be a line

    def evaluate_at_start(self) -> None:
        """Evaluate the untrained model, the baseline of all that follows; or again where reading failed before."""
        run = self.run_config
        lines = on_main_process(self.accelerator, lambda: series(read_history(self.folder), EVALUATED))
        if self.start == 0:
            self.watch.warn_of_settings()
            if run.eval_every > 0 and self.task.probe:
                with self.evaluated_model(0) as model:
                    self.tracker.log(0, self.task.probe(model, baseline=True))
        elif due(self.start, run.eval_every, run.steps) and self.start not in dict(lines):
            self.evaluate(self.start)

    def evaluate(self, done: int) -> None:
        """Evaluate on the held-out images, log the scalars, and report the verdict."""
        for buffer in self.model.buffers():
            broadcast(buffer)  # each process has its own batch norm statistics; the main process's are exported
        with self.evaluated_model(done) as model:
            scalars = self.task.evaluate(model, done, self.tracker)
            probe = self.task.probe
            if probe and due(done, probe.every, self.run_config.steps):
                scalars |= probe(self.task.exported(model))
            self.tracker.log(done, scalars)
            if self.run_config.keep_best and self.accelerator.is_main_process and self.watch.is_best():
                self.task.export(model, self.folder, BEST)
        with self.speed.paused():
            self.watch.report(done)

    @contextmanager
    def evaluated_model(self, done: int) -> Iterator[nn.Module]:
        """The whole model in eval mode, as it is evaluated and exported; that time does not count as training.

        Its weights are their Polyak average, if there is one. If held-out images cannot be read, the run ends, on all
        processes together: see `FixedViewLoader`.
        """
        self.training_step.verify()
        whole_model = self.training_step.parallel.whole_model
        self.bar.set_description("evaluating")
        try:
            with self.speed.paused(), averaged_weights(self.torch_optimizer), whole_model() as model:
                yield model
        except ReadFailed as failure:
            self.end(done, failure)
        self.bar.set_description("training")

    # --- a checkpoint ---

    def save(self, done: int) -> None:
        """Write a checkpoint, unless it is there, of weights that are finite and the same on all processes."""
        if done == self.saved_step:
            return
        self.training_step.verify()
        refuse_unlike_weights(self.model, done)
        with self.speed.paused():
            cursors = gather_object([self.cursors])
            tensors = snapshot(self.model, self.torch_optimizer, wanted_here=self.accelerator.is_main_process)

            def write() -> None:
                save_checkpoint(self.folder, done, tensors, cursors)
                delete_other_checkpoints(self.folder, done, self.run_config.keep_checkpoints, self.steps_to_keep)

            on_main_process(self.accelerator, write)
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
        self.unverified: list[tuple[int, Tensor, list[Tensor]]] = []
        """Steps since the last call of `verify`, whether all their numbers are finite, and their images' indices."""

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
            group["lr"] = self.rate * group["lr_scale"]
        self.losses: list[Tensor] = []
        """This process's, by forward pass, each divided so that their sum is its loss of the step."""
        self.indices: list[Tensor] = []
        """Of this process's images, by forward pass."""
        self.cursors: Cursors = {}
        """Of the workers that read these images from a stream."""
        self.sums: Sums = {}
        self.earlier_buffers = [buffer.clone() for buffer in self.model.buffers()]
        """Each pass changes the running statistics of batch norms."""

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
        if batch.cursor is not None:
            worker, *cursor = batch.cursor.tolist()
            self.cursors[worker] = cursor
        self.sums = add_sums(self.sums, measured)

    def drop_passes(self) -> None:
        """Undo the passes of a step that is not finished: the model's state is as before the step."""
        for buffer, earlier in zip(self.model.buffers(), self.earlier_buffers, strict=True):
            buffer.copy_(earlier)

    def finish(self) -> tuple[Values, Sums]:
        """Clip the gradient, note whether it is finite, and step.

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
        self.unverified.append((self.step, is_finite, self.indices))
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"loss": loss, "optim/lr": self.rate, "optim/grad_norm": norm}
        return values | self.task.after_step(self.model, self.step), self.sums

    def verify(self) -> None:
        """Raise Diverged on every process, naming step and images, if a step since the last call was not finite.

        Reading a GPU's numbers would wait for it in each step. So it is called before anything is logged, evaluated or
        saved.
        """
        steps, self.unverified = self.unverified, []
        for step, is_finite, indices in steps:
            if is_finite:
                continue
            names = sorted(map(self.task.train.image_name, gather_object(torch.cat(indices).tolist())))
            raise Diverged(
                f"loss or gradient of step {step} is not finite (nothing of it is saved; images "
                f"{shortened(names, MAX_NAMED_IMAGES)}); the last checkpoint is intact: "
                "check these images, or begin again with a lower optim.lr in a new run.dir"
            )

    def seed_of(self, number: int) -> int:
        """The seed of all that a pass draws inside the model: distinct for (seed, step, forward pass, rank)."""
        place = number * self.layout.world_size + self.layout.rank
        word = random_words(Stream.MODEL, self.task.run.seed, self.step, place, 1)[0]
        return int(word) >> 1  # 63 bits


def training_batches(task: ImageTask, start: int, cursors: Cursors) -> Iterator[Batch]:
    """This process's batches from step `start` on, of files or decoded images; a stream continues from its cursors.

    Loader processes are forked here, those of evaluations too.

    Raises:
        ReadFailed: images cannot be read.
        UserError: most of the latest images cannot be decoded.
    """
    layout, steps = task.layout, task.run.steps
    views = task.views(task.train)
    if task.data.streaming:
        loader = streaming_loader(views, layout, start, steps, cursors)
    else:
        images_left = (steps - start) * layout.global_batch_size // layout.world_size  # of this process
        loader = training_loader(in_memory(views, images_left, task.accelerator.device), layout, start, steps)
    task.fixed_view_loader.start()
    return refuse_undecodable(iter(loader))


def refuse_undecodable(batches: Iterator[Batch]) -> Iterator[Batch]:
    """These batches; UserError once most of the latest images cannot be decoded."""
    latest: list[str] = []  # of each image, why it cannot be decoded; empty: it can
    for batch in batches:
        outcomes = batch.unreadable + [""] * len(batch.images)
        latest = (latest + outcomes)[-max(RECENT_IMAGES, len(outcomes)) :]
        bad = [failure for failure in latest if failure]
        if len(latest) >= MIN_IMAGES and len(bad) > len(latest) / 2:
            raise UserError(f"{len(bad)} of the last {len(latest)} images cannot be decoded, such as {bad[-1]}")
        yield batch


def due(step: int, every: int, last: int) -> bool:
    """Whether something done once in `every` steps is done after step `step`; it is after the last step."""
    return every > 0 and (step % every == 0 or step == last)
