"""An encoder with a head on it: the network that supervised, fine-tuning and contrastive training train."""

from collections.abc import Sequence

import timm
import torch
from accelerate import Accelerator
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evaluation.config import HeadKind, Pooling
from mpp.config import ImageSize, ModelConfig, require, sides
from mpp.features.frozen import pool
from mpp.models.encoder import SET_ELSEWHERE, Normalize, build_encoder, load_encoder
from mpp.models.plain import checkpoint_activations, has_class, is_plain, model_without_memory
from mpp.runtime.hardware import uses_gpu


class HeadedEncoder(nn.Module):
    """An encoder and a head on its [class] token or on the mean over its patches.

    Args:
        head: (B, D) to (B, outputs).
        pooling: auto: the [class] token where there is one.
        mean, std: of the input's channels, for pixels scaled to [0, 1].
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Module, pooling: Pooling, mean: Sequence[float], std: Sequence[float]
    ):
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.encoder = encoder
        self.head = head
        if pooling == "auto":
            pooling = "class" if has_class(encoder) else "mean"
        self.pooling = pooling

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) from 0 to 255 to the outputs of the head, such as logits: (B, outputs)."""
        tokens = self.encoder.forward_features(self.normalize(images))
        return self.head(pool(self.encoder, tokens, self.pooling))


def build_backbone(config: ModelConfig, channels: int = 3) -> tuple[nn.Module, ImageSize]:
    """Build the encoder that the settings describe: a plain transformer as in pre-training, or another timm model.

    Returns:
        The encoder, and height and width of the images that it takes.
    Raises:
        UserError: see `build_encoder`; settings that another model does not have.
    """
    name = config.name
    if name is None or not timm.is_model(name) or is_plain(model_without_memory(name)):
        encoder = build_encoder(config, channels)
        return encoder, encoder.patch_embed.img_size
    refuse_vit_settings(config)
    arguments = config.arguments or {}
    for argument in arguments:
        allowed = "an argument of this timm model that has no setting of its own"
        require(argument not in SET_ELSEWHERE | {"img_size"}, "model.arguments", argument, allowed)
    setting = f"model.arguments is {arguments}: model.name" if arguments else "model.name"
    sizes = dict(img_size=config.img_size, in_chans=channels, num_classes=0)
    encoder = load_encoder(name, pretrained=False, setting=setting, **arguments, **sizes)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    if uses_gpu():
        encoder = encoder.to(memory_format=torch.channels_last)  # in which tensor cores convolve
    return encoder, sides(config.img_size or encoder.pretrained_cfg["input_size"][1:])


def refuse_vit_settings(config: ModelConfig) -> None:
    """Raise UserError where a setting of Vision Transformers is given with the name of another model."""
    numbers = ("width", "depth", "heads", "patch_size", "init_from", "dropout", "drop_path")
    kinds = ("position", "position_at", "stride", "mixing", "attention", "residual")
    require_defaults(config, (*numbers, *kinds), str(config.name))


def require_defaults(config: ModelConfig, settings: Sequence[str], condition: str) -> None:
    """Raise UserError where one of these settings differs from its default, which `condition` asks for."""
    default = ModelConfig()
    for setting in settings:
        value = getattr(config, setting)
        usual = getattr(default, setting)
        allowed = usual or ("null" if usual is None else 0)
        require(value == usual, f"model.{setting}", value, f"{allowed} with {condition}")


def synchronize_batch_norms(encoder: nn.Module, name: str | None, accelerator: Accelerator) -> nn.Module:
    """The encoder with batch norms that take their statistics over the images of all processes.

    Args:
        name: name of the timm model, for the message.
    Raises:
        UserError: several processes on CPUs, for which torch has no such batch norm.
    """
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in encoder.modules())
    if accelerator.num_processes == 1 or not has_batch_norm:
        return encoder
    allowed = (
        "a model without batch norms on several processes of CPUs, which cannot synchronise them; or start one process"
    )
    require(accelerator.device.type != "cpu", "model.name", name, allowed)
    return convert_sync_batchnorm(encoder)


def build_head(kind: HeadKind, width: int, classes: int) -> nn.Module:
    """A classifier, (B, width) to (B, classes); its last layer starts at zero."""
    if kind == "linear":
        return zero_head(width, classes)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), zero_head(width, classes))


def zero_head(width: int, classes: int) -> nn.Linear:
    """A linear layer that starts at zero, with uniform predictions (paper, section 3.2)."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
