"""Learning from a teacher through a token of its own: DeiT (Touvron et al., ICML 2021, arXiv 2012.12877).

The distillation token stands beside [class] and has a head beside the classifier. The classifier learns the labels, the
other head what the teacher says of the same crop. Where the model is judged, the softmaxes of both are averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.models import is_model_in_modules
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from evaluation.config import DistillConfig, Pooling
from evaluation.supervision.heads import HeadedEncoder
from mpp.config import ModelConfig, require
from mpp.features.frozen import pool
from mpp.models.encoder import architecture, build_encoder
from mpp.models.loading import load_weights
from mpp.models.timm_models import fix_positions, has_fused_attention, set_attention
from mpp.runtime.weights import weight_names, weights_file

DISTILLED = "deit_base_distilled_patch16_224"  # timm's ViT with a distillation token, built to other numbers
STUDENTS = ("vision_transformer", "deit")  # timm's modules that have plain ViTs
A_STUDENT = "a plain ViT with distill.teacher: a distillation token is given to no other"


def distillation_loss(
    outputs: Tensor, target: Tensor, taught: Tensor, config: DistillConfig, label_smoothing: float = 0.0
) -> Tensor:
    """The labels' and the teacher's parts together: (1 - w) CE(class, y) + w D(distilled, teacher).

    D is CE(distilled, arg max of the teacher) if hard; if soft, T^2 KL(softmax(teacher / T) || softmax(distilled / T)),
    the mean over images (DeiT, equations 2 and 3; its published code also divides by the number of classes).
    timm's TokenDistillationTask computes the same; it holds model and loop, so that only the formula is here.

    Args:
        outputs: logits of the classifier and of the distillation head, (B, 2, C).
        target: classes (B,) or shares of classes (B, C).
        taught: the teacher's logits, (B, C).
        label_smoothing: of the labels; what the teacher says is not smoothed.
    """
    of_class, of_teacher = outputs.unbind(1)
    labels = F.cross_entropy(of_class, target, label_smoothing=label_smoothing)
    if config.kind == "hard":
        teacher = F.cross_entropy(of_teacher, taught.argmax(-1))
    else:
        logs = [(logits / config.temperature).log_softmax(-1) for logits in (of_teacher, taught)]
        teacher = config.temperature**2 * F.kl_div(*logs, reduction="batchmean", log_target=True)
    return (1 - config.share) * labels + config.share * teacher


def averaged(outputs: Tensor) -> Tensor:
    """Logits of both heads (B, 2, C) to the logarithm of their mean probabilities (B, C)."""
    return outputs.log_softmax(-1).logsumexp(1) - math.log(outputs.shape[1])


class DistilledEncoder(HeadedEncoder):
    """An encoder with a distillation token: a classifier as in HeadedEncoder, and a head on that token.

    Args:
        encoder: timm's, without heads; its second token is the distillation token.
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
        parts = self.head(pool(self.encoder, tokens, self.pooling)), self.distill_head(tokens[:, 1])
        return torch.stack(parts, dim=1)


def build_student(config: ModelConfig, channels: int = 3) -> VisionTransformerDistilled:
    """The ViT for so many channels that the config describes with a distillation token, without heads.

    Of `model.init_from` everything is loaded as in pre-training. Where these weights have no distillation token, it and
    its position embedding start random.

    Raises:
        UserError: no such model, one that is not a plain ViT, weights that do not fit.
    """
    name, usual = config.name, ModelConfig()
    known = config.position in ("learned", "sincos_2d")
    require(known, "model.position", config.position, "learned or sincos_2d with distill.teacher")
    for key in ("position_at", "stride", "mixing", "arguments"):
        value, plain = getattr(config, key), getattr(usual, key)
        require(value == plain, f"model.{key}", value, f"{'null' if plain is None else plain} with distill.teacher")
    if name is not None and timm.is_model(name):
        name = name.replace("_distilled", "")  # timm has each of these without the token too
        require(is_model_in_modules(name, STUDENTS), "model.name", name, A_STUDENT)
    again = config.init_from is not None and has_token(Path(config.init_from))
    plain = build_encoder(replace(config, name=name, init_from=None if again else config.init_from), channels)
    student = with_token(plain, config)
    if again:
        load_weights(student, Path(config.init_from))
    if config.position == "sincos_2d":
        fix_positions(student)
    return student


def has_token(path: Path) -> bool:
    """Whether the weights at `path` (run folder, encoder folder or .safetensors file) have a distillation token."""
    setting = "model.init_from"
    return any(name.split(".")[-1] == "dist_token" for name in weight_names(weights_file(path, setting), setting))


def with_token(plain: VisionTransformer, config: ModelConfig) -> VisionTransformerDistilled:
    """An encoder with the weights of `plain`, which was built by `config`, and a distillation token.

    Raises:
        UserError: the encoder differs from timm's plain ViT in more than its numbers.
    """
    allowed = ("model.name", config.name, A_STUDENT)
    attention = getattr(plain.blocks[0], "attn", None)
    require(hasattr(attention, "num_heads"), *allowed)
    arguments = architecture(config)[1] | dict(
        img_size=plain.patch_embed.img_size,
        in_chans=plain.patch_embed.proj.in_channels,
        patch_size=plain.patch_embed.patch_size[0],
        embed_dim=plain.embed_dim,
        depth=len(plain.blocks),
        num_heads=attention.num_heads,
    )
    student = timm.create_model(DISTILLED, num_classes=0, **arguments)
    set_attention(student, has_fused_attention(plain))
    student.set_grad_checkpointing(config.activation_checkpointing)
    weights, own = plain.state_dict(), student.state_dict()
    require(parts_of(plain) == parts_of(student) and own.keys() ^ weights.keys() == {"dist_token"}, *allowed)
    positions = weights["pos_embed"]
    require(positions.shape[1] == own["pos_embed"].shape[1] - 1, *allowed)
    positions = torch.cat([positions[:, :1], own["pos_embed"][:, 1:2], positions[:, 1:]], dim=1)
    student.load_state_dict(weights | {"dist_token": own["dist_token"], "pos_embed": positions})
    return student


def parts_of(encoder: VisionTransformer) -> dict[str, str]:
    """The encoder's modules in words: of what kind and size, with which rates."""
    return {name: repr(part) for name, part in encoder.named_children() if name != "head_dist"}
