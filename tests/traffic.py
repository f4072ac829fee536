"""Bytes that a training step moves through a GPU's memory, counted without one, on fake tensors.

    python tests/traffic.py --model.name=vit_base_patch16_224 --data.batch_size=256 --model.residual=bf16

Each operation of an eager forward and backward pass counts all its inputs and outputs once, whatever a cache holds;
views and empty tensors move nothing. Attention is fused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evaluation.memory import compute_loss, fake_batch
from mpp.config import Config
from mpp.config.parsing import parse
from mpp.models.networks import build_model

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach")


def bytes_of(tensors: Sequence[Any]) -> int:
    """Bytes of the tensors among these values; of an expanded one, those of its storage."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            total += min(tensor.nbytes, tensor.untyped_storage().nbytes())
    return total


class TrafficMode(TorchDispatchMode):
    """Counts bytes by operation while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = operation(*args, **kwargs)
        name = operation.__name__.split(".")[0]
        if operation.namespace == "aten" and not operation.is_view and name not in FREE:
            self.traffic[name] += bytes_of(tree_leaves((args, kwargs))) + bytes_of(tree_leaves(outputs))
        return outputs

    def elementwise(self) -> int:
        """Bytes of all operations but matrix products, convolutions and attention."""
        others = [name for name in self.traffic if name not in PRODUCTS and "attention" not in name]
        return sum(self.traffic[name] for name in others)


def count_traffic(config: Config, images: int) -> TrafficMode:
    """Bytes of a forward and backward pass over so many images."""
    config = replace(config, model=replace(config.model, attention="fused"))
    with torch.device("meta"):
        model, objective = build_model(config)
    counter = TrafficMode()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        pixels, corruption = fake_batch(config, model, images)
        with counter:
            compute_loss(model, objective, pixels, corruption, config.run.precision).backward()
    return counter


def main() -> None:
    config = parse(Config)
    counter = count_traffic(config, config.data.batch_size)
    total = sum(counter.traffic.values())
    print(f"GB of a step of {config.data.batch_size} images: {total / 1e9:.1f}", end=", ")
    print(f"without products and attention {counter.elementwise() / 1e9:.1f}")
    for name, moved in counter.traffic.most_common(20):
        print(f"{name:45}{moved / 1e9:8.2f}")


if __name__ == "__main__":
    main()
