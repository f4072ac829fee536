"""Contrastive pre-training, which masks nothing: SimCLR (Chen et al., ICML 2020).

    accelerate launch evaluation/contrastive.py
    accelerate launch evaluation/contrastive.py --config cifar10 --config rivals/simclr_cifar10

Two random views of each image go through the encoder and a projection head. Each view has to be more like the other
view of its image than like any view of another image. The run folder and its encoder/ are as pre-training's, so that
every probe takes it; the projection head is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torchvision.transforms import v2

from evaluation.config import ContrastiveConfig, ViewsConfig
from evaluation.supervision.learners import HeadedEncoder, build_backbone
from mpp.config import ImageSize, require, sides
from mpp.config.parsing import parse
from mpp.data import crops
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, ViewDataset
from mpp.features.frozen import extract
from mpp.features.metrics import Sums, count_right
from mpp.models.adaptation import choose_trained, describe_adaptation
from mpp.models.encoder import Normalize
from mpp.models.plain import has_running_statistics
from mpp.pretrain import print_next_steps
from mpp.runtime.processes import ahead_of_others
from mpp.runtime.randomness import FIXED_VIEW, Stream, permutation
from mpp.runtime.start import run_main
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker
from mpp.training.run import train
from mpp.training.task import ImageTask


@lru_cache
def distortion(config: ViewsConfig, side: int) -> v2.Transform:
    """torchvision's transforms of a crop (C, side, side)."""
    strong, weak = 0.8 * config.jitter, 0.2 * config.jitter
    window = max(3, side // 10 | 1)  # odd
    jitter = v2.ColorJitter(brightness=strong, contrast=strong, saturation=strong, hue=weak)
    blur = v2.GaussianBlur(window, sigma=(0.1, 2.0))
    return v2.Compose(
        [
            v2.RandomApply([jitter], config.jitter_probability),
            v2.RandomGrayscale(config.grey),
            v2.RandomApply([blur], config.blur),
        ]
    )


@dataclass(frozen=True)
class TwoViews(ViewDataset):
    """Samples of two views each, (2, C, H, W): a view is a function of (seed, epoch, index, view).

    The fixed views (epoch FIXED_VIEW) are two such views too, by `data.cut_seed`: the same in every evaluation.
    """

    distorted: ViewsConfig = field(default_factory=ViewsConfig)
    costly = True

    def view(self, pixels: Tensor, epoch: int, index: int) -> Tensor:
        seed, config = self.seed_of(epoch), self.distorted
        transform = distortion(config, min(sides(self.img_size)))
        views = []
        for number in (2 * index, 2 * index + 1):
            crop = crops.random_crop(pixels, self.img_size, self.data, seed, epoch, number)
            if config.jitter or config.grey:
                crop = crops.to_8_bits(crop)
            views.append(crops.apply_random(transform, crop, seed, epoch, number))
        return torch.stack(views)


def nt_xent(own: Tensor, everyone: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """NT-Xent: each view's cross-entropy of choosing the other view of its image among all views but itself.

    Args:
        own: (B, 2, E) of unit length, two views of each image of this process.
        everyone: (B', 2, E), those of all processes.
        first: which of everyone's images own[0] is.
        temperature: divisor of the similarities.
    Returns:
        Of each own view, image by image, (2 B,): the loss, and whether the other view is the nearest of all.
    """
    similarity = own.flatten(0, 1) @ everyone.flatten(0, 1).T / temperature  # (2 B, 2 B')
    itself = torch.arange(2 * first, 2 * first + len(similarity), device=own.device)
    other = itself ^ 1  # the two views of an image stand side by side
    similarity = similarity.scatter(1, itself[:, None], -torch.inf)
    losses = F.cross_entropy(similarity, other, reduction="none")
    right = similarity.argmax(1) == other
    return losses, right


class Contrastive(ImageTask):
    """The task: find the other view of an image among the views of all images of a forward pass.

    A forward pass is that of all processes together, so their number changes nothing where `data.batch_size` is null.
    So are the statistics of batch norms: by those of one process, the two views of an image would know each other.
    """

    def __init__(self, config: ContrastiveConfig, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        self.config = config
        self.images_of_a_pass = layout.largest_share * layout.world_size
        batch, shares = config.optim.global_batch_size, layout.share_count
        require(batch % shares == 0, "optim.global_batch_size", batch, f"a multiple of {shares}: views are gathered")
        self.representation = config.head.pooling
        self.model, self.img_size = self.build_model()
        with ahead_of_others(accelerator.is_main_process):
            all_train, self.held_out = load_image_datasets(config.data)
        self.train = all_train.to_train_on(config.data)
        allowed = f"from 2 to {len(self.train)}, all training images: an image is compared with others"
        fits = 1 < self.images_of_a_pass <= len(self.train)
        require(fits, "the number of images in a forward pass", self.images_of_a_pass, allowed)
        self.begin_without_labels(config, self.train)

    def build_model(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder with the projection head; height and width of its images."""
        model, head, channels = self.config.model, self.config.head, self.config.data.channels
        encoder, img_size = build_backbone(model, channels)
        choose_trained(encoder, model)
        if self.accelerator.num_processes > 1 and has_running_statistics(encoder):
            allowed = "a model without batch norms on several processes of CPUs, which cannot synchronise them"
            require(self.accelerator.device.type != "cpu", "model.name", model.name, allowed)
            encoder = convert_sync_batchnorm(encoder)
        width = encoder.head_hidden_size
        hidden = head.hidden or width
        projection = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, head.outputs))
        normalize = Normalize(*model.normalization(channels))
        return HeadedEncoder(encoder, normalize, head.pooling, projection), img_size

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        begins_from = self.config.model.init_from
        start = f", from {begins_from}," if begins_from else ""
        feature = "[class] token" if self.representation == "class" else "mean of the patch tokens"
        method = f"Pre-trained without labels{start} by contrastive learning (SimCLR: Chen et al., ICML 2020). Its "
        method += f"feature is the {feature}; the projection head is left out"
        return ". ".join(filter(None, [method, describe_adaptation(self.config.model)]))

    def record(self) -> dict[str, Any]:
        """Record of the images, and of their number in a forward pass: a resumed run may not change `batch_size`."""
        return super().record() | {"forward pass": {"images": self.images_of_a_pass}}

    def views(self, dataset: ImageDataset) -> TwoViews:
        return TwoViews(dataset, self.data, self.img_size, self.run.seed, distorted=self.config.views)

    def project(self, model: nn.Module, images: Tensor) -> Tensor:
        """Views (B, 2, C, H, W) to the projections that the loss compares, (B, 2, E) float32 of unit length."""
        projections = model(images.flatten(0, 1)).float()
        return F.normalize(projections, dim=-1).unflatten(0, (-1, 2))

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        own = self.project(model, batch.images.to(self.accelerator.device, non_blocking=True))
        everyone = torch.cat(all_gather(own)) if self.layout.world_size > 1 else own  # gradients flow back to each
        losses, right = nt_xent(own, everyone, self.layout.rank * len(own), self.config.contrast.temperature)
        return losses.mean(), count_right(right) if measure else {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        batches = self.fixed_views(self.held_out_views, tracker)
        count = len(self.held_out_views.dataset)
        projected, _ = extract(batches, lambda images: [self.project(model, images)], count, self.accelerator)
        scalars = {}
        for projections in projected:  # none on other processes than the main one
            scalars = self.measure_held_out(projections.to(self.accelerator.device))
        return scalars

    def measure_held_out(self, projected: Tensor) -> dict[str, float]:
        """Loss and accuracy of held-out images (n, 2, E), in groups of as many as in training, or a few more."""
        order = permutation(Stream.CUT, self.data.cut_seed, 2, len(projected))  # files come sorted by class
        groups = projected[order].tensor_split(max(1, len(projected) // self.images_of_a_pass))
        temperature = self.config.contrast.temperature
        losses, right = zip(*(nt_xent(group, group, 0, temperature) for group in groups), strict=True)
        return {
            "heldout/loss": float(torch.cat(losses).double().mean()),
            "heldout/accuracy": float(torch.cat(right).double().mean()),
            "heldout/chance": sum(len(group) / (2 * len(group) - 1) for group in groups) / len(projected),
        }

    def flops(self) -> int:
        """FLOPs executed per image: its two views through the network, and their similarities to all views."""
        pair = self.views(self.held_out)[FIXED_VIEW, 0].images
        similarities = 4 * self.images_of_a_pass * self.config.head.outputs  # of one view: a multiply-add is two
        model = self.model.eval()  # in training, synchronised batch norms would ask the other processes
        return executed_flops(model, pair) + 2 * 3 * similarities  # forward, and backward to either side


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    folder = train(parse(ContrastiveConfig, arguments), Contrastive)
    if PartialState().is_main_process:
        print_next_steps(folder)


if __name__ == "__main__":
    run_main(main)
