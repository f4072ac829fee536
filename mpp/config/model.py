"""Settings of the encoder."""

import math
from dataclasses import dataclass
from typing import Literal

from mpp.config.checks import plumbing, require


@dataclass(frozen=True)
class ModelConfig:
    """The encoder: one of timm's Vision Transformers, or a plain one by its numbers."""

    name: str | None = None
    """A timm VisionTransformer (vit_base_patch16_224, ...). null: a plain one of the five numbers below."""
    width: int | None = None
    """Width of the tokens. null: the named model's, or 128."""
    depth: int | None = None
    """Transformer blocks. null: the named model's, or 4."""
    heads: int | None = None
    """Attention heads. null: the named model's, or 4."""
    img_size: int | None = None
    """Side of the square input in pixels. null: the named model's, or 64."""
    patch_size: int | None = None
    """Side of a patch in pixels. null: the named model's, or 8."""
    position: Literal["learned", "sincos_2d"] = "learned"
    """Position embeddings. learned: timm's; sincos_2d: a fixed table of sines and cosines of row and column (MAE)."""
    dropout: float = 0.0
    """Dropout after position embeddings and every dense layer but qkv (paper, Table 3)."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block, rising linearly from 0."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """timm's attention. auto: fused on a GPU, unfused on a CPU, where it is faster."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel means that the input is normalised with (of pixels scaled to [0, 1])."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel deviations that the input is normalised with."""
    activation_checkpointing: bool = plumbing(False)
    """Keep one activation a block and compute the rest again in the backward pass: less memory, a forward pass more."""
    init_from: str | None = None
    """Run folder, encoder folder or .safetensors file to start the encoder from. null: random weights."""

    def numbers(self) -> dict[str, int | None]:
        """The five numbers; None: the named model's own."""
        plain = dict(width=128, depth=4, heads=4, img_size=64, patch_size=8) if self.name is None else {}
        given = {name: getattr(self, name) for name in ("width", "depth", "heads", "img_size", "patch_size")}
        return {name: plain.get(name) if value is None else value for name, value in given.items()}

    def __post_init__(self):
        numbers = self.numbers()
        for name, value in numbers.items():
            require(value is None or value >= 1, f"model.{name}", value, "at least 1")
        if numbers["img_size"] and numbers["patch_size"]:
            check_grid(numbers["img_size"], numbers["patch_size"])
        width, heads = numbers["width"], numbers["heads"]
        if width and heads:
            require(width % heads == 0, "model.width", width, f"a multiple of model.heads ({heads})")
        for name in ("dropout", "drop_path"):
            require(0 <= getattr(self, name) < 1, f"model.{name}", getattr(self, name), "at least 0 and below 1")
        require(all(0 < s < math.inf for s in self.std), "model.std", list(self.std), "three positive numbers")
        require(all(map(math.isfinite, self.mean)), "model.mean", list(self.mean), "three numbers")


def check_grid(img_size: int, patch_size: int, key: str = "model.img_size") -> None:
    """An image is a whole number of patches."""
    require(img_size % patch_size == 0, key, img_size, f"a multiple of the patch size ({patch_size})")
