"""Frozen encoders as evaluation sees them: pixels in, features out, and the input that they take.

Vision Transformers, ResNets and hybrids from timm satisfy this contract; nothing else here knows how they are built.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from torch import Tensor, nn

from evaluation.config import EncoderConfig, ProbeDataConfig
from evaluation.frozen.run_images import COLOUR_BASELINE, is_colour_baseline
from mpp.config import HOW_READ, ImageSize, ObjectiveConfig, Representation, check_grid, require, sides
from mpp.errors import Unavailable
from mpp.features.frozen import BASELINE_CELLS, features_at, stages
from mpp.models.descriptions import is_named
from mpp.models.encoder import Normalize, load_encoder
from mpp.models.plain import set_attention
from mpp.objectives import palette_for
from mpp.runtime.hardware import uses_gpu

BASELINE_SIZE = 64  # of the images that a colour baseline is shown, where nothing else is asked for
BASELINE_CROP_PCT = 0.875


class FrozenEncoder(nn.Module):
    """An encoder without gradients that normalises the pixels it is given.

    Args:
        model: timm model without a head.
        img_size: side of the images it is shown, or height and width; None: the model's own.
    """

    def __init__(self, model: nn.Module, img_size: int | ImageSize | None = None):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        data_config = resolve_model_data_config(model)
        self.channels = data_config["input_size"][0]
        self.img_size = sides(img_size or data_config["input_size"][1:])
        self.crop_pct = data_config["crop_pct"]
        self.normalize = Normalize(data_config["mean"], data_config["std"])

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The parts that depth counts: blocks of a ViT, stages of a ResNet."""
        return stages(self.model)

    def describe_input(self, data: ProbeDataConfig) -> dict[str, Any]:
        """Form of its input from the images of `data`: size, crop, channels, normalisation, and how files are read."""
        return {
            "img_size": list(self.img_size),
            "crop_pct": data.eval_crop or self.crop_pct,
            "channels": self.channels,
            "mean": list(self.normalize.mean),
            "std": list(self.normalize.std),
            "data": {name: getattr(data, name) for name in HOW_READ},
        }

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """Features of images (B, C, H, W), from 0 to 255, after each depth, (B, D) float32: see `features_at`."""
        return features_at(self.model, self.normalize(images), depths, representation)


class ColorBaseline(nn.Module):
    """Features without a model, which pre-training has to beat: colour statistics of an 8 x 8 grid over the image.

    Args:
        kind: pixels: the mean colour of each cell (192 numbers for RGB); colors: the number of cells that have each of
            the colours of 3 bits a channel (512 numbers for RGB), or each level of each channel where there are more
            than four channels.
        img_size: side of the images, a multiple of 8, or height and width; None: 64.
    """

    stages = (None,)

    def __init__(self, kind: str, img_size: int | ImageSize | None, channels: int = 3):
        super().__init__()
        allowed = "floor:pixels or floor:colors"
        require(kind in ("pixels", "colors"), "encoder", f"{COLOUR_BASELINE}{kind}", allowed)
        self.kind = kind
        self.palette = palette_for(ObjectiveConfig(), channels)
        self.img_size = sides(img_size or BASELINE_SIZE)
        self.crop_pct = BASELINE_CROP_PCT
        fits = all(side % BASELINE_CELLS == 0 for side in self.img_size)
        require(fits, "img_size", img_size, f"a multiple of {BASELINE_CELLS}")

    @property
    def model(self) -> nn.Module:
        """A baseline has none: raises Unavailable."""
        raise Unavailable("a colour baseline has no weights")

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """As in FrozenEncoder; there is one depth and one representation."""
        cells = rearrange(images, "b c (h p) (w q) -> b (h w) c p q", h=BASELINE_CELLS, w=BASELINE_CELLS)
        if self.kind == "pixels":
            sums = cells.sum((-2, -1), dtype=torch.float64)  # (B, 64, C)
            return [sums.flatten(1).float() / (255 * cells[0, 0, 0].numel())]
        classes = self.palette.classes_of(cells)  # (B, 64, S)
        return [F.one_hot(classes, self.palette.classes).sum(1).flatten(1).float()]


def load_frozen_encoder(
    encoder: str,
    checkpoint: str | None = None,
    random: bool = False,
    img_size: int | ImageSize | None = None,
    seed: int = 0,
    channels: int | None = None,
    **changes: Any,
) -> FrozenEncoder | ColorBaseline:
    """Load the encoder of a run folder, an encoder folder, the hub or timm; or a colour baseline.

    Args:
        encoder: a folder, zoo:NAME, hf-hub:NAME, or the name of a timm model, whose published weights are
            downloaded; or `floor:pixels` or `floor:colors`.
        checkpoint: local .safetensors file with the weights of a timm model, instead of the published ones.
        random: take the architecture with random weights.
        img_size: another input size (ViTs resample their position embeddings).
        channels: channels of the images; None: those that the encoder takes.
        changes: other arguments of `timm.create_model` that differ from the encoder's own, such as `drop_path_rate`.
    Raises:
        UserError: there is no such encoder, or it takes other images.
    """
    torch.manual_seed(seed)
    if is_colour_baseline(encoder):
        return ColorBaseline(encoder.removeprefix(COLOUR_BASELINE), img_size, channels or 3)
    if is_named(encoder) and channels not in (None, 3):
        changes["in_chans"] = channels
    model = load_encoder(encoder, not random, checkpoint, img_size=img_size, num_classes=0, **changes)
    if not uses_gpu():
        set_attention(model, fused=False)
    if img_size is not None and isinstance(getattr(model, "patch_embed", None), PatchEmbed):  # others pad, or overlap
        check_grid(img_size, model.patch_embed.patch_size[0], "img_size")
    frozen = FrozenEncoder(model, img_size)
    check_channels(frozen, channels or frozen.channels)
    return frozen


def open_frozen_encoder(frozen: EncoderConfig, channels: int) -> FrozenEncoder | ColorBaseline:
    """Load the encoder that a command's settings name, for images of so many channels."""
    return load_frozen_encoder(
        frozen.encoder,
        frozen.checkpoint,
        random=frozen.random,
        img_size=frozen.img_size,
        seed=frozen.seed,
        channels=channels,
    )


def check_channels(encoder: FrozenEncoder, channels: int, setting: str = "encoder") -> None:
    """Raise UserError if an encoder takes images of another number of channels."""
    allowed = f"{channels}, as many as data.channels; a run's own data settings fit its encoder"
    require(encoder.channels == channels, f"{setting}'s input channels", encoder.channels, allowed)


def resolve_depths(depth: int | str, deepest: int) -> list[int]:
    """The depths that the setting `depth` means: a number from 1 to `deepest`, last, all or dev.

    Raises:
        Unavailable: a number that is none of these.
    """
    if depth == "last":
        return [deepest]
    if not isinstance(depth, int):
        return list(range(1, deepest + 1))
    if not 1 <= depth <= deepest:  # an encoder with fewer blocks
        raise Unavailable(f"depth is {depth}; it must be from 1 to {deepest}, last, all or dev")
    return [depth]


def patch_grid(model: nn.Module) -> tuple[int, int]:
    """Number of patches by height and width. Raises Unavailable if a model has none."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise Unavailable(f"{type(model).__name__} has no sequence of patches")
    return grid
