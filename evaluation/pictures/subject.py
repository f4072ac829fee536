"""The subject of pictures: an encoder and its held-out images.

B images, h x w patches, D width.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from evaluation.config import VisualizeConfig
from evaluation.frozen.encoder import ColorBaseline, FrozenEncoder, open_frozen_encoder
from evaluation.frozen.features import views_for
from evaluation.frozen.run_images import LoadedSplits, load_images_of
from evaluation.patches.features import patch_features
from mpp.config import require
from mpp.config.imports import COPIES, changed_imports, imported, require_imports
from mpp.data.dataset import ImageDataset
from mpp.data.loader import fixed_view_batches
from mpp.data.views import Batch
from mpp.features.reconstructions import as_rgb, stretch
from mpp.models.plain import has_class
from mpp.runtime.messages import warn
from mpp.runtime.start import start_alone
from mpp.runtime.weights import run_of
from mpp.training.run_folder import saved_settings

DRAWN_IMAGES_PER_BATCH = 4  # attention weights of a block are (B, heads, T, T): 85 MB for ViT-L at 384 pixels


class Subject(NamedTuple):
    """An encoder on its device, its held-out images, and the settings of the pictures."""

    config: VisualizeConfig
    accelerator: Accelerator
    encoder: FrozenEncoder | ColorBaseline
    held_out: ImageDataset

    @property
    def run(self) -> Path:
        """The run folder, also where `encoder` names the encoder/ in it."""
        return run_of(Path(self.config.frozen.encoder))

    @property
    def has_trained_class_token(self) -> bool:
        """Whether the encoder was trained with a head on its [class] token."""
        model = self.encoder.model
        if not has_class(model):
            return False
        saved = saved_settings(self.run)
        if not saved:
            published = getattr(model, "pretrained_cfg", {})
            return published.get("tag") != "mpp"  # mpp's pre-training, from the hub without its run
        if "objective" in saved:
            return False
        head = saved["head"]  # of a supervised run; fine-tuning has no such group
        pooling = saved.get("pooling") or head.get("pooling")
        return pooling != "mean"

    def choose(self, count: int) -> ImageDataset:
        """A seeded choice of held-out images."""
        return self.held_out.choose(count, self.config.data.cut_seed)

    def batches(self, dataset: ImageDataset, batch_size: int) -> Iterable[Batch]:
        """Images as the encoder's input, in batches of `data.batch_size` where it is set."""
        views = views_for(self.encoder, dataset, self.config.data)
        return fixed_view_batches(views, self.config.data.batch_size or batch_size)

    def image_batches(self, count: int) -> Iterator[Tensor]:
        """A seeded choice of held-out images as the encoder's input, in batches (B, C, H, W) on its device."""
        for batch in self.batches(self.choose(count), DRAWN_IMAGES_PER_BATCH):
            for failure in batch.unreadable:
                tqdm.write(f"warning: unreadable image, replaced by another: {failure}")
            yield batch.images.to(self.accelerator.device)

    def patch_features(self, images: Tensor) -> Tensor:
        """Features of the patches of images (B, C, H, W) after the last block: (B, h, w, D)."""
        last_depth = len(self.encoder.stages)
        with self.accelerator.autocast():
            return patch_features(self.encoder, images, [last_depth])[0]

    def to_pixels(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) for display, (B, H, W, 3) uint8.

        Deep images are stretched: see `stretch`.
        """
        return as_rgb(stretch(images), self.config.bands).movedim(1, -1).cpu()


def concatenate(batches: Iterable[Sequence[Tensor]], dim: int = 0) -> list[Tensor]:
    """The first tensors of all batches concatenated, then the second ones, and so on."""
    return [torch.cat(tensors, dim) for tensors in zip(*batches, strict=True)]


def load_subject(config: VisualizeConfig, loaded: LoadedSplits | None = None) -> Subject:
    """Load an encoder and its held-out images.

    Raises:
        UserError: there is no such encoder, or there are no such images.
    """
    accelerator = start_alone(config.frozen.run_settings(config.precision), "pictures are drawn")
    run = run_of(Path(config.frozen.encoder))
    require_imports(run)
    copied = imported if (run / COPIES).is_dir() else {}  # a run may use no code of the user
    for name in changed_imports(run, copied):
        warn(f"{name} is not as in {run / COPIES}: pictures come from the code of today")
    largest_band = max(config.bands or (1,))
    allowed = f"from 1 to {config.data.channels}: data.channels"
    require(largest_band <= config.data.channels, "bands", largest_band, allowed)
    encoder = open_frozen_encoder(config.frozen, config.data).to(accelerator.device)
    _, held_out = load_images_of(config.frozen.encoder, config.data, loaded)
    return Subject(config, accelerator, encoder, held_out)
