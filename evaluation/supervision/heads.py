"""What is trained here: an encoder of timm's with a head on it."""

from collections.abc import Sequence
from typing import Any

import timm
from accelerate import Accelerator
from timm.layers import convert_sync_batchnorm
from timm.models import is_model_in_modules
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evaluation.config import HeadKind, Pooling
from mpp.config import ModelConfig, require, sides
from mpp.features.frozen import pool
from mpp.models.encoder import Normalize, build_encoder, load_encoder
from mpp.models.timm_models import checkpoint_activations, has_class

VITS = ("vision_transformer", "vision_transformer_hybrid")


class HeadedEncoder(nn.Module):
    """An encoder and a head on its [class] token or on the mean over its patches.

    Args:
        encoder: timm's, without a head.
        head: (B, D) to (B, outputs).
        pooling: auto: the [class] token where there is one.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, pooling: Pooling, mean: Sequence[float], std: Sequence[float]
    ):
        super().__init__()
        self.normalize, self.encoder, self.head = Normalize(mean, std), encoder, head
        auto = "class" if has_class(encoder) else "mean"
        self.pooling = auto if pooling == "auto" else pooling

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) from 0 to 255 to what the head says, such as logits: (B, outputs)."""
        tokens = self.encoder.forward_features(self.normalize(images))
        return self.head(pool(self.encoder, tokens, self.pooling))


def build_backbone(config: ModelConfig, channels: int = 3) -> tuple[nn.Module, tuple[int, int]]:
    """A ViT or hybrid as in pre-training, or another model of timm's; and height and width of the images it takes."""
    if config.name is None or not timm.is_model(config.name) or is_model_in_modules(config.name, VITS):
        encoder = build_encoder(config, channels)
        return encoder, encoder.patch_embed.img_size
    for name in ("width", "depth", "heads", "patch_size", "init_from"):
        require(getattr(config, name) is None, f"model.{name}", getattr(config, name), f"null with {config.name}")
    for name in ("dropout", "drop_path"):
        require(getattr(config, name) == 0, f"model.{name}", getattr(config, name), f"0 with {config.name}")
    for name in ("position", "position_at", "stride", "mixing", "arguments", "attention"):
        value, usual = getattr(config, name), getattr(ModelConfig(), name)
        require(value == usual, f"model.{name}", value, f"{'null' if usual is None else usual} with {config.name}")
    encoder = load_encoder(
        config.name, pretrained=False, setting="model.name", img_size=config.img_size, in_chans=channels, num_classes=0
    )
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    return encoder, sides(config.img_size or encoder.pretrained_cfg["input_size"][1:])


def synchronized(encoder: nn.Module, name: str | None, accelerator: Accelerator) -> nn.Module:
    """An encoder whose batch norms take their statistics over the images of all processes.

    Args:
        encoder: timm's.
        name: its name, for the message.
    Raises:
        UserError: several processes on CPUs, for which torch has no such batch norm.
    """
    has_batch_norm = any(isinstance(part, _BatchNorm) for part in encoder.modules())
    if accelerator.num_processes == 1 or not has_batch_norm:
        return encoder
    allowed = "a model without batch norms on several processes of CPUs, which cannot synchronise them; or start one"
    require(accelerator.device.type != "cpu", "model.name", name, allowed)
    return convert_sync_batchnorm(encoder)


def build_head(kind: HeadKind, width: int, classes: int) -> nn.Module:
    """A classifier, (B, width) to (B, classes); its last layer starts at zero."""
    if kind == "linear":
        return zero_head(width, classes)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), zero_head(width, classes))


def zero_head(width: int, classes: int) -> nn.Linear:
    """One linear layer that starts by knowing nothing: uniform predictions (paper, section 3.2)."""
    head: Any = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
