"""Networks with a head, and the kinds of label that a head learns: one class, several classes, or a number.

A distilled student (DeiT: Touvron et al., ICML 2021, arXiv 2012.12877) has a distillation token behind [class], with a
head of its own, which learns a teacher's prediction for the same crop. It predicts by the mean of both softmaxes.

N training images, M test images, B images of a batch, D width, C classes.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from evaluation.config import DistillConfig, HeadConfig, HeadKind, NumberLoss, Pooling
from evaluation.frozen.features import LabelledSplits, label_problem
from mpp.config import ImageSize, ModelConfig, changed_settings, require, sides
from mpp.errors import UserError
from mpp.features.frozen import pool
from mpp.models.encoder import SET_ELSEWHERE, Normalize, build_encoder, load_encoder, with_architecture
from mpp.models.plain import checkpoint_activations, has_class, is_plain, model_without_memory, set_pooling

OF_VITS = ("width", "depth", "heads", "patch_size", "init_from", "dropout", "drop_path", "position", "position_at")
OF_VITS += ("stride", "mixing", "attention", "residual")
"""Settings of the model that other networks than Vision Transformers do not have."""
DISTILLED_VIT = "deit_base_distilled_patch16_224"
"""timm's ViT with a distillation token, built to other numbers."""
NUMBER_LOSSES = {"l2": F.mse_loss, "l1": F.l1_loss}


# --- networks ---


class HeadedEncoder(nn.Module):
    """An encoder and a head on its [class] token or on the mean over its patches, and perhaps one on another token.

    Args:
        normalize: of the encoder's input.
        pooling: auto: the [class] token where there is one.
        head: (B, D) to (B, outputs).
        distill_head: of a distilled student, on its distillation token.
    """

    def __init__(
        self,
        encoder: nn.Module,
        normalize: Normalize,
        pooling: Pooling,
        head: nn.Module,
        distill_head: nn.Module | None = None,
    ):
        super().__init__()
        self.normalize = normalize
        self.encoder = encoder
        self.head = head
        self.distill_head = distill_head
        if pooling == "auto":
            pooling = "class" if has_class(encoder) else "mean"
        self.pooling = pooling

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) from 0 to 255 to the outputs of the head, (B, outputs), or of both heads, (B, 2, outputs)."""
        tokens = self.encoder.forward_features(self.normalize(images))
        outputs = self.head(pool(self.encoder, tokens, self.pooling))
        if self.distill_head is None:
            return outputs
        return torch.stack([outputs, self.distill_head(tokens[:, 1])], dim=1)


def add_head(
    encoder: nn.Module, normalize: Normalize, config: HeadConfig, learner: "Learner", is_distilled: bool = False
) -> HeadedEncoder:
    """An encoder with a new head for what a learner learns, or with two heads if it is a distilled student."""
    width = encoder.head_hidden_size
    heads = [learner.complete(build_head(config.kind, width, learner.outputs)) for _ in range(1 + is_distilled)]
    return HeadedEncoder(encoder, normalize, config.pooling, *heads)


@torch.no_grad()
def as_timm_classifier(model: HeadedEncoder, linear: nn.Linear, img_size: ImageSize) -> HeadedEncoder | None:
    """A copy whose encoder has this layer as its head; None: timm has another head there, or pools otherwise."""
    whole = copy.deepcopy(model)
    set_pooling(whole.encoder, whole.pooling, linear.out_features)
    head = whole.encoder.get_classifier()
    if not isinstance(head, nn.Linear | nn.Conv2d):  # such as DeiT's two
        return None
    head.load_state_dict({"weight": linear.weight.view_as(head.weight), "bias": linear.bias})
    shape = 2, len(model.normalize.mean), *img_size  # of one image, some norms have no statistics
    pixels = torch.linspace(-1, 1, math.prod(shape), device=linear.weight.device).view(shape)
    expected = linear(pool(model.encoder, model.encoder.forward_features(pixels), model.pooling))
    return whole if torch.allclose(whole.encoder(pixels), expected, rtol=1e-3, atol=1e-3) else None


def build_backbone(config: ModelConfig, channels: int = 3, is_distilled: bool = False) -> tuple[nn.Module, ImageSize]:
    """Build the encoder that the settings describe: a plain transformer as in pre-training, or another timm model.

    Args:
        is_distilled: build a student: see `build_student`.
    Returns:
        The encoder, and height and width of the images that it takes.
    Raises:
        UserError: see `build_encoder`; settings that another model does not have.
    """
    name = config.name
    if is_distilled or name is None or not timm.is_model(name) or is_plain(model_without_memory(name)):
        encoder = (build_student if is_distilled else build_encoder)(config, channels)
        return encoder, encoder.patch_embed.img_size
    require_defaults(config, OF_VITS, name)
    arguments = config.arguments or {}
    taken = sorted({*SET_ELSEWHERE, "img_size"}.intersection(arguments))
    require(not taken, "model.arguments", ", ".join(taken), "arguments of this timm model that have no setting")
    sizes = dict(img_size=config.img_size, in_chans=channels, num_classes=0)
    encoder = load_encoder(name, pretrained=False, setting="model.name", **arguments, **sizes)
    if config.activation_checkpointing:
        checkpoint_activations(encoder, "model.activation_checkpointing")
    return encoder, sides(config.img_size or encoder.pretrained_cfg["input_size"][1:])


def require_defaults(config: ModelConfig, settings: Sequence[str], condition: str) -> None:
    """Raise UserError where one of these settings differs from its default, which `condition` asks for."""
    for name, value in changed_settings(config).items():
        require(name not in settings, f"model.{name}", value, f"left out with {condition}")


def build_student(config: ModelConfig, channels: int = 3) -> VisionTransformerDistilled:
    """Build the plain ViT that the settings describe with a distillation token, without heads.

    Weights of `model.init_from` are loaded as in pre-training. The distillation token and its position embedding start
    random.

    Raises:
        UserError: another model than a ViT of five numbers, or weights that do not fit.
    """
    config = with_architecture(config)
    require_defaults(config, ("name", "position_at", "stride", "mixing", "arguments"), "distill.teacher")
    has_table = config.position in ("learned", "sincos_2d")
    require(has_table, "model.position", config.position, "learned or sincos_2d with distill.teacher")
    plain = build_encoder(config, channels)
    student = build_encoder(replace(config, name=DISTILLED_VIT, init_from=None), channels)
    weights, random = plain.state_dict(), student.state_dict()
    positions = weights["pos_embed"]
    positions = torch.cat([positions[:, :1], random["pos_embed"][:, 1:2], positions[:, 1:]], dim=1)
    student.load_state_dict(weights | {"dist_token": random["dist_token"], "pos_embed": positions})
    return student


# --- heads ---


def build_head(kind: HeadKind, width: int, outputs: int) -> nn.Module:
    """A classifier, (B, width) to (B, outputs); its last layer starts at zero."""
    if kind == "linear":
        return zero_head(width, outputs)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), zero_head(width, outputs))


def zero_head(width: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero, with uniform predictions (paper, section 3.2)."""
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Rescale(nn.Module):
    """From deviations to the unit of the labels: x * std + mean, in float32.

    Args:
        mean, std: of the training images' labels.
    """

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.float() * self.std + self.mean


def average_heads(outputs: Tensor) -> Tensor:
    """Logits of both heads (B, 2, C) to the logarithm of their mean probabilities (B, C); those of one as they are."""
    if outputs.ndim == 2:
        return outputs
    return outputs.log_softmax(-1).logsumexp(1) - math.log(outputs.shape[1])


# --- what heads learn ---


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


class Learner:
    """A kind of label as a head learns it; its subclasses are the kinds, which have:

    - meaning: of a head's outputs, for users of an exported file.
    - loss(outputs, targets, smoothing) -> Tensor: the mean loss of a head's outputs (B, outputs); label smoothing is of
      one class.
    - predict(outputs) -> Tensor: a head's outputs (M, outputs) as predictions (M, ...) that the kind measures.

    Args:
        targets: (N, ...) of the training images; every image has one.
        outputs: of a head.
        loss: of numbers.
    """

    mean, std = 0.0, 1.0
    """A head predicts deviations, and is completed by their conversion to the unit of the labels."""

    def __init__(self, targets: NDArray, outputs: int, loss: NumberLoss):
        self.outputs = outputs

    def complete(self, layer: nn.Module) -> nn.Module:
        """A head: a layer, (B, D) to (B, outputs), with the conversion of its outputs to the unit of the labels."""
        return layer

    @torch.no_grad()
    def merge(self, layer: nn.Linear) -> nn.Linear:
        """The same head as one layer."""
        layer.weight.mul_(self.std)
        layer.bias.mul_(self.std).add_(self.mean)
        return layer


class ClassLearner(Learner):
    """One class, (N,) int64: cross-entropy of the softmax."""

    meaning = "logits; their softmax has the probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        if targets.ndim > 1 and not targets.is_floating_point():
            targets = targets[:, 0]  # of several right ones the first
        return F.cross_entropy(outputs, targets, label_smoothing=smoothing)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)


class SeveralLearner(Learner):
    """Several classes, (N, C) of 0 and 1: the sum of binary cross-entropies, as of C logistic regressions."""

    meaning = "logits; the sigmoid of each is the probability of its class"

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="sum") / len(targets)

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.double().sigmoid()  # in 32 bits all logits above 17 would be 1, and rank alike


class NumberLearner(Learner):
    """A number, (N,) float64: squared (l2) or absolute (l1) error, in deviations of the training images' labels."""

    meaning = "the number, in the unit of the labels"

    def __init__(self, targets: NDArray, outputs: int, loss: NumberLoss):
        super().__init__(targets, 1, loss)
        self.error = NUMBER_LOSSES[loss]
        self.mean, self.std = float(targets.mean()), float(targets.std()) or 1.0  # part of them may be all equal

    def complete(self, layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, Rescale(self.mean, self.std))

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        deviations = (self.predict(outputs) - self.mean) / self.std
        return self.error(deviations, ((targets - self.mean) / self.std).float())

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1).float()


LEARNERS: dict[str, type[Learner]] = {"class": ClassLearner, "several": SeveralLearner, "number": NumberLearner}
"""By kind of label."""


def learner_of(kind: str, targets: NDArray, classes: int, loss: NumberLoss = "l2") -> Learner:
    """The learner of a kind of label, by the training images' labels."""
    return LEARNERS[kind](targets, classes, loss)


def number_of_classes(splits: LabelledSplits) -> int:
    """C: of one class an image the largest label of any split, plus one; of numbers 0."""
    train = splits.train
    problem = label_problem(train.label_kind, train.labels, "train")
    if problem is not None:
        raise UserError(problem)
    if train.label_kind != "class":
        return len(train.class_names)
    return 1 + max(int(split.labels.max()) for split in splits if split)
