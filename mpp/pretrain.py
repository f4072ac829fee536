"""Masked patch prediction pre-training (Dosovitskiy et al., ICLR 2021, section 4.6 and appendix B.1.2).

    accelerate launch mpp/pretrain.py --config configs/birds.yaml

Mask half of an image's patches, and predict the mean colour of each from the others.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from mpp.config import Config, RunProbeConfig, SourceConfig, require
from mpp.config.parsing import as_command_line, check_given, parse, parse_saved
from mpp.corruption import Corruption, draw
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout
from mpp.data.shards import Shards, load_streamed
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, ViewDataset, collate
from mpp.features.metrics import (
    Sums,
    add_sums,
    measure_features,
    measure_predictions,
    save_masked_counts,
    sum_over_processes,
    summarize,
)
from mpp.features.reconstructions import COLUMNS, prediction_columns, prediction_panel
from mpp.models.adaptation import describe_adaptation
from mpp.models.networks import build_model
from mpp.models.plain import cell_grid, has_class
from mpp.models.teachers import PredictedBatch, moving_average_decay, update_moving_average, with_targets
from mpp.runtime.files import short_digest
from mpp.runtime.processes import ahead_of_others, on_main_process
from mpp.runtime.randomness import FIXED_VIEW
from mpp.runtime.start import run_main
from mpp.training.checkpoint import restore_trained
from mpp.training.flops import executed_flops
from mpp.training.log import Tracker, read_history
from mpp.training.run import train
from mpp.training.run_folder import CONFIG_FILE, REPORT_PAGE, parts_named, saved_settings
from mpp.training.task import ImageTask
from mpp.training.verdict import read_verdict

PANEL_IMAGES = 8
CLASS_IS_UNTRAINED = (
    "Its [class] token got no gradient of its own: the mean of the patch tokens is usually the better feature"
)


class Pretraining(ImageTask):
    """The task: predict the target of each corrupted patch."""

    def __init__(self, config: Config, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        parts_named(config)  # raises where one has arguments for nothing
        self.config = config
        self.model, self.objective = build_model(config)
        encoder = self.model.encoder
        self.img_size = encoder.patch_embed.img_size
        self.grid, self.patch_size = cell_grid(encoder)
        self.patch_count = math.prod(self.grid)
        self.corrupted_count = len(draw(config.corruption, self.grid, config.run.seed, 0, 0).positions)
        self.begin_without_labels(config, self.load_images(config))

    def load_images(self, config: Config) -> ImageDataset:
        """Load the training and the held-out images.

        Returns:
            The training images that the probe compares with.
        """
        data = config.data
        if data.streaming:
            probe_images = config.probe.images if config.probe.every else 0
            is_first = self.accelerator.is_local_main_process  # machines may have no disk in common
            with ahead_of_others(is_first):
                self.train, train_images, self.held_out = load_streamed(data, probe_images, data.eval_images)
            return train_images
        with ahead_of_others(self.accelerator.is_main_process):
            train, self.held_out = load_image_datasets(data)
        self.train = train.to_train_on(data)
        return self.train

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops of these images and their corruptions."""
        return dataclasses.replace(
            super().views(dataset),
            corruption=self.config.corruption,
            grid=self.grid,
        )

    @property
    def method(self) -> str:
        """The encoder's training in a sentence, for the model card."""
        init_from = self.config.model.init_from
        start = f", from {init_from}," if init_from else ""
        sentences = [f"Pre-trained without labels{start} by {self.model.method}"]
        sentences.append(describe_adaptation(self.config.model))
        if has_class(self.model.encoder):
            sentences.append(CLASS_IS_UNTRAINED)
        return ". ".join(filter(None, sentences))

    def loss(self, model: nn.Module, batch: Batch, measure: bool) -> tuple[Tensor, Sums]:
        """Mean loss of the corrupted patches and, if asked, sums for accuracies or for the spread of features."""
        predicted, images, corruption = self.predict_batch(model, batch)
        loss = self.objective.loss(predicted.predictions, predicted.targets)
        if not measure:
            return loss, {}
        predictions = predicted.predictions.detach()
        features = predicted.collapse_features
        if features is not None:
            return loss, measure_features(predictions, features, corruption.positions, self.patch_count)
        image_numbers = None if model.training else batch.indices  # of held-out images
        count = len(self.held_out_views.dataset)
        return loss, measure_predictions(self.objective, predictions, images, corruption, image_numbers, count)

    def predict_batch(self, model: nn.Module, batch: Batch) -> tuple[PredictedBatch, Tensor, Corruption]:
        """Predictions and targets of a batch, with its images (B, C, H, W) and their corruption on the device.

        Raises:
            UserError: the predictions are not (images, corrupted patches, outputs), which a loss might not notice.
        """
        images = batch.images.to(self.accelerator.device, non_blocking=True)
        corruption = batch.corruption.to(self.accelerator.device)
        predicted = with_targets(model(images, corruption), self.objective, images, corruption)
        shape, expected = predicted.predictions.shape, (*corruption.positions.shape, self.objective.outputs)
        require(shape == expected, "the shape of the network's predictions", shape, expected)
        return predicted, images, corruption

    def after_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Move the teacher, if it is a moving average."""
        objective = self.config.objective
        if not objective.moves_teacher:
            return {}
        decay = moving_average_decay(objective.half_life, step, self.config.run.steps)
        update_moving_average(model.teacher.encoder, model.encoder, decay)
        return {"teacher/decay": decay}

    def exported(self, model: nn.Module) -> nn.Module:
        return model.teacher if self.config.objective.export == "teacher" else model

    def describe(self, sums: Sums) -> dict[str, float]:
        return summarize(sums)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        sums: Sums = {}
        for batch in self.fixed_views(self.held_out_views, tracker):
            loss, measured = self.loss(model, batch, True)
            sums = add_sums(sums, measured | self.loss_sums(loss, batch))
        sums = sum_over_processes(sums)
        described = {"loss": float(sums["loss"] / sums["images"])} | self.describe(sums)
        on_main_process(self.accelerator, lambda: self.log_panel(model, step, tracker))
        if self.accelerator.is_main_process and "by_image" in sums:
            names = self.held_out_views.dataset.image_names()
            save_masked_counts(Path(self.config.run.dir), step, sums["by_image"].numpy(), names)
        return {f"heldout/{name}": value for name, value in described.items()}

    def log_panel(self, model: nn.Module, step: int, tracker: Tracker) -> None:
        """A picture of original | corrupted | predicted | true for the first held-out images."""
        prediction = self.predict(model, range(min(PANEL_IMAGES, len(self.held_out))))
        columns = prediction_columns(self.objective, *prediction)
        tracker.log_images(step, " | ".join(COLUMNS), prediction_panel(columns)[None])

    @torch.no_grad()
    def predict(self, model: nn.Module, indices: Iterable[int]) -> tuple[Tensor, Tensor, Tensor, Corruption]:
        """Predict held-out images under their fixed corruption.

        Returns:
            predictions: (B, K, outputs).
            targets: (B, K, ...).
            images: (B, C, H, W).
            corruption: of them.
        """
        views = self.views(self.held_out)
        batch = collate([views[FIXED_VIEW, index] for index in indices])
        predicted, images, corruption = self.predict_batch(model, batch)
        return predicted.predictions.float(), predicted.targets, images, corruption

    def record(self) -> dict[str, Any]:
        """The record of the images and of a teacher's weights; `fingerprint_first_weights` replaces that of a file."""
        record = super().record()
        if self.config.objective.frozen_teacher:
            weights = self.model.teacher.encoder.state_dict().values()
            record["objective.teacher"] = {"weights": short_digest(each.cpu().numpy().tobytes() for each in weights)}
        return record

    def flops(self) -> int:
        sample = collate([self.views(self.held_out)[FIXED_VIEW, 0]])
        return executed_flops(self.model, sample.images, sample.corruption)

    def describe_model(self) -> str:
        encoder = self.model.encoder
        return (
            f"{self.config.model.name or 'ViT'}: width {encoder.embed_dim}, depth {len(encoder.blocks)}, "
            f"{self.patch_count} patches of {self.patch_size} x {self.patch_size}, {self.corrupted_count} corrupted, "
            f"{self.model.on_top}, {super().describe_model()}"
        )


def reopen(folder: Path, source: SourceConfig, held_out_images: int, accelerator: Accelerator) -> Pretraining:
    """The task of a run, with the weights of its newest checkpoint, and perhaps other images: to see its predictions.

    Args:
        folder: of a pre-training run: see `is_pretraining`.
        source: of the images, with an `eval_crop`, where None is the run's.
        held_out_images: the largest number of held-out images, a seeded choice.
    Raises:
        UserError: no checkpoint there.
    """
    config = parse_saved(Config, folder / CONFIG_FILE)
    images = {field.name: getattr(source, field.name) for field in dataclasses.fields(SourceConfig)}
    is_stream = config.data.streaming and source.path == config.data.path
    eval_crop = source.eval_crop or config.data.eval_crop
    data = dataclasses.replace(config.data, **images, eval_crop=eval_crop, streaming=is_stream)
    model = dataclasses.replace(config.model, init_from=None)  # the checkpoint has the weights
    config = dataclasses.replace(config, data=data, model=model, probe=RunProbeConfig(every=0))
    task = Pretraining(config, accelerator, BatchLayout(PANEL_IMAGES, 1, 1, 0))
    step = restore_trained(folder, task.model, config.optim)
    require(step > 0, "encoder", folder, "a run with an intact checkpoint")
    task.model.to(accelerator.device).eval()
    task.held_out = task.held_out.to_evaluate_on(data, held_out_images)
    return task


def is_pretraining(folder: Path) -> bool:
    """Whether this is the folder of a pre-training run: its config has an objective."""
    return "objective" in saved_settings(folder)


def pretrain(config: Config | Mapping[str, Any] | None = None) -> Path:
    """Pre-train as a config says: `pretrain({"data.path": "FOLDER", "run.steps": 600})`, in a notebook for example.

    Args:
        config: settings by name, as on the command line, `config` (a file or several) among them; or a whole config.
            None: the default.
    Returns:
        The run folder, finished: `mpp.load_encoder` takes it.
    Raises:
        UserError: a setting that has no effect, or any error that the command reports in one line.
    """
    if not isinstance(config, Config):
        config = parse(Config, as_command_line(config or {}))
    check_given(config, Config())
    return train(config, Pretraining)


def main(arguments: Sequence[str] | None = None) -> None:
    """Pre-train with the settings of the command line, or of `arguments`."""
    config = parse(Config, arguments)
    folder = train(config, Pretraining)
    if PartialState().is_main_process:
        print_next_steps(folder)


def print_next_steps(folder: Path) -> None:
    """Print the run's verdict, and commands to continue with."""
    line = read_verdict(folder).get("line")
    if line:
        print(f"verdict: {line}")
    page = folder / REPORT_PAGE
    ways = [f"open {page}"] if page.is_file() else []
    if any(folder.glob("events.out.tfevents.*")):
        ways.append(f"tensorboard --logdir {quote(str(folder.parent))}")
    if ways:
        print(f"next: {', or '.join(ways)}")
    has_labels = any(name.startswith("knn/") for line in read_history(folder) for name in line)
    print(f"next: mpp {'fewshot' if has_labels else 'visualize'} --encoder {quote(str(folder))}")


if __name__ == "__main__":
    run_main(main)
