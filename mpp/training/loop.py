"""The one training loop: whatever is trained here, it is trained by `fit`.

It knows a model, a loss, batches, an optimiser and a schedule, and nothing of what they mean. All of its state is the
step, the weights and the optimiser's, so that a killed run goes on exactly.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from mpp.config import OptimConfig, RunConfig
from mpp.data.views import Batch, BatchLayout
from mpp.errors import Diverged, ReadFailed, UserError
from mpp.metrics import Sums, add, total
from mpp.runtime.preemption import Ending, Preemption
from mpp.runtime.randomness import Stream, random_words
from mpp.training.checkpoint import Places, restore, save_checkpoint
from mpp.training.feed import Feed
from mpp.training.optim import averaged_weights, build_optimizer, learning_rate
from mpp.training.tracking import Speed, Tracker, progress_bar


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


def fit(
    task: Task,
    accelerator: Accelerator,
    run: RunConfig,
    optim: OptimConfig,
    layout: BatchLayout,
    folder: Path,
    config: Any,
    flops: int,
    preemption: Preemption,
) -> None:
    """Train from the newest checkpoint of `folder` to `run.steps`, then export.

    Args:
        config: the whole config, for the trackers alone.
        flops: executed per image.
        preemption: which is asked once a step.
    Raises:
        Diverged: a loss or gradient that is not finite; nothing was updated by it.
        ReadFailed: images cannot be read; the checkpoint is written.
        UserError: most images cannot be decoded; the checkpoint is written. Or it cannot be written.
        Preempted: a signal asked for a stop; the checkpoint is written.
    """
    if run.compile:
        task.model.compile()
    model, optimizer = accelerator.prepare(task.model, build_optimizer(task.model, optim))
    if isinstance(model, DistributedDataParallel):
        model.broadcast_buffers = False  # in each step; as an argument, torch would warn of it
    bare = accelerator.unwrap_model(model)
    start, places = resume(accelerator, folder, bare, optimizer.optimizer)
    tracker = Tracker(accelerator, folder, config, start)
    update = Update(task, accelerator, model, optimizer, optim, layout, run)
    speed, bar = Speed(flops, accelerator.device), progress(accelerator, run.steps, start)
    feed, saved = Feed(task.batches(start, places), layout.accumulation_steps), start

    def save(step: int) -> int:
        """Write a checkpoint, of finite updates alone."""
        update.check_finite()
        with speed.paused():
            checkpoint(accelerator, folder, step, bare, optimizer.optimizer, places, run.keep_checkpoints)
        return step

    for step in range(start, run.steps):
        done = step + 1
        log = due(done, run.log_every, run.steps)
        micro, failure = attempt(feed)
        ending = preemption.agreed(failed=failure is not None)
        if ending is Ending.FAILURE or (ending is Ending.SIGNAL and step > start):
            bar.close()
            saved = save(step) if step > saved else saved
            if ending is Ending.SIGNAL:
                preemption.leave(f"after step {step}; a checkpoint is written")
            fail(accelerator, failure, step)
        values, sums = update(step, micro, measure=log)
        places |= places_after(micro)
        speed.images += layout.images
        tracker.warn_unreadable(feed.undecoded)
        bar.update()
        if log:
            scalars = {name: float(value) for name, value in values.items()} | task.describe(total(sums))
            scalars |= speed.read(feed) | {"compute/pflop": flops * layout.images * done / 1e15}
            scalars |= {"unreadable": tracker.count_unreadable()}
            tracker.log(done, scalars)
            bar.set_postfix_str(f"loss {scalars['loss']:.3f}, {scalars['speed/images_per_second']:.0f} images/s")
        if due(done, run.eval_every, run.steps):
            model.eval()
            for buffer in bare.buffers():
                broadcast(buffer)  # a batch norm's means are each process's own; the main process's are exported
            try:
                with speed.paused(), averaged_weights(optimizer.optimizer, average=optim.average is not None):
                    tracker.log(done, task.evaluate(bare, done, tracker))
            except ReadFailed as error:
                if accelerator.num_processes > 1:
                    raise  # the others are elsewhere in the evaluation: no checkpoint can be agreed upon
                saved = save(done)
                fail(accelerator, error, done)
        if due(done, run.checkpoint_every, run.steps):
            saved = save(done)
    bar.close()
    with averaged_weights(optimizer.optimizer, average=optim.average is not None):
        if accelerator.is_main_process:
            task.export(bare, folder)


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
    if accelerator.is_main_process:
        try:
            save_checkpoint(folder, step, model, optimizer, keep, everywhere)
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


def attempt(feed: Feed) -> tuple[list[Batch], UserError | None]:
    """The next update's batches, or why there are none."""
    try:
        return feed.take(), None
    except UserError as error:
        return [], error


def fail(accelerator: Accelerator, failure: UserError | None, step: int) -> NoReturn:
    """Raise on every process what went wrong with the images on any."""
    error = next(each for each in gather_object([failure]) if each)
    saved = f"a checkpoint after step {step} is written, " if step else ""
    raise type(error)(f"{error}; {saved}and the same command goes on")


class Update:
    """One optimiser update: accumulate, clip, check, step."""

    def __init__(self, task, accelerator, model, optimizer, optim: OptimConfig, layout: BatchLayout, run: RunConfig):
        self.task, self.accelerator, self.model, self.optimizer = task, accelerator, model, optimizer
        self.optim, self.layout, self.run = optim, layout, run
        # Once an update is not finite this is 1 for good: the fused optimiser then skips its step on the device, so
        # that the host need not wait for every step's verdict on a GPU.
        self.broken = torch.zeros((), device=accelerator.device)
        self.at_once = accelerator.device.type == "cpu"  # where looking at the verdict costs nothing
        self.unchecked: list[tuple[int, Tensor, Tensor, list[Tensor]]] = []  # step, verdict; by pass: losses, images
        optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, self.broken

    def __call__(self, step: int, micro: list[Batch], measure: bool) -> tuple[dict[str, Tensor | float], Sums]:
        """Do update `step` (from 0); its loss, gradient norm and rate, and the task's sums if `measure`."""
        self.model.train()
        rate = learning_rate(self.optim, step, self.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        losses, sums = [], {}
        for number, batch in enumerate(micro):
            torch.manual_seed(self.seed_of(step, number))  # dropout has no state: it is a function of the place
            last = number == len(micro) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, measured = self.task.loss(self.model, batch, measure)
                self.accelerator.backward(loss / self.layout.parts(number))
            losses.append(loss.detach())
            sums = add(sums, measured)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.optim.clip or math.inf)
        shared = sum(each / self.layout.parts(number) for number, each in enumerate(losses))
        loss = self.accelerator.reduce(shared, "mean")
        self.broken.copy_(torch.maximum(self.broken, (~(loss.isfinite() & norm.isfinite())).float()))
        indices = [batch.indices for batch in micro]
        self.unchecked.append((step, self.broken.clone(), torch.stack(losses), indices))
        if measure or self.at_once:
            self.check_finite()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "optim/lr": rate, "optim/grad_norm": norm}, sums

    def seed_of(self, step: int, micro: int) -> int:
        """The seed of everything that is drawn inside the model: distinct for (seed, step, micro-step, rank)."""
        place = micro * self.layout.world_size + self.layout.rank
        return int(random_words(Stream.MODEL, self.run.seed, step, place, 1)[0] >> np.uint64(1))

    def check_finite(self) -> None:
        """Raise on every process, naming step and images, if an update since the last check was not finite."""
        if self.broken.item():
            step, _, losses, indices = next(update for update in self.unchecked if update[1])  # the first
            finite = losses.isfinite().tolist()
            broken = [batch for batch, good in zip(indices, finite, strict=True) if not good]
            suspects, seen = (gather_object([int(i) for batch in of for i in batch]) for of in (broken, indices))
            images = sorted(map(self.task.name, suspects or seen))
            raise Diverged(
                f"loss or gradient of update {step} is not finite (nothing was updated by it; images "
                f"{', '.join(images[:16])}{' ...' * (len(images) > 16)}); the last checkpoint is good: "
                "resume with a lower optim.lr in a new run.dir, or look at these images"
            )
        self.unchecked.clear()
