"""Contrastive pre-training, which masks nothing: SimCLR (Chen et al., ICML 2020).

    accelerate launch evaluation/contrastive.py
    accelerate launch evaluation/contrastive.py --config cifar10 --config rivals/simclr_cifar10

Two random views of each image go through the encoder and a projection head. Each view has to be more like the other
view of its image than like any view of another image. The run folder and its encoder/ are as pre-training's, so that
every probe takes it; the projection head is left out.
"""

from collections.abc import Sequence
from shlex import quote
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from evaluation.config import ContrastiveConfig
from evaluation.supervision.heads import HeadedEncoder, build_backbone, synchronize_batch_norms
from evaluation.supervision.simclr import GatherWithGradients, TwoViews, nt_xent
from mpp.config import ImageSize, require
from mpp.config.parsing import parse
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.features.frozen import extract
from mpp.features.metrics import Sums
from mpp.features.reconstructions import prediction_panel, stretch
from mpp.models.adaptation import choose_trained, describe_adaptation
from mpp.models.descriptions import learned_labels, licence_of
from mpp.runtime.processes import on_main_process
from mpp.runtime.randomness import FIXED_VIEW, Stream, permutation
from mpp.runtime.start import run_main
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker, last_scalars
from mpp.training.loop import due
from mpp.training.run import train
from mpp.training.task import ImageTask, to_device

VIEWS_LOGGED = 8
"""Held-out images whose views are logged."""


class Contrastive(ImageTask):
    """The task: find the other view of an image among the views of all images of a forward pass.

    A forward pass is that of all processes together, so their number changes nothing where `data.batch_size` is null.
    So are the statistics of batch norms: by those of one process, the two views of an image would know each other.
    """

    def __init__(self, config: ContrastiveConfig, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        self.config = config
        self.images_of_a_pass = layout.largest_share * layout.world_size
        self.check_settings()
        begins_from = config.model.init_from
        self.builds_on_labels = begins_from is not None and learned_labels(begins_from)
        self.licence = licence_of(begins_from)
        self.model, self.img_size = self.build_model()
        with accelerator.main_process_first():
            all_train, self.held_out = load_image_datasets(config.data)
        self.train = all_train.choose(config.data.train_images, config.data.eval_seed)
        allowed = f"at most {len(self.train)}, the number of training images: one more would be compared with itself"
        fits = self.images_of_a_pass <= len(self.train)
        require(fits, "images of a forward pass", self.images_of_a_pass, allowed)
        evaluated = self.held_out.choose(config.data.eval_images, config.data.cut_seed)
        require(len(evaluated) > 1, "held-out images", len(evaluated), "at least 2: an image is compared with others")
        self.held_out_views = self.fixed_view_loader.add(self.views(evaluated))
        self.probe = self.build_probe(self.train, config.probe, config.head.pooling, begins_from)

    def check_settings(self) -> None:
        """Raise UserError where the settings do not fit contrastive training."""
        layout = self.layout
        shares = layout.share_count
        batch = self.config.optim.global_batch_size
        require(batch % shares == 0, "optim.global_batch_size", batch, f"a multiple of {shares}: views are gathered")
        if self.images_of_a_pass == 1:
            layout.require_several(": an image is compared with others")

    def build_model(self) -> tuple[HeadedEncoder, ImageSize]:
        """The encoder with the projection head; height and width of its images."""
        model, head = self.config.model, self.config.head
        channels = self.config.data.channels
        encoder, img_size = build_backbone(model, channels)
        choose_trained(encoder, model)
        encoder = synchronize_batch_norms(encoder, model.name, self.accelerator)
        width = encoder.head_hidden_size
        hidden = head.hidden or width
        projection = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, head.outputs))
        mean, std = model.normalization(channels)
        return HeadedEncoder(encoder, projection, head.pooling, mean, std), img_size

    @property
    def method(self) -> str:
        """Its training in a sentence, for the model card."""
        begins_from = self.config.model.init_from
        start = f", from {begins_from}," if begins_from else ""
        feature = "[class] token" if self.model.pooling == "class" else "mean of the patch tokens"
        method = (
            f"Pre-trained without labels{start} by contrastive learning (SimCLR: Chen et al., ICML 2020). Its feature "
            f"is the {feature}; the projection head is left out"
        )
        adaptation = describe_adaptation(self.config.model)
        return f"{method}. {adaptation}" if adaptation else method

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
        (images,) = to_device([batch.images], self.accelerator.device)
        own = self.project(model, images)
        everyone = own
        if self.layout.world_size > 1:
            everyone = GatherWithGradients.apply(own, self.accelerator)
        first = self.layout.rank * len(own)
        losses, right = nt_xent(own, everyone, first, self.config.contrast.temperature)
        if not measure:
            return losses.mean(), {}
        count = torch.tensor(right.numel(), dtype=torch.double, device=right.device)
        return losses.mean(), {"right": right.double().sum(), "views": count}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"accuracy": float(sums["right"] / sums["views"])}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        batches = self.fixed_views(self.held_out_views, tracker)
        count = len(self.held_out_views.dataset)
        projected, _ = extract(batches, lambda images: [self.project(model, images)], count, self.accelerator)
        scalars = {}
        if self.accelerator.is_main_process:
            (projections,) = projected  # the list is empty on other processes
            scalars = self.measure_held_out(projections.to(self.accelerator.device))
        on_main_process(self.accelerator, lambda: self.log_panel(step, tracker))
        if due(step, self.config.probe.every, self.config.run.steps):
            scalars |= self.probe(model)
        return scalars

    def measure_held_out(self, projected: Tensor) -> dict[str, float]:
        """Loss and accuracy of held-out images (n, 2, E), in groups of as many as in training, or a few more."""
        order = permutation(Stream.CUT, self.data.cut_seed, 2, len(projected))  # files come sorted by class
        group_count = max(1, len(projected) // self.images_of_a_pass)
        groups = projected[order].tensor_split(group_count)
        losses = []
        right = []
        for group in groups:
            group_losses, group_right = nt_xent(group, group, 0, self.config.contrast.temperature)
            losses.append(group_losses)
            right.append(group_right)
        chance = sum(len(group) / (2 * len(group) - 1) for group in groups) / len(projected)
        return {
            "heldout/loss": float(torch.cat(losses).double().mean()),
            "heldout/accuracy": float(torch.cat(right).double().mean()),
            "heldout/chance": chance,
        }

    def log_panel(self, step: int, tracker: Tracker) -> None:
        """Log a picture of the two views of the first held-out images."""
        views = self.views(self.held_out)
        shown = range(min(VIEWS_LOGGED, len(self.held_out)))
        pairs = torch.stack([views[FIXED_VIEW, index].images for index in shown])
        panel = prediction_panel(stretch(pairs).movedim(1, 0))
        tracker.log_images(step, "view 1 | view 2", panel[None])

    def flops(self) -> int:
        """FLOPs executed per image: its two views through the network, and their similarities to all views."""
        pair = self.views(self.held_out)[FIXED_VIEW, 0].images
        all_views = 2 * self.images_of_a_pass
        similarities = 2 * all_views * self.config.head.outputs  # of one view; a multiply-add is two operations
        model = self.model.eval()  # in training, synchronised batch norms would ask the other processes
        return executed_flops(model, pair) + 2 * 3 * similarities  # forward, and backward to either side

    def describe_model(self) -> str:
        others = 2 * self.images_of_a_pass - 2
        return f"{super().describe_model()}, each view compared with {others} of other images"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    config = parse(ContrastiveConfig, arguments)
    folder = train(config, Contrastive)
    if PartialState().is_main_process:
        if config.run.eval_every > 0:
            accuracy = last_scalars(folder)["heldout/accuracy"]
            print(f"the other view of a held-out image is the nearest one for {accuracy:.1%} of the views")
        print(f"next: tensorboard --logdir {quote(str(folder.parent))}")
        representation = "" if config.head.pooling == "mean" else " --representation class"
        print(f"next: mpp fewshot --encoder {quote(str(folder))}{representation}")


if __name__ == "__main__":
    run_main(main)
