"""Settings of the encoder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from mpp.config.fields import Settings, as_tuple, require, setting
from mpp.errors import UserError

Representation = Literal["class", "mean", "both"]
"""Of an image: the [class] token, the mean of the patches, or both side by side."""


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The encoder: a timm transformer by name, or a plain ViT by its dimensions."""

    name: str | None = None
    """A timm VisionTransformer, Eva or Beit (vit_base_patch16_224, vit_small_patch16_dinov3, ...), with random weights.
    null: a plain ViT with the five dimensions below."""
    width: int | None = setting(None, otherwise=128, at_least=1)
    """Width of the tokens. null: that of model.init_from or of the named model, otherwise 128."""
    depth: int | None = setting(None, otherwise=4, at_least=1)
    """Transformer blocks. null: as width, otherwise 4."""
    heads: int | None = setting(None, otherwise=4, at_least=1)
    """Attention heads. null: as width, otherwise 4."""
    img_size: int | tuple[int, int] | None = setting(None, otherwise=64, at_least=1)
    """Side of the square input in pixels, or height and width: [128, 1024]. null: as width, otherwise 64."""
    patch_size: int | None = setting(None, otherwise=8, at_least=1)
    """Side of a patch in pixels. null: as width, otherwise 8."""
    position: Literal["learned", "none", "learned_2d", "sincos_2d", "relative", "relative_bias", "rope"] = "learned"
    """Position embeddings (paper, appendix D.4). learned: one per position; learned_2d: half for the row, half for the
    column; sincos_2d: fixed sines and cosines of both (MAE); relative: one per offset along the sequence, as keys of a
    second attention (the paper); relative_bias: a learned bias per offset in rows and columns (Swin, BEiT; timm); rope:
    queries and keys rotated by row and column (timm)."""
    position_at: Literal["stem", "every", "every_shared"] = "stem"
    """Input that learned, learned_2d and sincos_2d are added to (paper, Table 8). stem: the first block's; every: each
    block's, with its own embeddings; every_shared: each block's, with the same embeddings."""
    stride: int | None = None
    """Pixels from one patch to the next, a divisor of the patch size. With less than the patch size, patches overlap,
    and whole cells of pixels as large as a patch are masked and predicted. null: the patch size."""
    mixing: Literal["full", "axial"] = "full"
    """axial: each block is two, attention along rows with its MLP, and along columns with another (paper, D.6). There
    is no [class] token then; the feature is the mean of the patches."""
    arguments: dict[str, Any] | None = None
    """Further arguments of the timm model's class: {"reg_tokens": 4}, {"init_values": 1e-5}, {"qk_norm": true}; in
    supervised training, of the named model: {"channels": [128, 256, 512, 1024]} of resnetv2_50x1_bit."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout after position embeddings and every dense layer but qkv (paper, Table 3)."""
    drop_path: float = setting(0.0, at_least=0, below=1)
    """Stochastic depth rate of the last block, rising linearly from 0."""
    attention: Literal["auto", "fused", "unfused"] = "auto"
    """Attention kernel of timm. auto: fused on a GPU; unfused on a CPU, where it is faster."""
    residual: Literal["fp32", "bf16"] = setting("fp32", needs={"run.precision": ("auto", "bf16")})
    """Type of the tokens between blocks if run.precision is bf16, in encoder, decoder and moving average. bf16 moves
    fewer bytes on a GPU, and rounds each block's sum to 8 bits; exported weights stay float32."""
    mean: float | tuple[float, ...] | Literal["auto"] | None = 0.5
    """Means for normalising the input (pixels scaled to [0, 1]): one per channel, or one for all. auto: measured on
    1,024 training images when the run begins; null: those of the weights at model.init_from. config.yaml then has the
    numbers."""
    std: float | tuple[float, ...] | Literal["auto"] | None = setting(0.5, above=0)
    """Standard deviations for normalising the input, given like the means."""
    activation_checkpointing: bool = setting(False, operational=True)
    """Keep one activation per block and recompute the rest in the backward pass: less memory, one more forward pass."""
    init_from: str | None = None
    """Weights to start the encoder from: a run folder, an encoder folder, a .safetensors file, zoo:NAME, hf-hub:NAME,
    or the name of a timm model with published weights (vit_small_patch16_dinov3.lvd1689m). The model is theirs; another
    img_size, patch_size or stride is resampled, and other settings that contradict them are refused. null: random
    weights."""
    train: str | None = None
    """Trained parameters of the encoder: a regular expression found in their names, such as attn.proj (APLA), or
    blocks.11. for the last of twelve blocks. The others stay frozen. null: all; with lora_rank none."""
    lora_rank: int | None = setting(None, at_least=1)
    """Rank of LoRA: frozen matrices of the encoder are adapted by a product of two narrow matrices of this rank, which
    is merged into them on export. null: no LoRA."""

    def numbers(self) -> dict[str, Any]:
        """The five numbers, of which the size may be two; None: the named model's own."""
        usual = {each.name: each.metadata["otherwise"] for each in fields(self) if each.metadata.get("otherwise")}
        given = {name: getattr(self, name) for name in usual}
        return {name: usual[name] if self.name is None and value is None else value for name, value in given.items()}

    def known_numbers(self) -> dict[str, Any]:
        """As `numbers`; None, too, where the weights at `init_from` decide."""
        numbers = self.numbers()
        return numbers if self.init_from is None else {name: getattr(self, name) for name in numbers}

    def is_variant(self) -> bool:
        """Whether timm has no such plain ViT, and it is one of mpp/models/variants.py."""
        at_stem = self.position in ("learned", "none", "sincos_2d") and self.position_at == "stem"
        strided = self.stride not in (None, self.known_numbers()["patch_size"])
        return not at_stem or strided or self.mixing != "full"

    def check(self):
        self.check_train()
        self.check_variant()
        numbers = self.known_numbers()
        if numbers["img_size"] and numbers["patch_size"]:
            check_grid(numbers["img_size"], numbers["patch_size"])
        width, heads = numbers["width"], numbers["heads"]
        if width and heads:
            require(width % heads == 0, "model.width", width, f"a multiple of model.heads ({heads})")
        for name in ("mean", "std"):
            value = getattr(self, name)
            is_known = value is not None or self.init_from is not None
            require(is_known, f"model.{name}", value, "numbers or auto unless model.init_from is set")

    def check_train(self) -> None:
        """Raise UserError where `train` is no regular expression."""
        try:
            re.compile(self.train or "")
        except re.error as error:
            raise UserError(f"model.train is {self.train}; it must be a regular expression: {error}") from None

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation for each channel. Raises UserError if their number is not that of the channels.

        A run has replaced `auto` and null by numbers; FLOP counting uses 0.5.
        """
        moments = []
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = as_tuple(0.5 if value in ("auto", None) else value)
            require(len(numbers) in (1, channels), f"model.{name}", numbers, f"{channels} numbers: data.channels")
            moments.append(numbers if len(numbers) == channels else numbers * channels)
        mean, std = moments
        return mean, std

    def check_variant(self) -> None:
        """Raise UserError at settings of an encoder that do not go together."""
        allowed = "null with model.position_at, model.stride, model.mixing and this model.position: give width, depth, "
        allowed += "heads, img_size and patch_size instead"
        require(self.name is None or not self.is_variant(), "model.name", self.name, allowed)
        stem = self.position_at == "stem" or self.position in ("learned", "learned_2d", "sincos_2d")
        require(stem, "model.position_at", self.position_at, f"stem with model.position={self.position}")
        patch, stride = self.known_numbers()["patch_size"], self.stride
        divides = stride is None or (stride >= 1 and (patch is None or patch % stride == 0))
        require(divides, "model.stride", stride, f"a divisor of the patch size ({patch})")


Grid = tuple[int, int]
"""Rows and columns of patches."""
ImageSize = tuple[int, int]
"""Height and width of an image, in pixels."""


def sides(img_size: int | Sequence[int]) -> ImageSize:
    """Height and width of an image: one number means a square."""
    return (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)


def resized_side(side: int, crop: float) -> int:
    """Length to which an image's side is resized, so that a centre crop of `side` pixels keeps the share `crop`."""
    return max(side, round(side / crop))


def check_grid(img_size: int | Sequence[int], patch_size: int, key: str = "model.img_size") -> None:
    """An image is a whole number of patches."""
    fits = all(side % patch_size == 0 for side in sides(img_size))
    require(fits, key, img_size, f"a multiple of the patch size ({patch_size})")
