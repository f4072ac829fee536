"""From a config to a finished run folder: what every training command does around the loop."""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, release_memory
from torch import nn

from mpp.config import CorruptionConfig, DataConfig, RunConfig
from mpp.corruption import Grid
from mpp.data.record import record
from mpp.data.shards import Shards, streaming_loader
from mpp.data.sources import ImageDataset, describe
from mpp.data.views import Batch, BatchLayout, EvaluationLoader, ViewDataset, hold, training_loader
from mpp.data.workers import FORKS, deaths_explained, kill_workers
from mpp.encoder import export_encoder, fingerprint
from mpp.errors import UserError
from mpp.runtime.launch import start
from mpp.runtime.lock import exclusive
from mpp.runtime.parsing import to_yaml
from mpp.runtime.preemption import MARKER, Preemption
from mpp.runtime.processes import TRAINING, set_timeout
from mpp.training.card import model_card
from mpp.training.checkpoint import Places, is_finished, is_ours, note_images, open_run, write_config
from mpp.training.flops import update_flops
from mpp.training.loop import Loop, fit

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
    grid: Grid = (0, 0)
    randaugment = 0
    learns_labels = False
    """Whether the training images' labels are learned from."""

    def __init__(self, accelerator: Accelerator, layout: BatchLayout, run: RunConfig, data: DataConfig):
        self.accelerator, self.layout, self.run, self.data = accelerator, layout, run, data
        self.evaluation = EvaluationLoader(layout, data.workers)
        self.train: ImageDataset | Shards
        self.held_out: ImageDataset
        self.img_size: int
        torch.manual_seed(run.seed)

    def views(self, dataset: ImageDataset | Shards) -> ViewDataset:
        """Crops (and corruptions) of these images."""
        return ViewDataset(
            dataset, self.data, self.img_size, self.run.seed, self.corruption, self.grid, self.randaugment
        )

    def batches(self, start: int, places: Places) -> Iterable[Batch]:
        if self.data.streaming:
            return streaming_loader(self.views(self.train), self.layout, start, self.run.steps, places)
        return training_loader(self.training_views(start), self.layout, start, self.run.steps)

    def training_views(self, start: int) -> ViewDataset:
        """Crops of the training images from update `start` on; of decoded images, where they fit and recur."""
        images = (self.run.steps - start) * self.layout.images // self.layout.world_size  # of this process
        inherited = self.data.workers == 0 or FORKS
        if images < 2 * len(self.train) or not inherited:
            return self.views(self.train)
        views = self.views(hold(self.train, self.data))
        few_cores = self.accelerator.device.type == "cpu" and torch.get_num_threads() <= FEW_THREADS
        if views.dataset.decoded and few_cores and not views.costly:
            return dataclasses.replace(views, data=dataclasses.replace(self.data, workers=0))
        return views

    def name(self, index: int) -> str:
        return self.train.name(index)

    def record(self) -> dict[str, Any]:
        """Which images these are: see mpp/data/record.py."""
        retries = self.data.read_retries
        return {
            "train": self.train.record(retries)
            if isinstance(self.train, Shards)
            else record(self.train, self.learns_labels, retries),
            "held_out": record(self.held_out, self.learns_labels, retries),
        }

    def describe_model(self) -> str:
        """The model in a line."""
        parameters = sum(parameter.numel() for parameter in self.model.encoder.parameters())
        return f"{parameters / 1e6:.1f} M parameters in the encoder"

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the encoder in timm's layout, with the input that it takes, and its model card."""
        normalize, images = model.normalize, f"{describe(self.data)}, {self.train.describe()}"
        card = model_card(folder, model.encoder, self.describe_model(), self.method, images)
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
    run, optim = dataclasses.replace(config.run, precision=precision), config.optim.settled(config.run.steps)
    config = dataclasses.replace(config, run=run, optim=optim)  # what is saved
    folder = Path(config.run.dir)
    if accelerator.is_main_process and folder.is_dir() and is_ours(folder):
        (folder / MARKER).unlink(missing_ok=True)  # before anything can fail: a script may repeat what has the marker
    open_run(config)
    if is_finished(folder, config.run.steps):
        accelerator.print(f"{folder} is finished: {config.run.steps} steps, encoder in {folder / 'encoder'}")
        return folder
    with Preemption(accelerator, folder) as preemption:
        try:
            with deaths_explained():
                carry_out(config, folder, build, accelerator, preemption)
        except BaseException as error:
            kill_workers()
            forget_variables(error)
            raise
        finally:
            release(accelerator)
        accelerator.print(f"wrote {folder}: encoder/ (timm's layout), checkpoints/, metrics.jsonl, config.yaml")
        if preemption.asked_of_any():
            preemption.leave("when this run was finished")  # there may be others to come
    return folder


def first_weights(config: Any) -> dict[str, Any]:
    """Which weights a run begins from, for its record; nothing where they are random, or not there any more."""
    path = getattr(getattr(config, "model", None), "init_from", None)
    weights = fingerprint(Path(path)) if path else None
    return {"model.init_from": {"weights": weights}} if weights else {}


def check_beginning(config: Any, task: ImageTask, folder: Path, accelerator: Accelerator) -> None:
    """Note which images and weights the run is of; UserError on every process where it began with others."""
    problem = None
    if accelerator.is_main_process:
        try:
            problem = note_images(folder, task.record() | first_weights(config))
        except UserError as error:
            problem = str(error)
    problems = [each for each in gather_object([problem]) if each]
    if problems:
        raise UserError(problems[0])


def carry_out(config: Any, folder: Path, build: Callable, accelerator: Accelerator, preemption: Preemption) -> None:
    """Build the task, and train it in a folder that is ours."""
    layout = BatchLayout.of(
        config.optim.global_batch_size, config.data.batch_size, accelerator.num_processes, accelerator.process_index
    )
    accelerator.print(to_yaml(config))
    if layout.smallest < layout.batch_size:
        passes = layout.accumulation_steps * layout.world_size
        shares = f"{passes} shares of {layout.smallest} or {layout.batch_size}"
        accelerator.print(f"{layout.images} images an update, in {shares}; the gradient is that of their mean")
    task = build(config, accelerator, layout)
    accelerator.print(f"{task.describe_model()}; {task.train.describe()}, {len(task.held_out)} held out")
    with exclusive(folder, accelerator):
        if accelerator.is_main_process:
            open_run(config)  # once more: building may have taken long
            write_config(config, folder)
        check_beginning(config, task, folder, accelerator)
        flops, preemption.finish_step = update_flops(task, layout.images, config.optim), True
        set_timeout(TRAINING)
        loop = Loop(task, accelerator, config.run, config.optim, layout, folder, config, flops)
        fit(loop, preemption)
        accelerator.wait_for_everyone()


def forget_variables(error: BaseException | None) -> None:
    """Let go of what an exception keeps alive while somebody handles it: the variables of the functions it left."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def release(accelerator: Accelerator) -> None:
    """Close the trackers and free memory for other runs of this process; the process group stays."""
    for tracker in accelerator.trackers:
        try:
            tracker.finish()
        except OSError as error:  # a full disk, which is not to take the place of what ended the run
            print(f"warning: {tracker.name} cannot be closed: {error}", file=sys.stderr)
    accelerator.free_memory()
    release_memory()  # once more, without accelerate's references: a prepared model refers to itself
    torch.compiler.reset()  # what is compiled for this model would count against the next
