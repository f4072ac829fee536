"""`ImageTask`: images, batches, evaluation and export, which all training tasks have in common."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpp.config import DataConfig, Representation, RunConfig, RunProbeConfig, TrainingConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.dataset import ImageDataset
from mpp.data.identity import CLASS_NAMES_FIELD, LABEL_KIND_FIELD, identify_images
from mpp.data.loader import BatchLayout, FixedViewLoader
from mpp.data.remote import cached_commit, resolve_commit
from mpp.data.shards import Shards
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import loader_processes
from mpp.features.drift import START_FILE
from mpp.features.metrics import Sums
from mpp.features.probe import REFERENCE, GeneralImages, Probe, general_source, load_general_images
from mpp.models.adaptation import count_parameters, merge
from mpp.models.descriptions import EncoderFacts, export_encoder, learned_labels, licence_of
from mpp.models.plain import set_pooling
from mpp.runtime.processes import ahead_of_others, on_main_process
from mpp.training.card import model_card
from mpp.training.history import last_logged_step
from mpp.training.log import Tracker, read_history
from mpp.training.run_folder import first_encoders, recorded_commit

MAX_EVALUATION_WORKERS = 4  # they stay alive next to those that load training images


class ImageTask:
    """A training task: a model, images, a loss on batches of them, and scalars that tell how it does.

    Subclasses set `model` (with an `encoder` and a `normalize`), `method`, `img_size`, `train` and `held_out`, and
    implement:

    - loss(model, batch, measure) -> (Tensor, Sums): mean loss of a batch on the device and, if asked, sums for
      `describe`. The model is wrapped for training.
    - evaluate(model, step, tracker) -> dict[str, float]: scalars on held-out images, all of them on the main process;
      it may log pictures. The model is in eval mode.
    - flops() -> int: operations executed per image, forward and backward.
    """

    model: nn.Module
    kind = "encoder pre-trained without labels"
    """The kind of encoder by its training, in a few words, for the model card."""
    method: str
    """The encoder's training in a sentence, for the model card."""
    probe: Probe | None = None
    """Probe of the frozen features; None: `probe.every` is 0."""
    representation: Representation = "mean"
    """The feature of an image by which the encoder is judged, and that timm gives for the exported one."""
    learns_labels = False
    """Whether it learns from the training images' labels."""
    label_kind = "class"
    """Kind of the labels that it learns."""
    builds_on_labels = False
    """Whether it began from, or predicts the features of, an encoder that learned labels."""
    licence: str | None = None
    """Licence of the weights that it began from; None: they were random, or it is unknown."""
    train: ImageDataset | Shards
    held_out: ImageDataset
    img_size: tuple[int, int]
    held_out_views: ViewDataset
    """Views of the held-out images of an evaluation."""

    def __init__(self, accelerator: Accelerator, layout: BatchLayout, run: RunConfig, data: DataConfig):
        self.accelerator, self.layout, self.run, self.data = accelerator, layout, run, data
        workers = min(MAX_EVALUATION_WORKERS, loader_processes(data))
        self.fixed_view_loader = FixedViewLoader(layout.largest_share, workers, layout.world_size, layout.rank)
        torch.manual_seed(run.seed)

    def begin_without_labels(self, config: TrainingConfig, train_images: ImageDataset) -> None:
        """Set what all training without labels has besides its model and images.

        Args:
            train_images: that the probe compares with.
        """
        self.builds_on_labels = any(map(learned_labels, first_encoders(config).values()))
        self.licence = licence_of(config.model.init_from)
        evaluated = self.held_out.to_evaluate_on(config.data, config.data.eval_images)
        self.held_out_views = self.fixed_view_loader.add(self.views(evaluated))
        self.probe = self.build_probe(train_images, config.probe, config.model.init_from)

    def build_probe(
        self, train_images: ImageDataset, config: RunProbeConfig, init_from: str | None = None
    ) -> Probe | None:
        """The probe of the held-out images, with these training images; None where `probe.every` is 0.

        Args:
            init_from: weights that the run begins from, whose drift is measured; None: they are random.
        """
        if not config.every:
            return None
        return Probe(
            self.accelerator,
            self.fixed_view_loader,
            train_images,
            self.held_out,
            data=self.data,
            img_size=self.img_size,
            config=config,
            representation=self.representation,
            general=None if config.path is None else self.load_general_images(config),
            start=None if init_from is None else Path(self.run.dir) / START_FILE,
        )

    def load_general_images(self, config: RunProbeConfig) -> GeneralImages:
        """The images of `probe.path`, of a hub dataset those of one commit for all processes, also when resumed."""
        source = general_source(config, self.data)
        folder = Path(self.run.dir)
        begun_with = recorded_commit(folder, REFERENCE)
        commit = on_main_process(self.accelerator, lambda: resolve_commit(source, begun_with))
        with ahead_of_others(self.accelerator.is_main_process):
            return load_general_images(general_source(config, self.data, commit))

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops of these images."""
        return ViewDataset(dataset, self.data, self.img_size, seed=self.run.seed)

    def fixed_views(self, views: ViewDataset, tracker: Tracker) -> Iterator[Batch]:
        """This process's batches of a set of `fixed_view_loader`; undecodable images are named."""
        for batch in self.fixed_view_loader.batches(views):
            tracker.warn_unreadable(batch.unreadable)
            yield batch

    def loss_sums(self, loss: Tensor, batch: Batch) -> Sums:
        """The part of the sums over views whose `loss` divided by `images` is the mean loss."""
        count = loss.new_tensor(len(batch.images), dtype=torch.double)
        return {"loss": loss.double() * count, "images": count}

    def describe(self, sums: Sums) -> dict[str, float]:
        """Scalars of the sums over all batches and processes: the accuracy, if they are those of `count_right`."""
        return {"accuracy": float(sums["right"] / sums["tested"])} if sums else {}

    def exported(self, model: nn.Module) -> nn.Module:
        """The module with the encoder that is probed and exported, and the normalisation of its input."""
        return model

    def after_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Whatever the task does after step `step` (from 0); scalars of it. `model` is without wrappers."""
        return {}

    def record(self) -> dict[str, Any]:
        """The record of the images: see mpp/data/identity.py."""
        commit = None
        if is_hub_dataset(self.data):
            commit = self.data.revision or cached_commit(self.held_out.origin[0])
        retries = self.data.read_retries
        how = self.learns_labels, retries, commit
        train = self.train.identify(commit) if isinstance(self.train, Shards) else identify_images(self.train, *how)
        train[CLASS_NAMES_FIELD] = self.held_out.class_names[: self.held_out.classes]
        if self.label_kind != "class":
            train[LABEL_KIND_FIELD] = self.label_kind
        held_out = identify_images(self.held_out, *how)
        general = self.probe.general.identify(retries) if self.probe and self.probe.general else {}
        return {"train": train, "held_out": held_out} | general

    def describe_images(self) -> str:
        """The images in a line: kind and number, how often each is seen, how many are held out."""
        seen = ""
        if isinstance(self.train, ImageDataset):  # a stream has an unknown number
            times = self.run.steps * self.layout.global_batch_size / len(self.train)
            seen = f", each seen {times:,.2f} times"
        return f"{self.train.describe()}{seen}, {len(self.held_out)} held out"

    def describe_model(self) -> str:
        """The model in a line."""
        parameters, trained = count_parameters(self.model.encoder)
        line = f"{parameters / 1e6:.3g} M parameters in the encoder"
        return line if trained == parameters else f"{line}, {trained / 1e6:.3g} M are trained"

    def export(self, model: nn.Module, folder: Path, name: str = "encoder") -> None:
        """Write the encoder in timm's layout, with the input that it takes, and its model card.

        To be called on the main process. `model` is without wrappers.
        """
        model = self.exported(model)
        encoder = merge(model.encoder)
        if not encoder.num_classes:
            set_pooling(encoder, self.representation)
        builds = ", which builds on an encoder that learned labels" if self.builds_on_labels else ""
        facts = EncoderFacts(
            kind=self.kind + builds,
            model=self.describe_model(),
            method=self.method,
            images=f"{describe_source(self.data)}, {self.train.describe()}",
            how_read=self.data.how_read(),
            step=last_logged_step(read_history(folder)),
            learned_labels=self.learns_labels or self.builds_on_labels,
            label_kind=self.label_kind,
            label_names=self.held_out.class_names[: encoder.num_classes],
            licence=self.licence,
        )
        export_encoder(
            encoder,
            folder / name,
            self.img_size,
            model.normalize.mean,
            model.normalize.std,
            self.data.eval_crop,
            facts,
            model_card(folder, encoder, facts),
        )
