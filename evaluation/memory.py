"""How much memory pre-training takes on a GPU, counted before there is one: `mpp memory --config imagenet_vit_b16`.

The settings are those of `mpp pretrain`. An update is done with fake tensors, which have shapes and no numbers, and
torch's MemTracker counts their storages at the peak. Not counted: what CUDA and its libraries take for themselves, some
1 GB, and what torch's allocator wastes between tensors.
"""

from collections.abc import Sequence
from contextlib import nullcontext
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
from mpp.models.timm_models import cell_grid
from mpp.runtime.command import command
from mpp.training.optim import build_optimizer


def peak_memory(config: Config, images: int, passes: int = 1) -> dict[str, int]:
    """Bytes at the peak of an update: weights, gradients, optimiser, activations, total.

    Args:
        images: of a forward pass, on one GPU that holds the whole model (not sharded).
        passes: forward passes of an update; from the second one on the gradients are there.
    """
    if config.model.attention == "auto":
        config = replace(config, model=replace(config.model, attention="fused"))  # as on a GPU
    with torch.device("meta"):
        model, objective = build_model(config)
    grid, patch_size = cell_grid(model.encoder)
    fields = [tensor.new_zeros(1).expand(images, *tensor.shape) for tensor in draw(config.corruption, grid, 0, 0, 0)]
    moments = optimizer_bytes(model, config.optim)
    model.requires_grad_(True)  # the tracker takes no other; a teacher, which computes without a graph, gets none
    half = config.run.precision != "fp32"
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model.to_empty(device="cpu")
        shown = torch.empty(images, config.data.channels, *(side * patch_size for side in grid), dtype=torch.uint8)
        corruption = Corruption(*map(fake.from_tensor, fields))
        tracker.track_external(model)
        with tracker:
            for _ in range(min(2, passes)):
                with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                    found = model(shown, corruption)
                taught = isinstance(found, tuple)
                predictions, targets = found[:2] if taught else (found, objective.targets(shown, corruption.positions))
                objective.loss(predictions.float(), targets).backward()
                del found, predictions, targets
                tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    parts = {str(kind).rpartition(".")[2]: taken for kind, taken in peak.items()}
    kinds = {"weights": parts["PARAM"], "gradients": parts["GRAD"], "optimiser": moments}
    return kinds | {"activations": parts["Total"] - parts["PARAM"] - parts["GRAD"], "total": parts["Total"] + moments}


def optimizer_bytes(model: nn.Module, config: OptimConfig) -> int:
    """What the optimiser keeps of a model on torch's `meta` device."""
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group["fused"] = False  # there is no kernel for nothing
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    kept = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return sum(each.nbytes for each in kept)


def main(arguments: Sequence[str] | None = None) -> None:
    """Count as the command line, or `arguments`, say."""
    config = parse(Config, arguments, prog="python evaluation/memory.py")
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
    images, passes = layout.largest, layout.accumulation_steps
    found = peak_memory(config, images, passes)
    print(f"GB at the peak of an update, {images} images a forward pass, one GPU with the whole model:")
    print(", ".join(f"{kind} {taken / 1e9:.3g}" for kind, taken in found.items()))


if __name__ == "__main__":
    command(main)
