"""From a config to a finished run folder: what every training command does around the loop."""

import dataclasses
import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from mpp.checkpoint import newest_step, open_run, write_config
from mpp.config import CorruptionConfig, DataConfig, RunConfig
from mpp.data import Batch, Share, Views, held_out_loader, training_loader
from mpp.encoder import export_encoder
from mpp.launch import start
from mpp.lock import exclusive
from mpp.loop import fit
from mpp.parsing import to_yaml
from mpp.preemption import MARKER
from mpp.sources import Photographs


class ImageTask:
    """The part of a task (see `mpp.loop.Task`) that is the same whatever is learned from images.

    Subclasses set `model`, which has an `encoder` and a `normalize`, and the images, and say what is learned and what
    it costs.
    """

    model: nn.Module
    corruption: CorruptionConfig | None = None
    patches = 0

    def __init__(self, accelerator: Accelerator, share: Share, run: RunConfig, data: DataConfig):
        self.accelerator, self.share, self.run, self.data = accelerator, share, run, data
        self.train: Photographs
        self.held_out: Photographs
        self.img_size: int
        torch.manual_seed(run.seed)

    def views(self, photographs: Photographs) -> Views:
        """Crops (and corruptions) of these photographs."""
        return Views(photographs, self.data, self.img_size, self.run.seed, self.corruption, self.patches)

    def batches(self, start: int) -> Iterable[Batch]:
        return training_loader(self.views(self.train), self.share, start, self.run.steps)

    def fixed_batches(self, photographs: Photographs) -> Iterable[Batch]:
        """This process's share of photographs, in their fixed view."""
        return held_out_loader(self.views(photographs), self.share.batch, self.share.processes, self.share.rank)

    def describe_model(self) -> str:
        """The model in a line."""
        parameters = sum(parameter.numel() for parameter in self.model.encoder.parameters())
        return f"{parameters / 1e6:.1f} M parameters in the encoder"

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the encoder in timm's layout, with the input that it takes."""
        takes = model.normalize
        export_encoder(model.encoder, folder / "encoder", self.img_size, takes.mean, takes.std, self.data.eval_crop)


def train(config: Any, build: Callable[[Any, Accelerator, Share], ImageTask]) -> Path:
    """Carry out the run that `config` describes, or what is left of it.

    Args:
        config: has `run`, `data` and `optim`.
        build: the task; raises ValueError where config and data do not fit.
    Returns:
        The run folder, finished.
    """
    accelerator = start(config.run)
    precision = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))  # what is saved
    folder = open_run(config)
    if newest_step(folder) == config.run.steps and (folder / "encoder").is_dir():
        accelerator.print(f"{folder} is finished: {config.run.steps} steps, encoder in {folder / 'encoder'}")
        return folder
    share = Share.of(
        config.optim.global_batch_size, config.data.batch_size, accelerator.num_processes, accelerator.process_index
    )
    accelerator.print(to_yaml(config))
    task = build(config, accelerator, share)
    accelerator.print(f"{task.describe_model()}; {len(task.train)} images, {len(task.held_out)} held out")
    with exclusive(open_run(config), accelerator):  # looked at again: building may have taken long
        if accelerator.is_main_process:
            write_config(config, folder)
            (folder / MARKER).unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        fit(task, accelerator, config.run, config.optim, share, folder, config, task.flops())
        accelerator.wait_for_everyone()
    accelerator.free_memory()
    gc.collect()  # a prepared model refers to itself; a process may have other runs to do
    accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
    return folder


def last_evaluation(folder: Path) -> dict[str, float]:
    """The scalars of the last evaluation of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if "heldout/loss" in line)
