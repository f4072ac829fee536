"""Distillation through a token: DeiT (Touvron et al., ICML 2021, arXiv 2012.12877).

The distillation token follows [class] and has a head of its own. The classifier learns the labels, the other head the
teacher's prediction for the same crop. Predictions are the mean of the softmaxes of both heads.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import timm
import torch
import torch.nn.functional as F
from timm.models import is_model_in_modules
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from evaluation.config import DistillConfig, Pooling
from evaluation.supervision.heads import HeadedEncoder, require_defaults
from mpp.config import ModelConfig, require
from mpp.features.frozen import pool
from mpp.models.descriptions import first_weights
from mpp.models.encoder import architecture, build_encoder, load_first_weights
from mpp.models.plain import (
    fix_positions,
    has_bf16_residual,
    has_fused_attention,
    set_attention,
    use_bf16_residual,
)
from mpp.runtime.weights import weight_names

DISTILLED_VIT = "deit_base_distilled_patch16_224"
"""timm's ViT with a distillation token, built to other numbers."""
PLAIN_VIT_MODULES = ("vision_transformer", "deit")
"""timm's modules that have plain ViTs."""
PLAIN_VITS = "a plain ViT with distill.teacher: other models have no distillation token"


def distillation_loss(
    outputs: Tensor, target: Tensor, taught: Tensor, config: DistillConfig, label_smoothing: float = 0.0
) -> Tensor:
    """The labels' and the teacher's parts together: (1 - w) CE(class, y) + w D(distilled, teacher).

    D is CE(distilled, arg max of the teacher) if hard; if soft, T^2 KL(softmax(teacher / T) || softmax(distilled / T)),
    the mean over images (DeiT, equations 2 and 3; its published code also divides by the number of classes).
    timm's TokenDistillationTask computes the same; it holds model and loop, so only the formula is here.

    Args:
        outputs: logits of the classifier and of the distillation head, (B, 2, C).
        target: classes (B,) or shares of classes (B, C).
        taught: the teacher's logits, (B, C).
        label_smoothing: of the labels; the teacher's predictions are not smoothed.
    """
    class_logits, distilled_logits = outputs.unbind(1)
    of_labels = F.cross_entropy(class_logits, target, label_smoothing=label_smoothing)
    if config.kind == "hard":
        of_teacher = F.cross_entropy(distilled_logits, taught.argmax(-1))
    else:
        temperature = config.temperature
        student = (distilled_logits / temperature).log_softmax(-1)
        teacher = (taught / temperature).log_softmax(-1)
        of_teacher = temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return (1 - config.share) * of_labels + config.share * of_teacher


def average_heads(outputs: Tensor) -> Tensor:
    """Logits of both heads (B, 2, C) to the logarithm of their mean probabilities (B, C)."""
    return outputs.log_softmax(-1).logsumexp(1) - math.log(outputs.shape[1])


class DistilledEncoder(HeadedEncoder):
    """An encoder with a distillation token: a classifier as in HeadedEncoder, and a head on that token.

    Args:
        encoder: a timm model without heads; its second token is the distillation token.
        head, distill_head: (B, D) to (B, C) each.
        pooling, mean, std: see HeadedEncoder.
    """

    def __init__(
        self,
        encoder: VisionTransformerDistilled,
        head: nn.Module,
        distill_head: nn.Module,
        pooling: Pooling,
        mean: Sequence[float],
        std: Sequence[float],
    ):
        super().__init__(encoder, head, pooling, mean, std)
        self.distill_head = distill_head

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) to the logits of both heads, (B, 2, classes)."""
        tokens = self.encoder.forward_features(self.normalize(images))
        class_logits = self.head(pool(self.encoder, tokens, self.pooling))
        distilled_logits = self.distill_head(tokens[:, 1])
        return torch.stack([class_logits, distilled_logits], dim=1)


def build_student(config: ModelConfig, channels: int = 3) -> VisionTransformerDistilled:
    """Build the ViT that the settings describe with a distillation token, without heads.

    All weights of `model.init_from` are loaded as in pre-training. If these have no distillation token, the token and
    its position embedding start random.

    Raises:
        UserError: no such model, one that is not a plain ViT, weights that do not fit.
    """
    check_student(config)
    name = config.name
    if name is not None and timm.is_model(name):
        name = name.replace("_distilled", "")  # timm has each of these without the token too
        require(is_model_in_modules(name, PLAIN_VIT_MODULES), "model.name", name, PLAIN_VITS)
    if config.init_from is None or not has_distillation_token(config.init_from):
        student = add_distillation_token(build_encoder(replace(config, name=name), channels), config)
    else:
        plain = build_encoder(replace(config, name=name, init_from=None), channels)
        student = add_distillation_token(plain, config)
        load_first_weights(student, config.init_from)
    if config.position == "sincos_2d":
        fix_positions(student)
    return student


def check_student(config: ModelConfig) -> None:
    """Raise UserError where a setting describes a ViT that timm has no distillation token for."""
    position = config.position
    has_table = position in ("learned", "sincos_2d")
    require(has_table, "model.position", position, "learned or sincos_2d with distill.teacher")
    require_defaults(config, ("position_at", "stride", "mixing", "arguments"), "distill.teacher")


def has_distillation_token(source: str) -> bool:
    """Whether the weights that `model.init_from` names have a distillation token."""
    names = weight_names(first_weights(source), "model.init_from")
    return any(name.split(".")[-1] == "dist_token" for name in names)


def add_distillation_token(plain: VisionTransformer, config: ModelConfig) -> VisionTransformerDistilled:
    """An encoder with the weights of `plain`, which was built by `config`, and a distillation token.

    Raises:
        UserError: the encoder differs from timm's plain ViT in more than its numbers.
    """
    refusal = ("model.name", config.name, PLAIN_VITS)
    attention = getattr(plain.blocks[0], "attn", None)
    require(hasattr(attention, "num_heads"), *refusal)
    _, arguments = architecture(config)
    arguments |= dict(
        img_size=plain.patch_embed.img_size,
        in_chans=plain.patch_embed.proj.in_channels,
        patch_size=plain.patch_embed.patch_size[0],
        embed_dim=plain.embed_dim,
        depth=len(plain.blocks),
        num_heads=attention.num_heads,
    )
    student = timm.create_model(DISTILLED_VIT, num_classes=0, **arguments)
    set_attention(student, has_fused_attention(plain))
    if has_bf16_residual(plain):
        use_bf16_residual(student)
    student.set_grad_checkpointing(config.activation_checkpointing)
    require(describe_modules(plain) == describe_modules(student), *refusal)
    weights, random = plain.state_dict(), student.state_dict()
    require(random.keys() ^ weights.keys() == {"dist_token"}, *refusal)
    positions, with_token = weights["pos_embed"], random["pos_embed"]
    require(positions.shape[1] == with_token.shape[1] - 1, *refusal)
    positions = torch.cat([positions[:, :1], with_token[:, 1:2], positions[:, 1:]], dim=1)
    student.load_state_dict(weights | {"dist_token": random["dist_token"], "pos_embed": positions})
    return student


def describe_modules(encoder: VisionTransformer) -> dict[str, str]:
    """The encoder's modules in words: their kinds, sizes and rates."""
    return {name: repr(module) for name, module in encoder.named_children() if name != "head_dist"}
