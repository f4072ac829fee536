"""Teachers: encoders whose features are predicted, frozen or the moving average of the encoder that learns.

A teacher sees the whole image, in eval mode and without gradients. What it sees is no input of the student.

B images, N patches of the student's grid, K corrupted patches, D width of the teacher, d of its depths.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mpp.config import Grid, ImageSize, ObjectiveConfig, check_grid, require, sides
from mpp.corruption import Corruption
from mpp.errors import UserError, one_line
from mpp.models.attention import take
from mpp.models.encoder import Normalize, load_encoder
from mpp.models.timm_models import cell_grid, has_fused_attention, set_attention
from mpp.models.vit import OverlappingPatchEmbed

SETTING = "objective.teacher"
EXPORTED = {"student": "one that was trained", "teacher": "moving average"}


class FeatureTeacher(nn.Module):
    """What an encoder makes of each patch of an image that is not corrupted.

    Args:
        encoder: timm's; of a ViT the [class] token and registers are left out.
        normalize: of its input.
        grid: rows and columns of the student's patches. The teacher's are resampled to these, bilinearly: exact where
            both have the same grid.
        config: which depths, and how their features become targets.
        img_size: height and width that it sees crops at, resized where they have others.
    Raises:
        UserError: an encoder that gives no features at the depths that are asked for.
    """

    def __init__(
        self,
        encoder: nn.Module,
        normalize: Normalize,
        grid: Grid,
        config: ObjectiveConfig,
        img_size: ImageSize,
    ):
        super().__init__()
        self.encoder = encoder.eval().requires_grad_(False)
        self.normalize, self.grid, self.img_size, self.kind = normalize, grid, img_size, config.teacher_norm
        self.depths = depths_of(encoder, config)
        embed = getattr(encoder, "patch_embed", None)
        overlapping = isinstance(embed, OverlappingPatchEmbed)
        self.every = embed.patch_size[0] // embed.stride if overlapping else 1  # of the tokens one is a whole patch's
        channels, weight = len(normalize.mean), next(encoder.parameters())
        try:
            with torch.no_grad():
                maps = self.maps(torch.zeros(1, channels, *img_size, device=weight.device))
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # timm's way of refusing
            raise UserError(f"{SETTING} is {config.teacher}, which gives no features: {one_line(error)}") from error
        self.width = maps[0].shape[1]
        shapes = {tuple(each.shape) for each in maps}
        allowed = f"1 with {config.teacher}, whose stages differ in size"
        require(len(shapes) == 1, "objective.teacher_depths", self.depths, allowed)

    def train(self, mode: bool = True) -> "FeatureTeacher":
        """Eval mode, whatever the student's is: without dropout and drop path."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Clean images (B, C, H, W) from 0 to 255 and positions (B, K) to targets, (B, K, D) float32.

        Returns:
            The targets; and by what a collapse is seen: the targets too, but those of `layer` in place of `instance`,
            which makes much of differences however small they are.
        """
        maps = self.maps(resized(images, self.img_size))
        maps = [resized(each[..., :: self.every, :: self.every].float(), self.grid) for each in maps]
        tokens = [each.flatten(2).transpose(1, 2) for each in maps]  # (B, N, D) each
        if self.depths == 1 and hasattr(self.encoder, "fc_norm"):  # some encoders have their last norm there
            tokens = [self.encoder.fc_norm(each) for each in tokens]
        targets = take(as_targets(tokens, self.kind), positions)
        return targets, take(as_targets(tokens, "layer"), positions) if self.kind == "instance" else targets

    def maps(self, images: Tensor) -> list[Tensor]:
        """Feature maps (B, D, h, w) after each depth."""
        options = dict(norm=self.depths == 1, output_fmt="NCHW", intermediates_only=True)
        return self.encoder.forward_intermediates(self.normalize(images), indices=self.depths, **options)


def resized(values: Tensor, size: Sequence[int]) -> Tensor:
    """(B, C, h, w) at another height and width, bilinearly; as it is where it has these."""
    same = tuple(values.shape[-2:]) == tuple(size)
    return values if same else F.interpolate(values.float(), tuple(size), mode="bilinear", antialias=True)


def as_targets(tokens: list[Tensor], kind: str) -> Tensor:
    """Features (B, N, D) of each depth to targets (B, N, D): see `objective.teacher_norm`."""
    if kind == "layer":
        tokens = [F.layer_norm(each, each.shape[-1:]) for each in tokens]
    elif kind == "instance":
        tokens = [F.instance_norm(each.transpose(1, 2)).transpose(1, 2) for each in tokens]
    mean = torch.stack(tokens).mean(0)
    return mean if kind == "none" else F.layer_norm(mean, mean.shape[-1:])


def depths_of(encoder: nn.Module, config: ObjectiveConfig) -> int:
    """How many of the encoder's last blocks are averaged.

    Raises:
        UserError: it has fewer, or timm gives no features after its blocks.
    """
    known = hasattr(encoder, "forward_intermediates")
    require(known, SETTING, config.teacher, "a model of timm's that has `forward_intermediates`")
    blocks = getattr(encoder, "blocks", None)
    usual = 1 if blocks is None or config.frozen_teacher else max(1, len(blocks) // 2)
    depths = config.teacher_depths or usual
    most = len(blocks) if blocks is not None else len(encoder.feature_info)
    require(depths <= most, "objective.teacher_depths", depths, f"at most {most}, the blocks of {config.teacher}")
    return depths


class StudentWithTeacher(nn.Module):
    """A network that learns, and the teacher whose features it predicts.

    Args:
        student: of mpp/models/networks.py.
        teacher: a frozen one's weights are no part of the state.
        config: which teacher it is, and which of both is exported.
    """

    def __init__(self, student: nn.Module, teacher: FeatureTeacher, config: ObjectiveConfig):
        super().__init__()
        self.student, self.teacher, self.config = student, teacher, config

    def forward(self, images: Tensor, corruption: Corruption) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, targets and what shows a collapse, (B, K, D) each, of images (B, C, H, W) from 0 to 255."""
        return self.student(images, corruption), *self.teacher(images, corruption.positions)

    @property
    def encoder(self) -> VisionTransformer:
        """The encoder that learns."""
        return self.student.encoder

    @property
    def normalize(self) -> Normalize:
        """Of its input."""
        return self.student.normalize

    @property
    def method(self) -> str:
        """For the model card."""
        whose = self.config.frozen_teacher
        which = f"{whose}, a frozen encoder" if whose else "its own moving average"
        own = "" if whose else f". This encoder is the {EXPORTED[self.config.export]}"
        return f"{self.student.method}. It predicted the features of {which}{own}"

    @property
    def on_top(self) -> str:
        """For the model card."""
        return f"{self.student.on_top}, a teacher that sees {' x '.join(map(str, self.teacher.img_size))} pixels"


def build_teacher(config: ObjectiveConfig, encoder: VisionTransformer, normalize: Normalize) -> FeatureTeacher:
    """The teacher that the config names.

    Args:
        encoder: the student's.
        normalize: of its input, which a moving average shares.
    Raises:
        UserError: no encoder there, or one of other channels.
    """
    grid = cell_grid(encoder)[0]
    if config.frozen_teacher is None:
        average = copy.deepcopy(encoder)
        if average.grad_checkpointing:
            average.set_grad_checkpointing(False)  # there is no backward pass
        return FeatureTeacher(average, normalize, grid, config, encoder.patch_embed.img_size)
    trained, file = torch.get_default_device().type != "meta", config.teacher_checkpoint
    model = load_encoder(
        config.teacher, trained, file, setting=SETTING, img_size=config.teacher_img_size, num_classes=0
    )
    set_attention(model, has_fused_attention(encoder))
    wanted, channels = resolve_model_data_config(model), len(normalize.mean)
    require(wanted["input_size"][0] == channels, f"{SETTING}'s input channels", wanted["input_size"][0], f"{channels}")
    img_size = sides(config.teacher_img_size or wanted["input_size"][1:])
    if config.teacher_img_size and isinstance(getattr(model, "patch_embed", None), PatchEmbed):  # leaves out the rest
        check_grid(img_size, model.patch_embed.patch_size[0], f"{SETTING}_img_size")
    teacher = FeatureTeacher(model, Normalize(wanted["mean"], wanted["std"]), grid, config, img_size)
    teacher.register_state_dict_post_hook(without_teacher)
    teacher.register_load_state_dict_post_hook(not_missing)
    return teacher


def without_teacher(teacher: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """A frozen teacher is no part of a checkpoint."""
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


def not_missing(teacher: nn.Module, keys: Any) -> None:
    """A checkpoint lacks nothing where it lacks a frozen teacher, whose own names these are."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.startswith("teacher.")]


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """Move a teacher's weights towards the student's: decay * its own + (1 - decay) * the student's. Shards, too.

    Running statistics, which are averages already, are the student's.
    """
    averages, weights = (
        [each.to_local() if isinstance(each, DTensor) else each.detach() for each in encoder.parameters()]
        for encoder in (teacher, student)
    )
    get_ema_multi_avg_fn(decay)(averages, weights, None)
    for own, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
        own.copy_(theirs)


def decay_at(half_life: tuple[float, float], step: int, steps: int) -> float:
    """Decay of the moving average in update `step` (from 0) of `steps`: 2 ** (-1 / half-life in updates)."""
    start, end = half_life
    return 0.5 ** (1 / (steps * (start + (end - start) * step / max(1, steps - 1))))
