"""Whether updates are finite: noticed on the device in each, told on the host when it looks."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor

from mpp.data.views import Batch
from mpp.errors import Diverged
from mpp.training.optim import skips_what_is_not_finite


class FiniteCheck:
    """The verdict on each update since the host last looked.

    Once an update is not finite, `broken` is 1 for good: a fused optimiser then skips its step on the device, so that
    the host need not wait for every step's verdict on a GPU.

    Args:
        name: what a person finds a training image by.
    """

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, name: Callable[[int], str]):
        self.name = name
        self.broken = torch.zeros((), device=accelerator.device)
        skips = skips_what_is_not_finite(optimizer.optimizer)
        self.at_once = accelerator.device.type == "cpu" or not skips  # on a CPU, looking at the verdict costs nothing
        self.unchecked: list[tuple[int, Tensor, Tensor, list[Tensor]]] = []  # step, verdict; by pass: losses, images
        if skips:
            optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, self.broken

    def note(self, step: int, loss: Tensor, norm: Tensor, losses: list[Tensor], micro: list[Batch]) -> None:
        """The loss and the gradient's norm of update `step`; this process's losses and batches, by forward pass."""
        self.broken.copy_(torch.maximum(self.broken, (~(loss.isfinite() & norm.isfinite())).float()))
        self.unchecked.append((step, self.broken.clone(), torch.stack(losses), [batch.indices for batch in micro]))

    def check(self) -> None:
        """Raise on every process, naming step and images, if an update since the last check was not finite."""
        if self.broken.item():
            step, _, losses, indices = next(update for update in self.unchecked if update[1])  # the first
            finite = losses.isfinite().tolist()
            broken = [batch for batch, good in zip(indices, finite, strict=True) if not good]
            suspects, seen = (gather_object([int(i) for batch in of for i in batch]) for of in (broken, indices))
            images = sorted(map(self.name, suspects or seen))
            raise Diverged(
                f"loss or gradient of update {step} is not finite (nothing was updated by it; images "
                f"{', '.join(images[:16])}{' ...' * (len(images) > 16)}); the last checkpoint is good: "
                "resume with a lower optim.lr in a new run.dir, or look at these images"
            )
        self.unchecked.clear()
