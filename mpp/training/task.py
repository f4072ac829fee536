"""From a config to a finished run folder: what every training command does around the loop."""

import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from mpp.config import CorruptionConfig, DataConfig, RunConfig
from mpp.data.shards import Shards, streaming_loader
from mpp.data.sources import ImageDataset, describe
from mpp.data.views import Batch, BatchLayout, ViewDataset, held_out_loader, hold, training_loader
from mpp.data.workers import deaths_explained
from mpp.encoder import export_encoder
from mpp.runtime.launch import start
from mpp.runtime.lock import exclusive
from mpp.runtime.parsing import to_yaml
from mpp.runtime.preemption import MARKER, Preemption
from mpp.training.card import model_card
from mpp.training.checkpoint import Places, is_ours, newest_step, open_run, write_config
from mpp.training.loop import fit

FEW_THREADS = 2  # a crop of a decoded image is a tenth of its update then, and loader processes would take more


class ImageTask:
    """The part of a task (see `mpp.training.loop.Task`) that is the same whatever is learned from images.

    Subclasses set `model`, which has an `encoder` and a `normalize`, and the images, and say what is learned and what
    it costs.
    """

    model: nn.Module
    method: str
    """How it is trained, for the model card."""
    corruption: CorruptionConfig | None = None
    patches = 0
    randaugment = 0

    def __init__(self, accelerator: Accelerator, layout: BatchLayout, run: RunConfig, data: DataConfig):
        self.accelerator, self.layout, self.run, self.data = accelerator, layout, run, data
        self.train: ImageDataset | Shards
        self.held_out: ImageDataset
        self.img_size: int
        torch.manual_seed(run.seed)

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops (and corruptions) of these images."""
        return ViewDataset(
            dataset, self.data, self.img_size, self.run.seed, self.corruption, self.patches, self.randaugment
        )

    def batches(self, start: int, places: Places) -> Iterable[Batch]:
        if self.data.streaming:
            return streaming_loader(self.views(self.train), self.layout, start, self.run.steps, places)
        return training_loader(self.training_views(start), self.layout, start, self.run.steps)

    def training_views(self, start: int) -> ViewDataset:
        """Crops of the training images from update `start` on; of decoded images, where they fit and recur."""
        images = (self.run.steps - start) * self.layout.batch_size * self.layout.accumulation_steps  # of this process
        inherited = self.data.workers == 0 or multiprocessing.get_start_method() == "fork"  # else each had its copy
        if images < 2 * len(self.train) or not inherited:
            return self.views(self.train)
        views = self.views(hold(self.train, self.data))
        few_cores = self.accelerator.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS
        if views.dataset.decoded and few_cores and not views.costly:
            return dataclasses.replace(views, data=dataclasses.replace(self.data, workers=0))
        return views

    def name(self, index: int) -> str:
        return self.train.name(index)

    def fixed_batches(self, dataset: ImageDataset) -> Iterable[Batch]:
        """This process's share of these images, in their fixed view."""
        return held_out_loader(self.views(dataset), self.layout.batch_size, self.layout.world_size, self.layout.rank)

    def describe_model(self) -> str:
        """The model in a line."""
        parameters = sum(parameter.numel() for parameter in self.model.encoder.parameters())
        return f"{parameters / 1e6:.1f} M parameters in the encoder"

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the encoder in timm's layout, with the input that it takes, and its model card."""
        normalize, images = model.normalize, f"{describe(self.data)}, {self.train.describe()}"
        card = model_card(folder, self.describe_model(), self.method, images)
        input_config = (self.img_size, normalize.mean, normalize.std, self.data.eval_crop)
        export_encoder(model.encoder, folder / "encoder", *input_config, card)


def train(config: Any, build: Callable[[Any, Accelerator, BatchLayout], ImageTask]) -> Path:
    """Carry out the run that `config` describes, or what is left of it.

    Args:
        config: has `run`, `data` and `optim`.
        build: the task; raises UserError where config and data do not fit.
    Returns:
        The run folder, finished.
    """
    accelerator = start(config.run)
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))  # what is saved
    folder = Path(config.run.dir)
    if accelerator.is_main_process and folder.is_dir() and is_ours(folder):
        (folder / MARKER).unlink(missing_ok=True)  # before anything can fail: a script may repeat what has the marker
    open_run(config)
    if newest_step(folder) == config.run.steps and (folder / "encoder").is_dir():
        accelerator.print(f"{folder} is finished: {config.run.steps} steps, encoder in {folder / 'encoder'}")
        return folder
    with deaths_explained(), Preemption(accelerator, folder) as preemption:
        carry_out(config, folder, build, accelerator, preemption)
        accelerator.free_memory()
        gc.collect()  # a prepared model refers to itself; a process may have other runs to do
        torch.compiler.reset()  # and what is compiled for this model would count against the next
        accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
        if preemption.asked_of_any():
            preemption.leave("when this run was finished")  # there may be others to come
    return folder


def carry_out(config: Any, folder: Path, build: Callable, accelerator: Accelerator, preemption: Preemption) -> None:
    """Build the task, and train it in a folder that is ours."""
    layout = BatchLayout.of(
        config.optim.global_batch_size, config.data.batch_size, accelerator.num_processes, accelerator.process_index
    )
    accelerator.print(to_yaml(config))
    task = build(config, accelerator, layout)
    accelerator.print(f"{task.describe_model()}; {task.train.describe()}, {len(task.held_out)} held out")
    with exclusive(folder, accelerator):
        if accelerator.is_main_process:
            open_run(config)  # once more: building may have taken long
            write_config(config, folder)
        accelerator.wait_for_everyone()
        flops, preemption.finish_step = task.flops(), True
        fit(task, accelerator, config.run, config.optim, layout, folder, config, flops, preemption)
        accelerator.wait_for_everyone()
