"""Teachers: encoders whose features are predicted, frozen or the moving average of the encoder that learns.

A teacher sees the whole image, in eval mode and without gradients; the student sees only its corrupted version.

B images, N patches of the student's grid, K corrupted patches, D width of the teacher, d of its depths.
"""

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpp.config import Grid, ObjectiveConfig, check_grid, require
from mpp.corruption import Corruption
from mpp.errors import UserError, one_line
from mpp.models.encoder import Normalize, load_encoder
from mpp.models.plain import TIMM_ERRORS, cell_grid, gather_tokens, has_fused_attention, is_plain, set_attention
from mpp.objectives import Objective

OBJECTIVE_TEACHER = "objective.teacher"


class FeatureTeacher(nn.Module):
    """Features of an encoder for each patch of an uncorrupted image, as targets.

    Args:
        encoder: timm's; of a ViT the [class] token and registers are left out.
        normalize: of its input.
        grid: rows and columns of the student's patches. The teacher's are resampled to these, bilinearly: exact where
            both have the same grid.
        config: how many depths, and how their features become targets.
        img_size: height and width of the teacher's input; crops of another size are resized.
    Raises:
        UserError: an encoder that gives no features at the depths of the settings.
    """

    def __init__(
        self,
        encoder: nn.Module,
        normalize: Normalize,
        grid: Grid,
        config: ObjectiveConfig,
        img_size: Sequence[int],
    ):
        super().__init__()
        self.encoder = encoder.eval().requires_grad_(False)
        self.normalize = normalize
        self.grid = grid
        self.img_size = img_size
        self.target_norm = config.teacher_norm
        blocks = getattr(encoder, "blocks", None)
        half = 1 if blocks is None or config.frozen_teacher else max(1, len(blocks) // 2)
        self.depths = config.teacher_depths or half  # the number of the last blocks whose features are averaged
        self.token_step = 1  # from one whole patch of the grid to the next, in tokens; more where patches overlap
        if is_plain(encoder):
            self.token_step = cell_grid(encoder)[1] // encoder.patch_embed.feat_ratio()
        device = next(encoder.parameters()).device
        blank = torch.zeros(1, len(normalize.mean), *img_size, device=device)
        try:
            targets, _ = self(blank, blank.new_zeros(1, 1, dtype=torch.int64))
        except TIMM_ERRORS as error:
            settings = f"{OBJECTIVE_TEACHER} is {config.teacher} and objective.teacher_depths is {self.depths}"
            raise UserError(f"{settings}; it must be one that gives these features: {one_line(error)}") from error
        self.width = targets.shape[-1]

    def train(self, mode: bool = True) -> "FeatureTeacher":
        """Stay in eval mode, whatever the student's mode: without dropout and drop path."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Clean images (B, C, H, W) from 0 to 255 and positions (B, K) to targets, (B, K, D) float32.

        Returns:
            The targets, and features by which a collapse is seen: the targets, too, but normalised as `layer` where the
            targets are as `instance`, which enlarges differences however small they are.
        """
        maps = self.encoder.forward_intermediates(  # (B, D, h, w) after each depth
            self.normalize(resize_bilinear(images, self.img_size)),
            indices=self.depths,
            norm=self.depths == 1,
            output_fmt="NCHW",
            intermediates_only=True,
        )
        of_patches = [each[..., :: self.token_step, :: self.token_step].float() for each in maps]
        tokens = [resize_bilinear(each, self.grid).flatten(2).mT for each in of_patches]  # (B, N, D) of each depth
        if self.depths == 1 and hasattr(self.encoder, "fc_norm"):  # some encoders have their last norm there
            tokens = [self.encoder.fc_norm(each) for each in tokens]
        targets = gather_tokens(as_targets(tokens, self.target_norm), positions)
        if self.target_norm != "instance":
            return targets, targets
        return targets, gather_tokens(as_targets(tokens, "layer"), positions)


def resize_bilinear(values: Tensor, size: Sequence[int]) -> Tensor:
    """(B, C, h, w) at another height and width; unchanged where it has these."""
    if tuple(values.shape[-2:]) == tuple(size):
        return values
    return F.interpolate(values.float(), tuple(size), mode="bilinear", antialias=True)


def as_targets(tokens: list[Tensor], norm: str) -> Tensor:
    """Features (B, N, D) of each depth to targets (B, N, D): see `objective.teacher_norm`."""
    if norm == "layer":
        tokens = [F.layer_norm(each, each.shape[-1:]) for each in tokens]
    elif norm == "instance":
        tokens = [F.instance_norm(each.mT).mT for each in tokens]
    mean = torch.stack(tokens).mean(0)
    return mean if norm == "none" else F.layer_norm(mean, mean.shape[-1:])


class PredictedBatch(NamedTuple):
    """Predictions of a batch with their targets. B images, K corrupted patches."""

    predictions: Tensor
    """(B, K, outputs)."""
    targets: Tensor
    """(B, K, ...)."""
    collapse_features: Tensor | None = None
    """A teacher's features (B, K, D) that show a collapse (see `FeatureTeacher`); None: there is no teacher."""


def with_targets(outputs: Any, objective: Objective, images: Tensor, corruption: Corruption) -> PredictedBatch:
    """The output of a network for a batch; with the objective's targets, unless a teacher has computed them."""
    if isinstance(outputs, tuple):
        return outputs
    return PredictedBatch(outputs, objective.targets(images, corruption.positions))


class StudentWithTeacher(nn.Module):
    """A network that learns, and the teacher whose features it predicts.

    Args:
        student: of mpp/models/networks.py.
        teacher: the weights of a frozen teacher are no part of the state.
        config: which teacher it is, and which of both is exported.
    """

    def __init__(self, student: nn.Module, teacher: FeatureTeacher, config: ObjectiveConfig):
        super().__init__()
        self.student = student
        self.teacher = teacher
        predicted = f"its own moving average. This encoder is the {config.export}"
        if config.frozen_teacher:
            predicted = f"{config.teacher}, a frozen encoder"
        self.method = f"{student.method}. It predicted the features of {predicted}"
        self.on_top = f"{student.on_top}, a teacher"

    def forward(self, images: Tensor, corruption: Corruption) -> PredictedBatch:
        """Images (B, C, H, W) from 0 to 255 to predictions of the student and targets of the teacher."""
        predictions = self.student(images, corruption)
        return PredictedBatch(predictions, *self.teacher(images, corruption.positions))

    @property
    def encoder(self) -> nn.Module:
        """The encoder that learns."""
        return self.student.encoder

    @property
    def normalize(self) -> Normalize:
        """The normalisation of its input."""
        return self.student.normalize


def build_teacher(config: ObjectiveConfig, encoder: nn.Module, normalize: Normalize) -> FeatureTeacher:
    """The teacher of the settings. The weights of one that is frozen are no part of checkpoints.

    Args:
        encoder: the student's.
        normalize: of its input, which a moving average shares.
    Raises:
        UserError: no encoder there, or one of other channels.
    """
    grid, _ = cell_grid(encoder)
    if config.frozen_teacher is None:
        average = copy.deepcopy(encoder)
        average.set_grad_checkpointing(False)  # there is no backward pass
        return FeatureTeacher(average, normalize, grid, config, encoder.patch_embed.img_size)
    model = load_encoder(
        config.teacher,
        torch.get_default_device().type != "meta",
        config.teacher_checkpoint,
        setting=OBJECTIVE_TEACHER,
        img_size=config.teacher_img_size,
        num_classes=0,
    )
    set_attention(model, has_fused_attention(encoder))
    about = model.pretrained_cfg
    channels, *img_size = about["input_size"]
    require(channels == len(normalize.mean), f"{OBJECTIVE_TEACHER}'s input channels", channels, len(normalize.mean))
    if config.teacher_img_size and isinstance(getattr(model, "patch_embed", None), PatchEmbed):  # ignores the rest
        check_grid(img_size, model.patch_embed.patch_size[0], f"{OBJECTIVE_TEACHER}_img_size")
    teacher = FeatureTeacher(model, Normalize(about["mean"], about["std"]), grid, config, img_size)
    teacher.register_state_dict_post_hook(leave_out_teacher)
    teacher.register_load_state_dict_post_hook(allow_missing_teacher)
    return teacher


def leave_out_teacher(teacher: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Remove a frozen teacher's weights from a checkpoint's state."""
    for name in [*state]:
        if name.startswith(prefix):
            del state[name]


def allow_missing_teacher(teacher: nn.Module, keys: Any) -> None:
    """Count a frozen teacher's weights, which no checkpoint has, as not missing."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.startswith("teacher.")]


@torch.no_grad()
def update_moving_average(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """Move a teacher's weights towards the student's: decay * its own + (1 - decay) * the student's. Shards, too."""
    averages = [local_part(average) for average in teacher.parameters()]
    weights = [local_part(attrgetter(name)(student)) for name, _ in teacher.named_parameters()]  # with low-rank changes
    get_ema_multi_avg_fn(decay)(averages, weights, None)


def local_part(tensor: Tensor) -> Tensor:
    """A tensor, or this process's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moving_average_decay(half_life: tuple[float, float], step: int, steps: int) -> float:
    """Decay of the moving average in step `step` (from 0) of `steps`: 2 ** (-1 / half-life in steps).

    Args:
        half_life: at the first and at the last step: in steps or, below 1, as shares of all steps.
    """
    start, end = half_life
    now = start + (end - start) * step / max(1, steps - 1)
    return 0.5 ** (1 / (steps * now if start < 1 else now))
