"""Contrastive pre-training, a rival that masks nothing: SimCLR (Chen et al., ICML 2020).

    accelerate launch evaluation/contrastive.py
    accelerate launch evaluation/contrastive.py --config cifar10 --config rivals/simclr_cifar10

Two random views of each image go through the encoder and a projection head. Each view has to be more like the other
view of its image than like any view of another image. The run folder and its encoder/ are as pre-training's, so that
every probe takes it; the projection head is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from shlex import quote
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from evaluation.config import ContrastiveConfig
from evaluation.supervision.heads import HeadedEncoder, build_backbone, synchronized
from evaluation.supervision.simclr import Everyone, TwoViews, nt_xent
from mpp.config import require
from mpp.config.parsing import parse
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.errors import UserError
from mpp.features.frozen import extract
from mpp.features.metrics import Sums
from mpp.features.reconstructions import prediction_panel
from mpp.models.descriptions import learned_labels
from mpp.runtime.randomness import FIXED, Stream, permutation
from mpp.runtime.start import command
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker, last_evaluation
from mpp.training.loop import due
from mpp.training.run import train
from mpp.training.task import ImageTask

PANEL_IMAGES = 8


class Contrastive(ImageTask):
    """The task: find the other view of an image among the views of all images of a forward pass.

    A forward pass is that of all processes together, so their number changes nothing where `data.batch_size` is null.
    Batch norms too: with statistics of each process's own, the two views of an image would know each other by them.
    """

    def __init__(self, config: ContrastiveConfig, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        self.config = config
        self.together = layout.batch_size * layout.world_size  # images of a forward pass
        if config.data.streaming:
            raise UserError("data.streaming is for masked patch prediction; contrastive training needs indexed images")
        shares = layout.world_size * layout.accumulation_steps
        batch = config.optim.global_batch_size
        require(batch % shares == 0, "optim.global_batch_size", batch, f"a multiple of {shares}: views are gathered")
        require(self.together > 1, "data.batch_size", layout.batch_size, "above 1: an image is told from others")
        channels, views = config.data.channels, config.views
        for name in ("jitter", "grey"):
            value = getattr(views, name)
            allowed = f"0 with {channels} channels: it changes colours; crops, flips and blur serve all images"
            require(channels == 3 or value == 0, f"views.{name}", value, allowed)
        backbone, self.img_size = build_backbone(config.model, channels)
        begun = config.model.init_from
        self.builds_on_labels = begun is not None and learned_labels(begun)
        encoder = synchronized(backbone, config.model.name, accelerator)
        width, head = encoder.head_hidden_size, config.head
        hidden = head.hidden or width
        projection = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, head.outputs))
        self.model = HeadedEncoder(encoder, projection, head.pooling, *config.model.normalization(channels))
        with accelerator.main_process_first():
            known, self.held_out = load_image_datasets(config.data)
        self.train = known.choose(config.data.train_images, config.data.eval_seed)
        count = f"at most {len(self.train)}, of so many training images: one more would be told from itself"
        require(self.together <= len(self.train), "images of a forward pass", self.together, count)
        judged = self.held_out.choose(config.data.eval_images, config.data.cut_seed)
        require(len(judged) > 1, "held-out images", len(judged), "at least 2: an image is told from others")
        self.judged = self.evaluation.add(self.views(judged))
        self.probe = self.build_probe(self.train, config.probe, head.pooling)

    @property
    def method(self) -> str:
        """How it is trained, for the model card."""
        trained = {"class": "[class] token", "mean": "mean of the patch tokens"}[self.model.pooling]
        return (
            "Pre-trained without labels by contrastive learning (SimCLR: Chen et al., ICML 2020). Its feature is the "
            f"{trained}; the projection head is left out"
        )

    def record(self) -> dict[str, Any]:
        """Which images these are, and how many are told apart: `data.batch_size` may change where a run goes on."""
        return super().record() | {"forward pass": {"images": self.together}}

    def views(self, dataset: ImageDataset) -> TwoViews:
        return TwoViews(dataset, self.data, self.img_size, self.run.seed, distorted=self.config.views)

    def project(self, model: nn.Module, images: Tensor) -> Tensor:
        """Views (B, 2, C, H, W) to what the loss compares, (B, 2, E) float32 of unit length."""
        return F.normalize(model(images.flatten(0, 1)).float(), dim=-1).unflatten(0, (-1, 2))

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        own = self.project(model, batch.images.to(self.accelerator.device, non_blocking=True))
        everyone = Everyone.apply(own, self.accelerator) if self.layout.world_size > 1 else own
        losses, right = nt_xent(own, everyone, self.layout.rank * len(own), self.config.contrast.temperature)
        if not measure:
            return losses.mean(), {}
        count = torch.tensor(right.numel(), dtype=torch.double, device=right.device)
        return losses.mean(), {"right": right.double().sum(), "views": count}

    def describe(self, sums: Sums) -> dict[str, float]:
        return {"accuracy": float(sums["right"] / sums["views"])}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        batches, count = named_failures(self.evaluation.batches(self.judged), tracker), len(self.judged.dataset)
        projected, _ = extract(batches, lambda images: [self.project(model, images)], count, self.accelerator)
        scalars = {}
        if self.accelerator.is_main_process:
            scalars = self.told_apart(torch.from_numpy(projected[0]).to(self.accelerator.device))
            self.log_panel(step, tracker)
        if due(step, self.config.probe.every, self.config.run.steps):
            scalars |= self.probe(model)
        return scalars

    def told_apart(self, projected: Tensor) -> dict[str, float]:
        """Loss and accuracy of held-out images (n, 2, E), among as many others as in training, or a few more."""
        order = permutation(Stream.CUT, self.data.cut_seed, 2, len(projected))  # files come sorted by class
        groups = projected[order].tensor_split(max(1, len(projected) // self.together))
        judged = [nt_xent(group, group, 0, self.config.contrast.temperature) for group in groups]
        losses, right = (torch.cat(parts).double().mean() for parts in zip(*judged, strict=True))
        chance = sum(len(group) / (2 * len(group) - 1) for group in groups) / len(projected)
        return {"heldout/loss": float(losses), "heldout/accuracy": float(right), "heldout/chance": chance}

    def log_panel(self, step: int, tracker: Tracker) -> None:
        """A picture of the two views of the first held-out images."""
        views = self.views(self.held_out)
        pairs = torch.stack([views[FIXED, index].images for index in range(min(PANEL_IMAGES, len(self.held_out)))])
        panel = prediction_panel(pairs.movedim(1, 0))
        tracker.log_images(step, "view 1 | view 2", panel[None])

    def flops(self) -> int:
        """Executed per image: its two views through the network, and their similarities to all views."""
        pair = self.views(self.held_out)[FIXED, 0].images
        similarities = 2 * (2 * self.together) * self.config.head.outputs  # a multiply-add each
        model = self.model.eval()  # in training, synchronised batch norms would ask the other processes
        return executed_flops(model, pair) + 2 * 3 * similarities  # forward, and backward to either side

    def describe_model(self) -> str:
        return f"{super().describe_model()}, each view told from {2 * self.together - 2} of other images"


def named_failures(batches: Iterable[Batch], tracker: Tracker) -> Iterator[Batch]:
    """The batches; images that cannot be decoded are named."""
    for batch in batches:
        tracker.warn_unreadable(batch.unreadable)
        yield batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line, or `arguments`, say."""
    config = parse(ContrastiveConfig, arguments, prog="accelerate launch evaluation/contrastive.py")
    folder = train(config, Contrastive)
    if PartialState().is_main_process:
        accuracy = last_evaluation(folder)["heldout/accuracy"]
        print(f"the other view of a held-out image is the nearest one for {accuracy:.1%} of the views")
        print(f"next: tensorboard --logdir {quote(str(folder.parent))}")
        representation = "" if config.head.pooling == "mean" else " --representation class"
        print(f"next: mpp fewshot --encoder {quote(str(folder))}{representation}")


if __name__ == "__main__":
    command(main)
