"""Distillation through a token: DeiT (Touvron et al., ICML 2021, arXiv 2012.12877).

The distillation token follows [class] and has a head of its own. The classifier learns the labels, the other head the
teacher's prediction for the same crop. Predictions are the mean of the softmaxes of both heads.
"""

import math
from dataclasses import replace

import timm
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor

from evaluation.config import DistillConfig
from evaluation.supervision.learners import require_defaults
from mpp.config import ModelConfig, require
from mpp.models.descriptions import first_weights
from mpp.models.encoder import architecture, build_encoder, load_first_weights
from mpp.models.plain import fix_positions, has_fused_attention, set_attention, use_bf16_residual
from mpp.runtime.weights import weight_names

DISTILLED_VIT = "deit_base_distilled_patch16_224"
"""timm's ViT with a distillation token, built to other numbers."""


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
    """Logits of both heads (B, 2, C) to the logarithm of their mean probabilities (B, C); those of one as they are."""
    if outputs.ndim == 2:
        return outputs
    return outputs.log_softmax(-1).logsumexp(1) - math.log(outputs.shape[1])


def build_student(config: ModelConfig, channels: int = 3) -> VisionTransformerDistilled:
    """Build the plain ViT that the settings describe with a distillation token, without heads.

    All weights of `model.init_from` are loaded as in pre-training. If these have no distillation token, the token and
    its position embedding start random.

    Raises:
        UserError: another model than a ViT of five numbers, or weights that do not fit.
    """
    require_defaults(config, ("name", "position_at", "stride", "mixing", "arguments"), "distill.teacher")
    has_table = config.position in ("learned", "sincos_2d")
    require(has_table, "model.position", config.position, "learned or sincos_2d with distill.teacher")
    source = config.init_from
    has_token = source and "dist_token" in weight_names(first_weights(source), "model.init_from")
    plain = build_encoder(replace(config, init_from=None) if has_token else config, channels)
    _, arguments = architecture(config)
    student = timm.create_model(DISTILLED_VIT, num_classes=0, in_chans=channels, **arguments)
    set_attention(student, has_fused_attention(plain))
    if config.residual == "bf16":
        use_bf16_residual(student)
    student.set_grad_checkpointing(config.activation_checkpointing)
    weights, random = plain.state_dict(), student.state_dict()
    positions = weights["pos_embed"]
    positions = torch.cat([positions[:, :1], random["pos_embed"][:, 1:2], positions[:, 1:]], dim=1)
    student.load_state_dict(weights | {"dist_token": random["dist_token"], "pos_embed": positions})
    if has_token:
        load_first_weights(student, source)
    if config.position == "sincos_2d":
        fix_positions(student)
    return student
