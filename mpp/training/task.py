"""What all that learns from images has in common: which images, how they are dealt out, what is exported."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.config import CorruptionConfig, DataConfig, Grid, ProbeConfig, Representation, RunConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.dataset import ImageDataset
from mpp.data.decoded_cache import cache_decoded
from mpp.data.hub import cached_commit
from mpp.data.identity import CLASS_NAMES_FIELD, identify_images
from mpp.data.loader import BatchLayout, HeldOutLoader, training_loader
from mpp.data.shards import Shards
from mpp.data.stream import streaming_loader
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import WORKERS_ARE_FORKS
from mpp.features.metrics import Sums, add, total
from mpp.features.probe import Probe
from mpp.models.exporting import export_encoder
from mpp.training.card import model_card
from mpp.training.checkpoint import Cursors
from mpp.training.log import Tracker

FEW_THREADS = 2  # a crop of a decoded image is a tenth of its update then, and loader processes would take more


class ImageTask:
    """What is trained: a loss on batches of images, and what is to be seen of it. All tasks have this in common.

    Subclasses set `model`, which has an `encoder` and a `normalize`, and the images, and say what is learned and what
    it costs.
    """

    model: nn.Module
    method: str
    """How it is trained, for the model card."""
    corruption: CorruptionConfig | None = None
    grid: Grid = (0, 0)
    randaugment = 0
    probe: Probe | None = None
    """Probe of the frozen features; None: `probe.every` is 0."""
    learns_labels = False
    """Whether the training images' labels are learned from."""
    label_names: list[str] | None = None
    """Names of the training images' classes, by number; None: there are no names."""
    builds_on_labels = False
    """Whether it began from, or predicts the features of, an encoder that learned labels."""

    def __init__(self, accelerator: Accelerator, layout: BatchLayout, run: RunConfig, data: DataConfig):
        self.accelerator, self.layout, self.run, self.data = accelerator, layout, run, data
        self.evaluation = HeldOutLoader(layout.batch_size, data.workers, layout.world_size, layout.rank)
        self.train: ImageDataset | Shards
        self.held_out: ImageDataset
        self.img_size: tuple[int, int]
        torch.manual_seed(run.seed)

    @property
    def kind(self) -> str:
        """What the encoder is by its training, in a few words, for the model card."""
        other = ", which builds on an encoder that learned labels" if self.builds_on_labels else ""
        return f"encoder pre-trained without labels{other}"

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        """Mean loss of a batch on the device and, if asked, sums for `describe`. `model` is wrapped for training."""
        raise NotImplementedError

    def describe(self, sums: Sums) -> dict[str, float]:
        """Sums over all batches and processes to scalars."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        """Scalars on held-out images, all of them on the main process; may log pictures. `model` is in eval mode."""
        raise NotImplementedError

    def flops(self) -> int:
        """Operations executed per image, forward and backward."""
        raise NotImplementedError

    def build_probe(
        self, known: ImageDataset, config: ProbeConfig, representation: Representation = "mean"
    ) -> Probe | None:
        """The probe of the held-out images, beside these training images; None where `probe.every` is 0."""
        if not config.every:
            return None
        return Probe(
            self.accelerator,
            self.evaluation,
            known,
            self.held_out,
            data=self.data,
            img_size=self.img_size,
            config=config,
            representation=representation,
        )

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops (and corruptions) of these images."""
        return ViewDataset(
            dataset, self.data, self.img_size, self.run.seed, self.corruption, self.grid, self.randaugment
        )

    def batches(self, start: int, cursors: Cursors) -> Iterable[Batch]:
        """This process's batches from update `start` on; a stream goes on from its cursors."""
        self.evaluation.start()
        if self.data.streaming:
            return streaming_loader(self.views(self.train), self.layout, start, self.run.steps, cursors)
        return training_loader(self.training_views(start), self.layout, start, self.run.steps)

    def training_views(self, start: int) -> ViewDataset:
        """Crops of the training images from update `start` on; of decoded images, where they fit and recur."""
        images = (self.run.steps - start) * self.layout.images // self.layout.world_size  # of this process
        inherited = self.data.workers == 0 or WORKERS_ARE_FORKS
        if images < 2 * len(self.train) or not inherited:
            return self.views(self.train)
        views = self.views(cache_decoded(self.train, self.data))
        few_cores = self.accelerator.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS
        if views.dataset.decoded and few_cores and not views.costly:
            return dataclasses.replace(views, data=dataclasses.replace(self.data, workers=0))
        return views

    @torch.no_grad()
    def judge(self, model: nn.Module, images: ViewDataset, tracker: Tracker) -> dict[str, float]:
        """Loss and what `describe` says, over images that `evaluation` reads. `model` is in eval mode."""
        sums: Sums = {}
        for batch in self.evaluation.batches(images):
            tracker.warn_unreadable(batch.unreadable)
            loss, measured = self.loss(model, batch, True)
            count = torch.tensor(len(batch.images), dtype=torch.double, device=loss.device)
            sums = add(sums, measured | {"loss": loss.double() * count, "images": count})
        sums = total(sums)
        return {"loss": float(sums["loss"] / sums["images"])} | self.describe(sums)

    def evaluate_untrained(self, model: nn.Module) -> dict[str, float]:
        """Scalars of the untrained model, all of them on the main process. `model` is in eval mode."""
        return self.probe(model, baseline=True) if self.probe else {}

    def facts(self) -> dict[str, Any]:
        """What the verdict on a run is to know of its images (see `mpp.training.health.Facts`)."""
        known = {"known": 0 if isinstance(self.train, Shards) else len(self.train)}
        known |= {"held_out": min(len(self.held_out), self.data.eval_images)}
        known |= {"judged": self.probe.image_count if self.probe else len(self.held_out)}
        if isinstance(self.train, Shards):
            return known
        shares = self.train.class_shares()
        return known | {"largest_class": max(shares.values(), default=0.0), "classes": len(shares)}

    def name(self, index: int) -> str:
        """What a person finds a training image by."""
        return self.train.name(index)

    def after_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Whatever the task does after step `step` (from 0); scalars of it. `model` is without wrappers."""
        return {}

    def refuse_to_continue(self, scalars: dict[str, float]) -> None:
        """Raise UserError, on all processes, if a line of metrics says that training on is of no use."""

    def record(self) -> dict[str, Any]:
        """Which images these are: see mpp/data/identity.py."""
        retries, commit = self.data.read_retries, None
        if is_hub_dataset(self.data):
            commit = self.data.revision or cached_commit(self.held_out.origin[0])
        streamed = isinstance(self.train, Shards)
        known = self.train.identify(retries, commit) if streamed else self.record_of(self.train, commit)
        known[CLASS_NAMES_FIELD] = self.held_out.names and self.held_out.names[: self.held_out.classes]
        return {"train": known, "held_out": self.record_of(self.held_out, commit)}

    def record_of(self, dataset: ImageDataset, commit: str | None) -> dict[str, Any]:
        """The record of a split."""
        return identify_images(dataset, self.learns_labels, self.data.read_retries, commit)

    def describe_images(self) -> str:
        """The images in a line: what they are, how many, how often each is seen."""
        seen = f", each seen {self.times_seen:.3g} times" if self.times_seen else ""
        return f"{self.train.describe()}{seen}, {len(self.held_out)} held out"

    @property
    def times_seen(self) -> float:
        """How often a run sees each training image; 0: nobody knows how many a stream has."""
        known = 0 if isinstance(self.train, Shards) else len(self.train)
        return self.run.steps * self.layout.images / known if known else 0.0

    def describe_model(self) -> str:
        """The model in a line."""
        parameters = sum(parameter.numel() for parameter in self.model.encoder.parameters())
        return f"{parameters / 1e6:.1f} M parameters in the encoder"

    def export(self, model: nn.Module, folder: Path, name: str = "encoder") -> None:
        """Write the encoder in timm's layout, with the input that it takes, and its model card.

        To be called on the main process. `model` is without wrappers.
        """
        normalize, images = model.normalize, f"{describe_source(self.data)}, {self.train.describe()}"
        learned_labels = self.learns_labels or self.builds_on_labels
        card = model_card(folder, model.encoder, self.kind, learned_labels, self.describe_model(), self.method, images)
        input_config = (self.img_size, normalize.mean, normalize.std, self.data.eval_crop)
        learned = dict(label_names=self.label_names, learned_labels=learned_labels)
        export_encoder(model.encoder, folder / name, *input_config, card, self.data.how_read(), **learned)
