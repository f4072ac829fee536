"""One optimiser update: batches, gradients, their check, a step."""

import math
from contextlib import nullcontext

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from mpp.config import OptimConfig, RunConfig
from mpp.data.views import Batch, BatchLayout
from mpp.errors import Diverged
from mpp.metrics import Sums, add
from mpp.runtime.randomness import Stream, random_words
from mpp.training.optim import learning_rate, skips_what_is_not_finite
from mpp.training.parallel import whole_tensor


class Update:
    """One optimiser update: accumulate, clip, check, step."""

    def __init__(self, task, accelerator, model, optimizer, optim: OptimConfig, layout: BatchLayout, run: RunConfig):
        self.task, self.accelerator, self.model, self.optimizer = task, accelerator, model, optimizer
        self.optim, self.layout, self.run = optim, layout, run
        # Once an update is not finite this is 1 for good: the fused optimiser then skips its step on the device, so
        # that the host need not wait for every step's verdict on a GPU.
        self.broken = torch.zeros((), device=accelerator.device)
        skips = skips_what_is_not_finite(optimizer.optimizer)
        self.at_once = accelerator.device.type == "cpu" or not skips  # on a CPU, looking at the verdict costs nothing
        self.unchecked: list[tuple[int, Tensor, Tensor, list[Tensor]]] = []  # step, verdict; by pass: losses, images
        if skips:
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
        norm = whole_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), self.optim.clip or math.inf))
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
