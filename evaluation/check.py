"""Images, crops, memory, time and disk before a long run: `mpp check`.

    mpp check --data.path FOLDER --run.dir runs/mine --run.steps 20000

The settings are those of `mpp pretrain`. Up to 2,000 images of each split are read, and broken ones are named. A few
steps are timed, and nothing of them is kept. Crops, each next to the model's input, are drawn to `check_crops.png` in
the run folder.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torchvision.io import write_png
from torchvision.utils import make_grid

from evaluation.memory import bytes_of, peak_memory
from mpp.config import Config
from mpp.config.parsing import parse
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout, fixed_view_batches
from mpp.data.moments import channel_moments, with_moments
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained
from mpp.features.reconstructions import as_seen, prediction_panel, stretch
from mpp.pretrain import Pretraining
from mpp.runtime.messages import counted, progress_bar
from mpp.runtime.start import run_main, start_alone
from mpp.training.checkpoint import newest_step
from mpp.training.log import memory_bytes
from mpp.training.loop import TrainingStep, training_batches
from mpp.training.run import describe_overrides, resolve_config
from mpp.training.run_folder import CHECK_CROPS, branch_point, refuse_other_run, refuse_other_trunk, steps_to_keep

TIMED_STEPS = 5  # and one before, which warms up
MAX_TIMED_SECONDS = 15.0
CROPS_SHOWN = 32
MOST_READ = 2000  # images of a split
IMAGES_PER_READ = 16


class StepCost(NamedTuple):
    """Cost of a step on this machine."""

    seconds: float
    seconds_waiting: float
    """Part of these in which the step waits for its images."""
    memory: int
    """Bytes."""
    checkpoint: int
    """Bytes of a checkpoint."""


def check(config: Config) -> Path:
    """Check a run before it begins: print its plan, and draw some of its crops; return the run folder.

    Raises:
        UserError: a setting or images with which the run would not begin either.
    """
    asked = config = config.in_named_folder()
    accelerator = start_alone(config.run, "a check is made")
    folder = Path(config.run.dir)
    config = resolve_config(config, accelerator)
    refuse_other_run(config, folder)
    if config.run.branch_from is not None and not newest_step(folder):
        refuse_other_trunk(config)
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
    with deaths_explained():
        if "auto" in (config.model.mean, config.model.std):
            config = replace(config, model=with_moments(config.model, *channel_moments(config.data)))
        task = Pretraining(config, accelerator, layout)
        read, unreadable = read_images(task)
        cost, batch = time_steps(task, config)
    print(f"model: {task.describe_model()}")
    print(f"images: {describe_source(config.data)}: {task.describe_images()}, {config.data.channels} channels")
    print(describe_overrides(asked))
    print_cost(config, cost)
    print(f"memory on a GPU, counted (mpp memory): {memory_on_a_gpu(asked, layout)}")
    print(f"read {', '.join(read)}")
    if unreadable:
        print("\n  ".join([f"warning: {counted(len(unreadable), 'image')} cannot be decoded:", *sorted(unreadable)]))
    folder.mkdir(parents=True, exist_ok=True)
    images = stretch(batch.images)
    seen = as_seen(images, batch.corruption, task.patch_size)
    pairs = torch.stack([images, seen], 1)[:CROPS_SHOWN]  # (n, 2, C, H, W)
    sheet = make_grid([prediction_panel(pair[:, None]) for pair in pairs], nrow=4)
    write_png(sheet, str(folder / CHECK_CROPS))
    print(f"wrote {folder / CHECK_CROPS}: training crops, each next to the model's input (masked patches are grey)")
    return folder


def read_images(task: Pretraining) -> tuple[list[str], set[str]]:
    """Read all images of each split, or a choice of MOST_READ; of a stream only held-out ones.

    Returns:
        The number of images read of each split, in words; and the images that cannot be decoded, and why.
    """
    read, unreadable = [], set()
    for images in (task.train, task.held_out):
        if isinstance(images, ImageDataset):
            chosen = images.choose(MOST_READ, 0)
            loader = fixed_view_batches(task.views(chosen), IMAGES_PER_READ)
            for batch in progress_bar(loader, desc=f"reading {images.split}", delay=1, leave=False):
                unreadable.update(batch.unreadable)
            read.append(f"{len(chosen):,} of {len(images):,} images of {images.split}")
    return read, unreadable


def time_steps(task: Pretraining, config: Config) -> tuple[StepCost, Batch]:
    """Take some steps, and return their median cost and a batch.

    The first step counts only if it is the only one.
    """
    loader = training_batches(task, 0, {})
    training_step = TrainingStep(task, replace(config.optim, frozen_steps=0))  # as most steps are
    seconds, waiting = [], []
    for step in range(min(1 + TIMED_STEPS, config.run.steps)):
        begin = time.perf_counter()
        passes = list(islice(loader, task.layout.accumulation_steps))
        waiting.append(time.perf_counter() - begin)
        training_step(step, passes, measure=False)
        training_step.verify()  # which waits for a GPU
        seconds.append(time.perf_counter() - begin)
        if sum(seconds) > MAX_TIMED_SECONDS:
            break
    memory = memory_bytes(task.accelerator.device)
    checkpoint = bytes_of([training_step.model.state_dict(), dict(training_step.optimizer.state)])
    cost = StepCost(median(seconds[1:] or seconds), median(waiting[1:] or waiting), memory, checkpoint)
    return cost, passes[0]


def print_cost(config: Config, cost: StepCost) -> None:
    """Print time, memory and disk of a step, and of the steps that are left."""
    run, folder = config.run, Path(config.run.dir)
    done = newest_step(folder)
    if not done and run.branch_from is not None:
        _, done = branch_point(run.branch_from)
    left = run.steps - done
    kept = run.keep_checkpoints + len(steps_to_keep(config.optim, run)) + 1  # and the one being written
    free = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free
    rate = config.optim.global_batch_size / cost.seconds
    print(f"a step: {cost.seconds:.4g} s, of which {cost.seconds_waiting:.4g} s wait for images; {rate:.4g} images/s")
    print(f"{left} steps of one process, without evaluations: {left * cost.seconds / 3600:.3g} hours")
    print(f"disk: at most {kept} checkpoints of {cost.checkpoint / 1e9:.3g} GB; {free / 1e9:.3g} GB are free")
    print(f"memory of this process: {cost.memory / 1e9:.3g} GB")


def memory_on_a_gpu(config: Config, layout: BatchLayout) -> str:
    """The peak of a step in GB at the precision that was asked for, or why it is not known."""
    try:
        peak = peak_memory(config, layout.largest_share, layout.accumulation_steps)
    except Exception as error:  # fake tensors do not know every model's operations
        return f"cannot be counted ({type(error).__name__})"
    return f"{peak['total'] / 1e9:.3g} GB"


def main(arguments: Sequence[str] | None = None) -> None:
    """Check as the command line, or `arguments`, say."""
    check(parse(Config, arguments))


if __name__ == "__main__":
    run_main(main)
