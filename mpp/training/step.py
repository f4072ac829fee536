"""One optimiser step: `TrainingStep`, and the check that what it does is finite."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor

from mpp.config import OptimConfig
from mpp.data.views import Batch
from mpp.errors import Diverged
from mpp.features.metrics import Sums, add_sums
from mpp.runtime.messages import shortened
from mpp.runtime.randomness import Stream, random_words
from mpp.training.optim import learning_rate, skips_nonfinite_steps
from mpp.training.parallel import prepare, whole_tensor
from mpp.training.task import ImageTask

MAX_NAMED_IMAGES = 16  # in the message of a step that is not finite


class TrainingStep:
    """One optimiser step: forward, loss, backward, clip, check, step."""

    def __init__(self, task: ImageTask, optim: OptimConfig):
        self.task = task
        self.optim = optim
        self.accelerator = task.accelerator
        self.layout = task.layout
        self.run = task.run
        self.parallel = prepare(task.model, self.accelerator, optim, self.run)
        self.model = self.parallel.model
        self.wrapped = self.parallel.wrapped
        self.optimizer = self.parallel.optimizer
        self.finite = FiniteCheck(self.accelerator, self.optimizer, task.image_name)

    def __call__(self, step: int, batches: list[Batch], measure: bool) -> tuple[dict[str, Tensor | float], Sums]:
        """Do step `step` (from 0); its loss, gradient norm and learning rate, and the task's sums if `measure`."""
        self.wrapped.train()
        rate = learning_rate(self.optim, step, self.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        losses, sums = self.accumulate_gradients(step, batches, measure)
        norm = whole_tensor(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optim.clip or math.inf))
        loss = self.accelerator.reduce(sum(losses), "mean")
        self.finite.record(step, loss, norm, losses, batches)
        if measure or self.finite.verifies_each_step:  # otherwise later: reading the flag waits for a GPU
            self.finite.verify()
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"loss": loss, "optim/lr": rate, "optim/grad_norm": norm}
        return values | self.task.after_step(self.model, step), sums

    def accumulate_gradients(self, step: int, batches: list[Batch], measure: bool) -> tuple[list[Tensor], Sums]:
        """Forward and backward passes; processes share gradients in the last one.

        Returns:
            This process's losses by forward pass, each divided so that their sum is its loss of the step; and the
            task's sums if `measure`.
        """
        losses = []
        sums: Sums = {}
        for number, batch in enumerate(batches):
            torch.manual_seed(self.seed_of(step, number))  # dropout has no state: it is a function of the place
            last = number == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                loss, measured = self.task.loss(self.wrapped, batch, measure)
                loss = loss / self.layout.loss_divisor(number)
                self.accelerator.backward(loss)
            losses.append(loss.detach())
            sums = add_sums(sums, measured)
        return losses, sums

    def seed_of(self, step: int, number: int) -> int:
        """The seed of everything that is drawn inside the model: distinct for (seed, step, forward pass, rank)."""
        place = number * self.layout.world_size + self.layout.rank
        word = random_words(Stream.MODEL, self.run.seed, step, place, 1)[0]
        return int(word >> np.uint64(1))


class UnverifiedStep(NamedTuple):
    """Record of a step that is not verified yet."""

    step: int
    broken: Tensor
    """1 if this step, or one before it, was not finite."""
    losses: Tensor
    """This process's losses, by forward pass."""
    indices: list[Tensor]
    """Indices of this process's images, by forward pass."""


class FiniteCheck:
    """Whether losses and gradients are finite: recorded on the device in each step, read by the host when it verifies.

    Once a step is not finite, `broken` is 1 for good. A fused optimiser then skips its steps on the device, so that the
    host does not wait for a GPU in each step.

    Args:
        image_name: the name of a training image, by its index.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, image_name: Callable[[int], str]):
        self.image_name = image_name
        self.broken = torch.zeros((), device=accelerator.device)
        self.unverified: list[UnverifiedStep] = []
        skips = skips_nonfinite_steps(optimizer.optimizer)
        self.verifies_each_step = accelerator.device.type == "cpu" or not skips  # reading a CPU's flag costs nothing
        if skips:
            optimizer.optimizer.grad_scale = None
            optimizer.optimizer.found_inf = self.broken

    def record(self, step: int, loss: Tensor, norm: Tensor, losses: list[Tensor], batches: list[Batch]) -> None:
        """Record a step: its loss and gradient norm; this process's losses and batches, by forward pass."""
        finite = torch.stack([loss, norm]).isfinite().all()
        self.broken.masked_fill_(~finite, 1.0)
        indices = [batch.indices for batch in batches]
        self.unverified.append(UnverifiedStep(step, self.broken.clone(), torch.stack(losses), indices))

    def verify(self) -> None:
        """Raise Diverged on every process, naming step and images, if a step since the last call was not finite."""
        if not self.broken.item():
            self.unverified.clear()
            return
        first = next(record for record in self.unverified if record.broken)
        finite_passes = first.losses.isfinite().tolist()
        images = []
        suspects = []
        for is_finite, indices in zip(finite_passes, first.indices, strict=True):
            images += indices.tolist()
            if not is_finite:
                suspects += indices.tolist()
        suspects = gather_object(suspects)
        images = gather_object(images)
        names = sorted(map(self.image_name, suspects or images))
        raise Diverged(
            f"loss or gradient of step {first.step} is not finite (it changed no weight; images "
            f"{shortened(names, MAX_NAMED_IMAGES)}); the last checkpoint is good: "
            "resume with a lower optim.lr in a new run.dir, or look at these images"
        )
