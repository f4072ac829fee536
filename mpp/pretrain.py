"""Masked patch prediction pre-training (Dosovitskiy et al., ICLR 2021, section 4.6 and appendix B.1.2).

    accelerate launch mpp/pretrain.py --config configs/birds.yaml

Hide half of an image's patches, and predict the mean colour of each from what is left.
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

from mpp.config import Config, ModelConfig, SourceConfig, refuse_idle, require
from mpp.config.command_line import as_command_line
from mpp.config.keys import plain
from mpp.config.parsing import parse
from mpp.config.saved import parse_saved
from mpp.corruption import Corruption, draw
from mpp.data.identity import short_digest
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.data.stream_sources import load_streamed
from mpp.data.views import Batch, collate
from mpp.errors import UserError
from mpp.features.metrics import Sums, measure, measure_features, summarize
from mpp.features.reconstructions import COLUMNS, prediction_columns, prediction_panel
from mpp.models.descriptions import how_read, learned_labels
from mpp.models.networks import build_model
from mpp.models.teachers import moving_average_decay, update_moving_average
from mpp.models.timm_models import cell_grid
from mpp.runtime.messages import note
from mpp.runtime.randomness import FIXED
from mpp.runtime.start import command
from mpp.training.checkpoint import restore_trained
from mpp.training.flops import executed_flops
from mpp.training.health import Facts, targets_collapse
from mpp.training.log import Tracker
from mpp.training.loop import due
from mpp.training.run import train
from mpp.training.run_folder import REPORT_PAGE, saved_settings
from mpp.training.task import ImageTask
from mpp.training.watch import read_verdict

PANEL_IMAGES = 8


class Pretraining(ImageTask):
    """The task: predict what the corrupted patches looked like."""

    def __init__(self, config: Config, accelerator: Accelerator, layout: BatchLayout):
        super().__init__(accelerator, layout, config.run, config.data)
        self.config, self.corruption = config, config.corruption
        if config.corruption.source == "batch":
            require(layout.smallest > 1, "data.batch_size", layout.smallest, "above 1 with corruption.source=batch")
        self.model, self.objective = build_model(config)
        encoder = self.model.encoder
        self.img_size = encoder.patch_embed.img_size
        self.grid, self.patch_size = cell_grid(encoder)
        self.patches = math.prod(self.grid)
        self.corrupted = len(draw(config.corruption, self.grid, config.run.seed, 0, 0).positions)
        self.taught = config.objective.name == "features"
        self.moving = self.taught and config.objective.frozen_teacher is None
        if self.taught and not self.moving:
            note_other_reading(config)
        others = filter(None, (config.model.init_from, config.objective.frozen_teacher))
        self.builds_on_labels = any(map(learned_labels, others))
        if config.data.streaming:
            probed = config.probe.images if config.probe.every else 0
            with accelerator.local_main_process_first():  # machines may have no disk in common
                parts = load_streamed(config.data, probed, config.data.eval_images)
            self.train, known, self.held_out = parts
        else:
            with accelerator.main_process_first():
                train, self.held_out = load_image_datasets(config.data)
            self.train = known = train.choose(config.data.train_images, config.data.eval_seed)
        judged = self.held_out.choose(config.data.eval_images, config.data.cut_seed)
        self.judged = self.evaluation.add(self.views(judged))
        self.probe = self.build_probe(known, config.probe)

    @property
    def method(self) -> str:
        begun = self.config.model.init_from
        how = f"Pre-trained without labels{f', from {begun},' if begun else ''} by {self.model.method}"
        if not self.model.encoder.has_class_token:
            return how
        return (
            f"{how}. Its [class] token got no gradient of its own: the mean of the patch tokens is mostly the better "
            "feature"
        )

    def loss(self, model: nn.Module, batch: Batch, measure_too: bool) -> tuple[Tensor, Sums]:
        device = self.accelerator.device
        images = batch.images.to(device, non_blocking=True)
        corruption = batch.corruption.to(device)
        predictions, targets, shown = self.outputs(model, images, corruption)
        loss = self.objective.loss(predictions, targets)
        if not measure_too:
            return loss, {}
        if self.taught:
            return loss, measure_features(predictions.detach(), shown, corruption.positions, self.patches)
        return loss, measure(self.objective, predictions.detach(), images, corruption)

    def outputs(self, model: nn.Module, images: Tensor, corruption: Corruption) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions (B, K, outputs) float32, their targets (B, K, ...), and what shows a collapse of these."""
        found = model(images, corruption)
        if self.taught:
            return found
        targets = self.objective.targets(images, corruption.positions)
        return found, targets, targets

    def after_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Move the teacher, where it is the moving average."""
        if not self.moving:
            return {}
        decay = moving_average_decay(self.config.objective.half_life, step, self.config.run.steps)
        update_moving_average(model.teacher.encoder, model.encoder, decay)
        return {"teacher/decay": decay}

    def refuse_to_continue(self, scalars: dict[str, float]) -> None:
        """Stop, if `objective.stop_on_collapse`, when the targets have become the same for all patches."""
        if self.config.objective.stop_on_collapse:
            found = targets_collapse([scalars | {"step": 0}], Facts(0, 0, self.config.optim.lr, moving=self.moving))
            if found:
                raise UserError(f"targets collapse: {found}")

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"moving": self.moving}

    def exported(self, model: nn.Module) -> nn.Module:
        """What has the encoder that is probed and exported, and the normalisation of its input."""
        return model.teacher if self.config.objective.export == "teacher" else model

    def export(self, model: nn.Module, folder: Path, name: str = "encoder") -> None:
        super().export(self.exported(model), folder, name)

    def describe(self, sums: Sums) -> dict[str, float]:
        return summarize(sums)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, step: int, tracker: Tracker) -> dict[str, float]:
        scalars = {f"heldout/{name}": value for name, value in self.judge(model, self.judged, tracker).items()}
        if self.accelerator.is_main_process:
            self.log_panel(model, step, tracker)
        if due(step, self.config.probe.every, self.config.run.steps):
            scalars |= self.probe(self.exported(model))
        return scalars

    def log_panel(self, model: nn.Module, step: int, tracker: Tracker) -> None:
        """A picture of original | corrupted | predicted | true for the first held-out images."""
        found = self.predict(model, range(min(PANEL_IMAGES, len(self.held_out))))
        columns = prediction_columns(self.objective, *found)
        tracker.log_images(step, " | ".join(COLUMNS), prediction_panel(columns)[None])

    @torch.no_grad()
    def predict(self, model: nn.Module, indices: Iterable[int]) -> tuple[Tensor, Tensor, Tensor, Corruption]:
        """Predictions (B, K, outputs), targets (B, K, ...), held-out images (B, C, H, W) at `indices`, their fixed
        corruption."""
        views = self.views(self.held_out)
        batch = collate([views[FIXED, index] for index in indices])
        images, corruption = batch.images.to(self.accelerator.device), batch.corruption.to(self.accelerator.device)
        predictions, targets, _ = self.outputs(model, images, corruption)
        return predictions.float(), targets, images, corruption

    def record(self) -> dict[str, Any]:
        """Which images these are, and which weights teach that timm has published: others have files of their own."""
        objective, known = self.config.objective, super().record()
        if objective.frozen_teacher is None or objective.teacher_checkpoint or Path(objective.teacher).exists():
            return known
        tensors = (tensor.cpu().numpy().tobytes() for tensor in self.model.teacher.encoder.state_dict().values())
        return known | {"objective.teacher": {"weights": short_digest(tensors)}}

    def flops(self) -> int:
        sample = collate([self.views(self.held_out)[FIXED, 0]])
        return executed_flops(self.model, sample.images, sample.corruption)

    def describe_model(self) -> str:
        encoder, model = self.model.encoder, self.config.model
        tokens = encoder.patch_embed.num_patches
        overlap = f" ({tokens} that overlap)" if tokens != self.patches else ""
        choices = {"position": model.position, "position_at": model.position_at, "mixing": model.mixing}
        kind = "".join(f", {key} {value}" for key, value in choices.items() if value != getattr(ModelConfig(), key))
        return (
            f"{model.name or 'ViT'}{kind}: width {encoder.embed_dim}, depth {len(encoder.blocks)}, "
            f"{self.patches} patches of {self.patch_size} x {self.patch_size}{overlap}, {self.corrupted} corrupted, "
            f"{self.model.on_top}, {super().describe_model()}"
        )


def note_other_reading(config: Config) -> None:
    """Say that the teacher learned from pixels that were read in another way."""
    theirs, own = how_read(config.objective.frozen_teacher), plain(config.data.how_read())
    if theirs and theirs != own:
        note(f"objective.teacher learned from images of data {theirs}; here they are {own or 'as usual'}")


def reopen(
    folder: Path, source: SourceConfig, eval_crop: float | None, held_out_images: int, accelerator: Accelerator
) -> Pretraining:
    """A run's task with the weights of its newest checkpoint, and perhaps other images: to see what it predicts.

    Args:
        folder: of a pre-training run.
        source: the images.
        eval_crop: of the held-out view; None: the run's.
        held_out_images: at most so many of them, a seeded choice.
    Raises:
        ValueError: no pre-training run, or no checkpoint there.
    """
    saved = folder / "config.yaml"
    require(is_pretraining(folder), "encoder", folder, "the folder of a pre-training run, which has the colour head")
    config = parse_saved(Config, saved)
    images = {field.name: getattr(source, field.name) for field in dataclasses.fields(SourceConfig)}
    data = dataclasses.replace(config.data, **images, eval_crop=eval_crop or config.data.eval_crop)
    model = dataclasses.replace(config.model, init_from=None)  # the checkpoint has the weights
    task = Pretraining(
        dataclasses.replace(config, data=data, model=model), accelerator, BatchLayout(PANEL_IMAGES, 1, 1, 0)
    )
    step = restore_trained(folder, task.model, config.optim)
    require(step > 0, "encoder", folder, "a run with a checkpoint that is whole")
    task.model.to(accelerator.device).eval()
    task.held_out = task.held_out.choose(held_out_images, data.cut_seed)
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
        UserError: a setting that has no effect, or anything that the command would say in one line.
    """
    if not isinstance(config, Config):
        config = parse(Config, as_command_line(config or {}))
    refuse_idle(config)
    return train(config, Pretraining)


def main(arguments: Sequence[str] | None = None) -> None:
    """Pre-train as the command line, or `arguments`, say."""
    config = parse(Config, arguments, prog="accelerate launch mpp/pretrain.py")
    folder = train(config, Pretraining)
    if PartialState().is_main_process:
        say_what_came_out(folder)


def say_what_came_out(folder: Path) -> None:
    """The run's verdict, and what to do next."""
    line = read_verdict(folder).get("line")
    if line:
        print(f"verdict: {line}")
    page = folder / REPORT_PAGE
    print(f"next: {f'open {page}, or ' if page.is_file() else ''}tensorboard --logdir {quote(str(folder.parent))}")
    print(f"next: mpp fewshot --encoder {quote(str(folder))}")


if __name__ == "__main__":
    command(main)
