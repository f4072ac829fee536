"""One optimiser step: `TrainingStep`, and the check that loss and gradient are finite."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mpp.config import OptimConfig
from mpp.data.views import Batch
from mpp.errors import Diverged
from mpp.features.metrics import Sums, add_sums
from mpp.runtime.messages import shortened
from mpp.runtime.randomness import Stream, random_words
from mpp.training.optim import learning_rate, skips_nonfinite_steps
from mpp.training.parallel import prepare_model, whole_tensor
from mpp.training.task import ImageTask

MAX_NAMED_IMAGES = 16  # in the message of a step that is not finite
MAX_UNVERIFIED = 1_000  # steps, whose losses and images' indices are kept


class TrainingStep:
    """One optimiser step: forward, loss, backward, clip, check, step."""

    def __init__(self, task: ImageTask, optim: OptimConfig):
        self.task = task
        self.optim_config = optim
        self.accelerator = task.accelerator
        self.layout = task.layout
        self.run_config = task.run
        self.parallel = prepare_model(task.model, self.accelerator, optim, self.run_config)
        self.model = self.parallel.model
        self.wrapped = self.parallel.wrapped
        self.optimizer = self.parallel.optimizer
        self.finite = FiniteCheck(self.accelerator, self.optimizer, task.image_name)
        self.earlier_statistics: list[tuple[Tensor, Tensor]] = []
        """Running statistics of batch norms, and their values before the step."""

    def __call__(self, step: int, batches: Iterable[Batch], measure: bool) -> tuple[dict[str, Tensor | float], Sums]:
        """Do one step.

        Args:
            step: from 0.
            batches: one for each forward pass; the next one is taken when its pass begins.
            measure: whether the task's sums are wanted.
        Returns:
            Scalars (loss, gradient norm, learning rate, and the task's own); the task's sums, empty unless `measure`.
        """
        self.wrapped.train()
        rate = learning_rate(self.optim_config, step, self.run_config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        losses, indices, sums = self.accumulate_gradients(step, batches, measure)
        if step < self.optim_config.frozen_steps:
            self.drop_gradients_of_encoder()
        norm = whole_tensor(
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optim_config.clip or math.inf)
        )
        loss = self.accelerator.reduce(sum(losses), "mean")
        self.finite.record(step, loss, norm, losses, indices)
        if measure or self.finite.is_due():  # otherwise later: reading the flag waits for a GPU
            self.finite.verify()
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {"loss": loss, "optim/lr": rate, "optim/grad_norm": norm}
        return values | self.task.after_step(self.model, step), sums

    def accumulate_gradients(
        self, step: int, batches: Iterable[Batch], measure: bool
    ) -> tuple[list[Tensor], list[Tensor], Sums]:
        """Forward and backward passes; processes share gradients in the last one.

        Returns:
            By forward pass this process's losses, each divided so that their sum is its loss of the step, and the
            indices of its images; and the task's sums if `measure`.
        """
        losses: list[Tensor] = []
        indices: list[Tensor] = []
        sums: Sums = {}
        last = self.layout.accumulation_steps - 1
        self.keep_statistics()
        for number, batch in enumerate(batches):
            torch.manual_seed(self.seed_of(step, number))  # so that a resumed run repeats dropout
            with nullcontext() if number == last else self.parallel.without_sync():
                loss, measured = self.task.loss(self.wrapped, batch, measure)
                loss = loss / self.layout.loss_divisor(number)
                self.accelerator.backward(loss)
            losses.append(loss.detach())
            indices.append(batch.indices)
            sums = add_sums(sums, measured)
        return losses, indices, sums

    def drop_gradients_of_encoder(self) -> None:
        """Leave the encoder out of a step: the optimiser takes, and clipping counts, only parameters with a gradient.

        The gradients were computed all the same: processes that share a model expect those of all parameters.
        """
        for parameter in self.model.encoder.parameters():
            parameter.grad = None

    def keep_statistics(self) -> None:
        """Keep the running statistics of batch norms, which each forward pass changes, if a step has several passes."""
        if self.layout.accumulation_steps == 1:
            return
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        buffers = [buffer for norm in norms for buffer in norm.buffers()]
        self.earlier_statistics = [(buffer, buffer.clone()) for buffer in buffers]

    def checkpoint_bytes(self) -> int:
        """Bytes of the model's and, after a first step, of the optimiser's tensors, on all processes together."""
        tensors = list(self.model.state_dict().values())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value)]
        return sum(tensor.nbytes for tensor in tensors)

    def encoder_bytes(self) -> int:
        """Bytes of the exported encoder, nearly."""
        return sum(tensor.nbytes for tensor in self.model.encoder.state_dict().values())

    def drop_passes(self) -> None:
        """Undo the passes of a step that is not finished: the model is as before the step."""
        self.optimizer.zero_grad()
        for buffer, earlier in self.earlier_statistics:
            buffer.copy_(earlier)

    def seed_of(self, step: int, number: int) -> int:
        """The seed of everything that is drawn inside the model: distinct for (seed, step, forward pass, rank)."""
        place = number * self.layout.world_size + self.layout.rank
        word = random_words(Stream.MODEL, self.run_config.seed, step, place, 1)[0]
        return int(word >> np.uint64(1))  # 63 bits


class UnverifiedStep(NamedTuple):
    """Record of a step that is not verified yet."""

    step: int
    not_finite: Tensor
    """1 if this step, or one before it, was not finite."""
    losses: Tensor
    """This process's losses, by forward pass."""
    indices: list[Tensor]
    """Indices of this process's images, by forward pass."""


class FiniteCheck:
    """Whether losses and gradients are finite: recorded on the device in each step, read by the host when it verifies.

    Once a step is not finite, `not_finite` is 1 for good. A fused optimiser then skips its steps on the device, so that
    the host does not wait for a GPU in each step.

    Args:
        image_name: the name of a training image, by its index.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, image_name: Callable[[int], str]):
        self.image_name = image_name
        self.not_finite = torch.zeros((), device=accelerator.device)
        self.unverified: list[UnverifiedStep] = []
        skips = skips_nonfinite_steps(optimizer.optimizer)
        self.verifies_each_step = accelerator.device.type == "cpu" or not skips  # reading a CPU's flag costs nothing
        if skips:
            optimizer.optimizer.grad_scale = None
            optimizer.optimizer.found_inf = self.not_finite

    def record(self, step: int, loss: Tensor, norm: Tensor, losses: list[Tensor], indices: list[Tensor]) -> None:
        """The loss and the gradient's norm of a step; this process's losses and images' indices, by forward pass."""
        finite = torch.stack([loss, norm]).isfinite().all()
        self.not_finite.masked_fill_(~finite, 1.0)
        self.unverified.append(UnverifiedStep(step, self.not_finite.clone(), torch.stack(losses), indices))

    def is_due(self) -> bool:
        """Whether to verify now, also between two lines of metrics."""
        return self.verifies_each_step or len(self.unverified) >= MAX_UNVERIFIED

    def verify(self) -> None:
        """Raise Diverged on every process, naming step and images, if a step since the last call was not finite."""
        if not self.not_finite.item():
            self.unverified.clear()
            return
        first = next(record for record in self.unverified if record.not_finite)
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
            f"{shortened(names, MAX_NAMED_IMAGES)}); the last checkpoint is intact: "
            "check these images, or begin again with a lower optim.lr in a new run.dir"
        )
