"""The contract through which evaluation sees an encoder: pixels in, features out, and what input it takes.

Vision Transformers, ResNets and hybrids of timm's satisfy it; nothing else here knows how they are built.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from evaluation.config import WhichEncoderConfig
from mpp.config import ObjectiveConfig, Representation, check_grid, require, sides
from mpp.errors import UserError
from mpp.features.frozen import features_at, stages
from mpp.models.descriptions import is_named
from mpp.models.encoder import Normalize, set_attention
from mpp.models.opening import create
from mpp.objectives import palette_for, sum_of
from mpp.runtime.hardware import uses_gpu

Size = tuple[int, int]  # height and width
GRID = 8  # cells per side of the colour floors


class FrozenEncoder(nn.Module):
    """An encoder that is only looked at.

    Args:
        model: timm's, without a head.
        img_size: side of the images it is shown, or height and width; None: its own.
    """

    def __init__(self, model: nn.Module, img_size: int | Size | None = None):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        data_config = resolve_model_data_config(model)
        self.channels, self.img_size = data_config["input_size"][0], sides(img_size or data_config["input_size"][1:])
        self.crop_pct = data_config["crop_pct"]
        self.normalize = Normalize(data_config["mean"], data_config["std"])

    @property
    def stages(self) -> Sequence[nn.Module]:
        """What depth counts."""
        return stages(self.model)

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """Features of images (B, C, H, W), from 0 to 255, after each depth, (B, D) float32: see `features_at`."""
        return features_at(self.model, self.normalize(images), depths, representation)


class ColorFloor(nn.Module):
    """Features without a model, which pre-training has to beat: colour statistics of an 8 x 8 grid over the image.

    Args:
        kind: pixels: the mean colour of each cell (of RGB 192 numbers); colors: how many cells have each of the colours
            of 3 bits a channel (of RGB 512), or each level of each channel where there are more than four channels.
        img_size: side of the images, a multiple of 8, or height and width; None: 64.
        channels: of the images.
    """

    stages = (None,)

    def __init__(self, kind: str, img_size: int | Size | None, channels: int = 3):
        super().__init__()
        self.palette = palette_for(ObjectiveConfig(), channels)
        if kind not in ("pixels", "colors"):
            raise UserError(f"encoder is floor:{kind}; it must be floor:pixels or floor:colors")
        self.kind, self.img_size, self.crop_pct = kind, sides(img_size or 64), 0.875
        require(all(side % GRID == 0 for side in self.img_size), "img_size", img_size, f"a multiple of {GRID}")

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """As FrozenEncoder's; there is one depth and one representation."""
        cells = rearrange(images, "b c (h p) (w q) -> b (h w) c p q", h=GRID, w=GRID)
        sums, most = sum_of(cells), 255 * cells[0, 0, 0].numel()  # (B, 64, C)
        if self.kind == "pixels":
            return [sums.flatten(1).float() / most]
        classes = self.palette.classify(sums, most)  # (B, 64, S)
        return [F.one_hot(classes, self.palette.classes).sum(1).flatten(1).float()]


def check_channels(encoder: FrozenEncoder, channels: int, key: str = "encoder") -> None:
    """Raise UserError where an encoder takes other images than these."""
    allowed = f"{channels}, as many as data.channels; a run's own data settings suit its encoder"
    require(encoder.channels == channels, f"{key}'s input channels", encoder.channels, allowed)


def load_frozen(
    encoder: str,
    checkpoint: str | None = None,
    random: bool = False,
    img_size: int | Size | None = None,
    seed: int = 0,
    channels: int | None = None,
    **changes: Any,
) -> FrozenEncoder | ColorFloor:
    """The encoder of a run folder, an encoder folder, or a timm model name; or a floor.

    Args:
        encoder: a folder, hf-hub:NAME, or a timm name, whose published weights are downloaded; or `floor:pixels` or
            `floor:colors`.
        checkpoint: local .safetensors file with the weights of a timm name, in place of those.
        random: the architecture with random weights, whatever weights there are.
        img_size: another input size (ViTs resample their position embeddings).
        seed: of random weights.
        channels: of the images; None: those that the encoder takes.
        changes: other arguments of timm's that differ from the encoder's own, such as `drop_path_rate`.
    Raises:
        UserError: nothing of that name, or an encoder of another sort of input.
    """
    torch.manual_seed(seed)
    if encoder.startswith("floor:"):
        return ColorFloor(encoder.removeprefix("floor:"), img_size, channels or 3)
    options = {"in_chans": channels} if is_named(encoder) and channels not in (None, 3) else {}
    model = create(encoder, img_size, not random, checkpoint, **options, **changes)
    if not uses_gpu():
        set_attention(model, fused=False)
    if hasattr(model, "patch_embed") and img_size is not None:
        check_grid(img_size, model.patch_embed.patch_size[0], "img_size")
    frozen = FrozenEncoder(model, img_size)
    check_channels(frozen, channels or frozen.channels)
    return frozen


def encoder_of(config: WhichEncoderConfig) -> FrozenEncoder | ColorFloor:
    """The encoder that a command's config names, for its images."""
    which = (config.encoder, config.checkpoint, config.random, config.img_size, config.seed)
    return load_frozen(*which, config.data.channels)


def depths_asked(depth: int | str, deepest: int) -> list[int]:
    """The depths that `depth` means: a number from 1 to `deepest`, last, all or dev.

    Raises:
        UserError: a number that is none of these.
    """
    if not isinstance(depth, int):
        return [deepest] if depth == "last" else list(range(1, deepest + 1))
    require(1 <= depth <= deepest, "depth", depth, f"from 1 to {deepest}, last, all or dev")
    return [depth]


class Unavailable(ValueError):
    """An encoder does not have what a picture shows; the message says what it lacks."""


def model_of(encoder: FrozenEncoder | ColorFloor) -> nn.Module:
    """timm's model; a floor has none."""
    if isinstance(encoder, ColorFloor):
        raise Unavailable("a floor has no weights")
    return encoder.model


def grid_of(model: nn.Module) -> tuple[int, int]:
    """Patches by height and width."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise Unavailable(f"{type(model).__name__} has no sequence of patches")
    return grid
