"""GPU memory that pre-training needs, counted without a GPU: `mpp memory --config imagenet_vit_b16`.

The settings are those of `mpp pretrain`. A step is computed on fake tensors, which have shapes and no numbers, and
torch's MemTracker counts their storages at the peak. Not counted: memory that CUDA and its libraries take, about 1 GB,
and gaps between tensors in torch's allocator.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from mpp.config import Config, OptimConfig
from mpp.config.parsing import parse
from mpp.corruption import Corruption, draw
from mpp.data.loader import BatchLayout
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid
from mpp.objectives import Objective
from mpp.runtime.start import run_main
from mpp.training.optim import build_optimizer

BYTES_PER_GB = 1e9


def peak_memory(config: Config, image_count: int, passes: int = 1) -> dict[str, int]:
    """Bytes at the peak of a step: weights, gradients, optimiser, activations, total.

    Args:
        image_count: of a forward pass, on one GPU that holds the whole model (not sharded).
        passes: forward passes of a step; gradients exist from the second one on.
    """
    if config.model.attention == "auto":
        config = replace(config, model=replace(config.model, attention="fused"))  # as on a GPU
    config = replace(config, model=replace(config.model, init_from=None))  # any weights take as much
    with torch.device("meta"):
        model, objective = build_model(config)
    of_optimizer = optimizer_bytes(model, config.optim)
    frozen = freeze_as_buffers(model)
    of_passes = peak_of_passes(config, model, objective, image_count, passes)
    weights = of_passes["PARAM"] + frozen
    gradients = of_passes["GRAD"]
    total = of_passes["Total"]
    return {
        "weights": weights,
        "gradients": gradients,
        "optimiser": of_optimizer,
        "activations": total - weights - gradients,
        "total": total + of_optimizer,
    }


def peak_of_passes(
    config: Config, model: nn.Module, objective: Objective, image_count: int, passes: int
) -> dict[str, int]:
    """Bytes at the peak of forward and backward passes by torch's kind of memory, such as PARAM, GRAD and Total.

    Args:
        model: all of its parameters are trained.
    """
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        model.to_empty(device="cpu")
        pixels, corruption = fake_batch(config, model, image_count, fake_mode)
        tracker.track_external(model)
        with tracker:
            for _ in range(min(2, passes)):
                compute_loss(model, objective, pixels, corruption, config.run.precision).backward()
                tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2]: taken for kind, taken in peak.items()}


def freeze_as_buffers(model: nn.Module) -> int:
    """Make buffers of the parameters that are not trained, for torch's tracker takes only trained ones: their bytes."""
    frozen = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.data)
                frozen += parameter.nbytes
    return frozen


def fake_batch(
    config: Config, model: nn.Module, image_count: int, fake_mode: FakeTensorMode
) -> tuple[Tensor, Corruption]:
    """Images and their corruption as fake tensors, to be called under this mode."""
    grid, patch_size = cell_grid(model.encoder)
    height, width = (side * patch_size for side in grid)
    pixels = torch.empty(image_count, config.data.channels, height, width, dtype=torch.uint8)
    of_one_image = draw(config.corruption, grid, seed=0, epoch=0, index=0)
    of_batch = {}
    for name, tensor in of_one_image._asdict().items():
        if tensor is not None:
            of_batch[name] = fake_mode.from_tensor(tensor.new_zeros(1).expand(image_count, *tensor.shape))
    return pixels, Corruption(**of_batch)


def compute_loss(
    model: nn.Module, objective: Objective, pixels: Tensor, corruption: Corruption, precision: str
) -> Tensor:
    """Loss of a forward pass, whose predictions are freed before the backward pass as in training."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        outputs = model(pixels, corruption)
    if isinstance(outputs, tuple):  # a model with a teacher computes the targets too
        predictions, targets = outputs[:2]
    else:
        predictions = outputs
        targets = objective.targets(pixels, corruption.positions)
    return objective.loss(predictions.float(), targets)


def optimizer_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Bytes of the optimiser's state for a model on torch's `meta` device."""
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group["fused"] = False  # meta tensors have no fused kernel
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    total = 0
    for state in optimizer.state.values():
        total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Count with the settings of the command line, or of `arguments`."""
    config = parse(Config, arguments)
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, world_size=1, rank=0)
    peak = peak_memory(config, layout.largest_share, layout.accumulation_steps)
    print(f"GB at the peak of a step, {layout.largest_share} images a forward pass, one GPU with the whole model:")
    if not peak["gradients"]:
        print("The peak is before the backward pass: there are no gradients yet.")
        del peak["gradients"]
    print(", ".join(f"{kind} {taken / BYTES_PER_GB:.3g}" for kind, taken in peak.items()))


if __name__ == "__main__":
    run_main(main)
