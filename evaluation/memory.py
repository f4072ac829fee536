"""GPU memory that pre-training needs, counted without a GPU: `mpp memory --config imagenet_vit_b16`.

The settings are those of `mpp pretrain`. A step is computed on fake tensors, which have shapes and no numbers, and the
bytes of all that live at the peak are counted. Not counted: memory that CUDA and its libraries take, about 1 GB, and
gaps between tensors in torch's allocator.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mpp.config import Config, OptimConfig
from mpp.config.parsing import parse
from mpp.corruption import Corruption, draw, stack
from mpp.data.loader import BatchLayout
from mpp.models.encoder import with_architecture
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid
from mpp.models.teachers import with_targets
from mpp.objectives import Objective
from mpp.runtime.start import run_main
from mpp.training.optim import build_optimizer


def peak_memory(config: Config, image_count: int, passes: int = 1) -> dict[str, int]:
    """Bytes at the peak of a step: weights, gradients, optimiser, activations, total.

    Args:
        image_count: of a forward pass, on one GPU that holds the whole model (not sharded).
        passes: forward passes of a step; gradients exist from the second one on.
    """
    attention = "fused" if config.model.attention == "auto" else config.model.attention  # as on a GPU
    any_weights = dict(init_from=None, mean=0.5, std=0.5)
    model_config = replace(with_architecture(config.model), attention=attention, **any_weights)
    config = replace(config, model=model_config)
    with torch.device("meta"):
        model, objective = build_model(config)
    optimiser = optimizer_bytes(model, config.optim)
    with FakeTensorMode(allow_non_fake_inputs=True), LivingTensors() as living:
        model.to_empty(device="cpu")
        weights = living.now
        pixels, corruption = fake_batch(config, model, image_count)
        for _ in range(min(2, passes)):
            gradients = bytes_of([each.grad for each in model.parameters()])  # of the passes before
            compute_loss(model, objective, pixels, corruption, config.run.precision).backward()
    return {
        "weights": weights,
        "gradients": gradients,
        "optimiser": optimiser,
        "activations": living.peak - weights - gradients,
        "total": living.peak + optimiser,
    }


def optimizer_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Bytes of the optimiser's state for a model on torch's `meta` device."""
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group["fused"] = False  # meta tensors have no fused kernel
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return bytes_of(dict(optimizer.state))


def bytes_of(values: Any) -> int:
    """Bytes of the tensors among these."""
    return sum(each.nbytes for each in tree_leaves(values) if isinstance(each, Tensor))


class LivingTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while it is open: of those that live, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.untyped_storage() not in self.storages:
                storage = each.untyped_storage()
                self.storages[storage] = True
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return outputs

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def fake_batch(config: Config, model: nn.Module, image_count: int) -> tuple[Tensor, Corruption]:
    """Images and their corruption, to be called under the mode of fake tensors."""
    grid, _ = cell_grid(model.encoder)
    size = model.encoder.patch_embed.img_size
    pixels = torch.empty(image_count, config.data.channels, *size, dtype=torch.uint8)
    return pixels, stack([draw(config.corruption, grid, seed=0, epoch=0, index=0)] * image_count)


def compute_loss(
    model: nn.Module, objective: Objective, pixels: Tensor, corruption: Corruption, precision: str
) -> Tensor:
    """Loss of a forward pass, whose predictions are freed before the backward pass as in training."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        outputs = model(pixels, corruption)
    predicted = with_targets(outputs, objective, pixels, corruption)
    return objective.loss(predicted.predictions.float(), predicted.targets)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count with the settings of the command line, or of `arguments`."""
    config = parse(Config, arguments)
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, world_size=1, rank=0)
    peak = peak_memory(config, layout.largest_share, layout.accumulation_steps)
    print(f"GB at the peak of a step, {layout.largest_share} images a forward pass, one GPU with the whole model:")
    print(", ".join(f"{kind} {taken / 1e9:.3g}" for kind, taken in peak.items()))


if __name__ == "__main__":
    run_main(main)
