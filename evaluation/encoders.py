"""The contract through which evaluation sees an encoder: pixels in, features out, and what input it takes.

Vision Transformers, ResNets and hybrids of timm's satisfy it; nothing else here knows how they are built.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from mpp.config import check_grid, require
from mpp.encoder import Normalize, encoder_folder, set_attention
from mpp.hardware import uses_gpu
from mpp.metrics import patchify
from mpp.objectives import quantize

GRID = 8  # cells per side of the colour floors
Representation = Literal["class", "mean", "both"]


class FrozenEncoder(nn.Module):
    """An encoder that is only looked at.

    Args:
        model: timm's, without a head.
        img_size: side of the images it is shown; None: its own.
    """

    def __init__(self, model: nn.Module, img_size: int | None = None):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        takes = resolve_model_data_config(model)
        self.channels, self.img_size = takes["input_size"][0], img_size or takes["input_size"][-1]
        self.crop_pct = takes["crop_pct"]
        self.normalize = Normalize(takes["mean"], takes["std"])

    @property
    def stages(self) -> Sequence[nn.Module]:
        """What depth counts: the blocks of a ViT, the stages of a BiT ResNet; of other models there is only the end."""
        named = (getattr(self.model, name, None) for name in ("blocks", "stages"))
        return next((stages for stages in named if isinstance(stages, nn.Sequential | nn.ModuleList)), (self.model,))

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """Features after each depth.

        Args:
            images: (B, 3, S, S) uint8.
            representation: `class` token, `mean` over patches (or places of a feature map), or `both` side by side.
            depths: from 1; the last one is the encoder's output, after its final norm.
        Returns:
            (B, D) float32 for each depth.
        """
        last = len(self.stages)
        seen: dict[int, Tensor] = {}
        hooks = [
            self.stages[depth - 1].register_forward_hook(lambda _, args, out, depth=depth: seen.update({depth: out}))
            for depth in depths
            if depth != last
        ]
        try:
            output = self.model.forward_features(self.normalize(images))
        finally:
            for hook in hooks:
                hook.remove()
        seen[last] = output
        return [pool(self.model, seen[depth], representation, depth == last).float() for depth in depths]


def pool(model: nn.Module, tokens: Tensor, representation: Representation, normed: bool = True) -> Tensor:
    """Tokens to a feature of the image.

    Args:
        model: timm's, that they come from.
        tokens: (B, prefix + N, D), or a feature map (B, D, H, W).
        normed: whether they are the model's output: some models norm after pooling.
    Returns:
        (B, D), or (B, 2 D) for `both`.
    Raises:
        ValueError: a [class] token is asked for and there is none.
    """
    parts = []
    if representation in ("class", "both"):
        if not getattr(model, "has_class_token", False):
            raise ValueError(f"representation is {representation}, but this encoder has no [class] token; use mean")
        parts.append(tokens[:, 0])
    if representation in ("mean", "both"):
        if tokens.ndim == 4:
            places = (1, 2) if getattr(model, "output_fmt", "NCHW") == "NHWC" else (2, 3)
            parts.append(tokens.mean(places))
        else:
            parts.append(tokens[:, getattr(model, "num_prefix_tokens", 0) :].mean(1))
    if normed and hasattr(model, "fc_norm"):
        parts = [model.fc_norm(part) for part in parts]
    return torch.cat(parts, dim=-1)


class ColorFloor(nn.Module):
    """Features without a model, which pre-training has to beat: colour statistics of an 8 x 8 grid over the image.

    Args:
        kind: pixels: the mean colour of each cell (192 numbers); colors: how many cells have each of the 512 colours.
        img_size: side of the images, a multiple of 8.
    """

    stages = (None,)

    def __init__(self, kind: str, img_size: int | None):
        super().__init__()
        if kind not in ("pixels", "colors"):
            raise ValueError(f"encoder is floor:{kind}; it must be floor:pixels or floor:colors")
        self.kind, self.img_size, self.crop_pct = kind, img_size or 64, 0.875
        require(self.img_size % GRID == 0, "img_size", self.img_size, f"a multiple of {GRID}")

    def forward(self, images: Tensor, representation: Representation, depths: Sequence[int]) -> list[Tensor]:
        """As FrozenEncoder's; there is one depth and one representation."""
        cell = self.img_size // GRID
        sums = patchify(images, cell).sum((-2, -1), dtype=torch.int32)  # (B, 64, 3)
        if self.kind == "pixels":
            return [sums.flatten(1).float() / (255 * cell**2)]
        classes = quantize(sums, 255 * cell**2, bits=3)
        return [F.one_hot(classes, 512).sum(1).float()]


def load_frozen(
    encoder: str,
    checkpoint: str | None = None,
    random: bool = False,
    img_size: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> FrozenEncoder | ColorFloor:
    """The encoder of a run folder, an encoder folder, or a timm model name; or a floor.

    Args:
        encoder: a folder, or a timm name, which is randomly initialised unless `checkpoint` is given; or
            `floor:pixels` or `floor:colors`.
        checkpoint: local .safetensors file with the weights of a timm name.
        random: the architecture with random weights, whatever weights there are.
        img_size: another input size (ViTs resample their position embeddings).
        seed: of random weights.
        changes: other arguments of timm's that differ from the encoder's own, such as `drop_path_rate`.
    Raises:
        ValueError: nothing of that name, or an encoder of another sort of input.
    """
    torch.manual_seed(seed)
    if encoder.startswith("floor:"):
        return ColorFloor(encoder.removeprefix("floor:"), img_size)
    if Path(encoder).exists():
        if checkpoint:
            raise ValueError("checkpoint goes with the name of a timm model; a folder has its own weights")
        name, options = f"local-dir:{encoder_folder(Path(encoder))}", {"pretrained": not random}
    else:
        if not timm.is_model(encoder):
            raise ValueError(f"encoder is {encoder}: no folder of that name, and no model of timm's")
        if checkpoint and not (checkpoint.endswith(".safetensors") and Path(checkpoint).is_file()):
            raise ValueError(f"checkpoint is {checkpoint}; it must be a .safetensors file: other sorts can run code")
        name, options = encoder, {"pretrained": False}
        if checkpoint and not random:
            options = {"pretrained": True, "pretrained_cfg_overlay": {"file": checkpoint, "custom_load": False}}
    model = create(name, img_size, **options, **changes)
    if not uses_gpu():
        set_attention(model, fused=False)
    if hasattr(model, "patch_embed") and img_size is not None:
        check_grid(img_size, model.patch_embed.patch_size[0], "img_size")
    frozen = FrozenEncoder(model, img_size)
    require(frozen.channels == 3, "encoder's input channels", frozen.channels, "3: images are RGB here")
    return frozen


def create(name: str, img_size: int | None, **options: Any) -> nn.Module:
    """A timm model without a head; ViTs are built for `img_size`, convolutions take any."""
    sizes = [{}] if img_size is None else [{"img_size": img_size}, {}]  # timm's convolutional networks know no img_size
    for size in sizes:
        try:
            return timm.create_model(name, num_classes=0, **options, **size)
        except TypeError as error:
            reason: Exception = error
        except (AssertionError, RuntimeError, OSError, KeyError, ValueError, SafetensorError) as error:
            reason = error
            break
    raise ValueError(f"encoder is {name}, which cannot be loaded: {' '.join(str(reason).split())}") from reason
