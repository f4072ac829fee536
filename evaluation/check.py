"""Images, crops, memory, time, disk and settings before a long run: `mpp check`, about a minute.

    mpp check --data.path FOLDER --run.dir runs/mine --run.steps 20000

The settings are those of `mpp pretrain`. A few steps are timed, and nothing of them is kept. Crops, each next to
the model's input, are drawn to `check_crops.png` in the run folder.
"""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from PIL import Image

from evaluation.figures.images import arrange_in_rows
from evaluation.figures.markdown import markdown_table
from evaluation.memory import peak_memory
from evaluation.pages.about import changed_settings_shown, duration
from evaluation.survey import Survey, survey
from mpp.config import Config, as_words
from mpp.config.parsing import parse
from mpp.data.data_path import describe_source
from mpp.data.loader import BatchLayout
from mpp.data.moments import channel_moments, with_moments
from mpp.data.shards import Shards
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained
from mpp.features.reconstructions import as_rgb, as_seen, stretch
from mpp.pretrain import Pretraining
from mpp.runtime.messages import counted
from mpp.runtime.start import run_main, start_alone
from mpp.training.checkpoint import newest_step
from mpp.training.health import find_warnings
from mpp.training.history import RECENT_LINES
from mpp.training.log import memory_bytes
from mpp.training.loop import TrainingStep, training_batches
from mpp.training.run import resolve_config
from mpp.training.run_folder import CHECK_CROPS, branch_point, refuse_other_run, refuse_other_trunk, steps_to_keep

SURVEY_SECONDS = 20.0
MAX_TIMED_STEPS = 8
MAX_TIMED_SECONDS = 15.0
CROPS_SHOWN = 32
CROPS_IN_A_ROW = 4
MAX_UNREADABLE_SHARE = 0.01
MAX_DUPLICATES = 0.05  # of the held-out images; birds and CIFAR-10 have none, tiles of photographs at most 4 %
MAX_ONE_COLOUR = 0.25  # birds, CIFAR-10, digits have none, tiles of photographs 6 %
ROWS_SHOWN = 20  # of classes, sizes, copies and unreadable images
SEARCHED = {  # ranges that were searched: configs/search.md, configs/sweep/rates_cifar10.yaml
    "optim.global_batch_size": (32, 256),
    "run.steps": (400, 8000),
    "optim.lr of muon": (2.5e-3, 3e-2),
    "optim.lr of adam": (3e-3, 8e-3),
}


@dataclass(frozen=True)
class StepCost:
    """Cost of a step on this machine, and the sizes of files."""

    seconds: float
    seconds_waiting: float
    """Part of these in which the step waits for its images."""
    memory_gb: float
    checkpoint_bytes: int
    encoder_bytes: int
    """Of the exported encoder."""


def check(config: Config) -> Path:
    """Check a run before it begins: print its plan, and draw some of its crops; return the run folder.

    Raises:
        UserError: a setting or images with which the run would not begin either.
    """
    accelerator = start_alone(config.run, "a check is made")
    precision = config.run.precision
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
        surveyed = None
        if not isinstance(task.train, Shards):
            surveyed = survey(task.train, task.held_out, config.data, SURVEY_SECONDS)
        step_cost, batches = time_steps(task, config)
    print(f"model: {task.describe_model()}")
    print(f"images: {describe_source(config.data)}: {task.describe_images()}")
    print_images(task, surveyed)
    print_cost(config, precision, layout, step_cost)
    print_phases(config)
    print_settings(config)
    for warning in warnings_before_training(config, surveyed, step_cost):
        print(f"warning: {warning}")
    folder.mkdir(parents=True, exist_ok=True)
    draw_crops(task, batches).save(folder / CHECK_CROPS)
    print(f"wrote {folder / CHECK_CROPS}: training crops, each next to the model's input (masked patches are grey)")
    return folder


def time_steps(task: Pretraining, config: Config) -> tuple[StepCost, list[Batch]]:
    """Take some steps, and return their cost and some of their batches.

    The first step counts only if it is the only one.
    """
    optim = replace(config.optim, frozen_steps=0)  # as most steps are
    loader = training_batches(task, 0, {})
    training_step = TrainingStep(task, optim)
    device = task.accelerator.device
    batches: list[Batch] = []
    begin, waiting, steps = time.perf_counter(), 0.0, 0
    for step in range(min(1 + MAX_TIMED_STEPS, config.run.steps)):
        asked = time.perf_counter()
        passes = list(islice(loader, task.layout.accumulation_steps))
        waiting += time.perf_counter() - asked
        training_step(step, passes, measure=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if sum(len(batch.images) for batch in batches) < CROPS_SHOWN:
            batches += passes
        steps += 1
        if step == 0 and config.run.steps > 1:
            begin, waiting, steps = time.perf_counter(), 0.0, 0
        if time.perf_counter() - begin > MAX_TIMED_SECONDS:
            break
    seconds = time.perf_counter() - begin
    training_step.verify()
    memory = memory_bytes(device)
    steps = max(steps, 1)
    encoder_bytes = sum(tensor.nbytes for tensor in training_step.model.encoder.state_dict().values())
    sizes = checkpoint_bytes(training_step), encoder_bytes
    return StepCost(seconds / steps, waiting / steps, memory / 1e9, *sizes), batches


def checkpoint_bytes(training_step: TrainingStep) -> int:
    """Bytes of the model's and, after a first step, of the optimiser's tensors."""
    tensors = list(training_step.model.state_dict().values())
    for state in training_step.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors)


def checkpoints_on_disk(config: Config) -> int:
    """The largest number of checkpoints that a run has at once: those that are kept, and the one being written."""
    return config.run.keep_checkpoints + len(steps_to_keep(config.optim, config.run)) + 1


def encoder_bytes_on_disk(config: Config, step_cost: StepCost) -> int:
    """Bytes of the exported encoders, and of the weights that a run from weights keeps of its start."""
    copies = 3 if config.run.keep_best else 1  # the last; the best, and one in its place
    if config.model.init_from is not None:
        copies += 1
    return step_cost.encoder_bytes * copies


def bytes_on_disk(config: Config, step_cost: StepCost) -> int:
    """Bytes that the checkpoints and encoders of a run take in addition to those that are there."""
    return step_cost.checkpoint_bytes * checkpoints_on_disk(config) + encoder_bytes_on_disk(config, step_cost)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free


def warnings_before_training(config: Config, surveyed: Survey | None, step_cost: StepCost) -> list[str]:
    """Warnings before anything is trained: by the same rules and names as while a run trains, and some of images."""
    waiting = step_cost.seconds_waiting / step_cost.seconds
    history = [{"step": step, "speed/data_wait": waiting} for step in range(RECENT_LINES)]
    messages = [f"{name}: {message}" for name, message in find_warnings(history, config).items()]
    if surveyed:
        messages += survey_warnings(surveyed)
    for name, value in searched_settings(config).items():
        low, high = SEARCHED.get(name, (-math.inf, math.inf))
        if not low <= value <= high:
            messages.append(
                f"{name} is {value:g}, outside the range that was searched ({low:g} to {high:g}{searched_by(config)}); "
                "try half and double of optim.lr for a tenth of the steps first"
            )
    return messages


def survey_warnings(surveyed: Survey) -> list[str]:
    """Warnings of images that cannot be decoded, are copies or of one colour, and of a class that dominates."""
    messages = []
    unreadable = len(surveyed.unreadable)
    if unreadable > MAX_UNREADABLE_SHARE * surveyed.sample_size:
        messages.append(
            f"unreadable images: {unreadable} of {surveyed.sample_size} in the sample, such as {surveyed.unreadable[0]}"
        )
    if surveyed.duplicate_share > MAX_DUPLICATES:
        messages.append(
            f"train / held-out duplicates: {surveyed.duplicate_share:.0%} of the sampled held-out images are nearly "
            "the same as a training image, so held-out figures are too good; remove copies, or name "
            "another data.eval_split"
        )
    if surveyed.one_colour_share > MAX_ONE_COLOUR:
        messages.append(
            f"constant images dominate: {surveyed.one_colour_share:.0%} of the sampled images show only one colour; "
            "remove them, or see data.range and data.bands"
        )
    largest = max(surveyed.class_shares.values(), default=0.0)
    if largest > max(0.5, 1.5 / max(1, len(surveyed.class_shares))):
        messages.append(
            f"one class dominates: {largest:.0%} of the labelled images are of one class, the baseline of kNN "
            "accuracy; balance the images, or name another data.label_column"
        )
    return messages


def searched_settings(config: Config) -> dict[str, float]:
    """The values of the settings that were searched on small ViTs, by the names in SEARCHED."""
    return {
        "optim.global_batch_size": config.optim.global_batch_size,
        "run.steps": config.run.steps,
        f"optim.lr of {config.optim.name}": config.optim.lr,
    }


def searched_by(config: Config) -> str:
    """The schedule of the search, where the run has another: cosine's mean rate is half of a stable one."""
    return "" if config.optim.schedule == "cosine" else ", with optim.schedule cosine"


def print_images(task: Pretraining, surveyed: Survey | None) -> None:
    """Print counts, sizes, channels, unreadable and double images, and classes."""
    rows = [["training images", task.train.describe()], ["held out", counted(len(task.held_out), "image")]]
    rows.append(["channels", str(task.config.data.channels)])
    if surveyed is None:
        print_table("Images", rows)
        print("Copies, sizes and classes are not surveyed in streams.")
        return
    rows += [
        ["in the sample", f"{surveyed.train_images} training, {surveyed.held_out_images} held out"],
        ["besides, cannot be decoded", str(len(surveyed.unreadable))],
        ["of one colour", f"{surveyed.one_colour_share:.1%}"],
        ["held-out copies of training images", f"{surveyed.duplicate_share:.1%}"],
    ]
    for (height, width), count in surveyed.sizes.most_common(8):
        rows.append([f"{height} x {width} pixels", counted(count, "image")])
    names = task.train.class_names
    for number, share in list(surveyed.class_shares.items())[:ROWS_SHOWN]:
        name = names[int(number)] if names else number
        rows.append([f"class {name}", f"{share:.1%} of the labelled images"])
    print_table("Images", rows)
    for held_out, training in surveyed.duplicate_pairs:
        print(f"nearly the same image: held-out {held_out}, training {training}")
    for failure in surveyed.unreadable[:ROWS_SHOWN]:
        print(f"cannot be decoded: {failure}")


def print_cost(config: Config, precision: str, layout: BatchLayout, step_cost: StepCost) -> None:
    """Print time, memory and disk of a step and of the run, and a GPU's memory at the precision that was asked for."""
    free = free_bytes(Path(config.run.dir))
    taken = bytes_on_disk(config, step_cost)
    left = config.run.steps - steps_done(config)
    rows = [
        ["a step", f"{step_cost.seconds:.4g} s"],
        ["of that, waiting for images", f"{step_cost.seconds_waiting:.4g} s"],
        ["images/s", f"{layout.global_batch_size / step_cost.seconds:.4g}"],
        [f"{left} steps of one process, without evaluations", duration(left * step_cost.seconds)],
        ["memory of this process", f"{step_cost.memory_gb:.3g} GB"],
        ["memory on a GPU, counted (mpp memory)", memory_on_a_gpu(config, precision, layout)],
        ["a checkpoint", f"{step_cost.checkpoint_bytes / 1e9:.3g} GB"],
        ["the run folder", f"{taken / 1e9:.2g} GB; {free / 1e9:.3g} GB are free"],
    ]
    print_table("Cost on this machine", rows)


def steps_done(config: Config) -> int:
    """Steps that a run need not take: those of its newest checkpoint, or of the trunk's that it is to begin from."""
    done = newest_step(Path(config.run.dir))
    if done or config.run.branch_from is None:
        return done
    _, step = branch_point(config.run.branch_from)
    return step


def print_phases(config: Config) -> None:
    """Print the checkpoint that the run branches from, and the start of the cooldown, if there are any."""
    run = config.run
    rows = []
    if run.branch_from is not None:
        trunk, step = branch_point(run.branch_from)
        copied = "has copied" if newest_step(Path(run.dir)) else "copies"
        rows.append(["branch", f"{copied} the checkpoint of {trunk} after step {step} of {run.steps}"])
    stable = config.optim.stable_steps(run.steps)
    if stable is not None and stable < run.steps:
        rows.append(["cooldown", f"the last {run.steps - stable} of {run.steps} steps, from step {stable} on"])
    elif stable is not None:
        rows.append(["cooldown", "none: the learning rate never falls; a branch cools down (optim.schedule wsd)"])
    if rows:
        print_table("Phases", rows)


def memory_on_a_gpu(config: Config, precision: str, layout: BatchLayout) -> str:
    """The peak of a step in GB, or why it is not known."""
    on_gpu = replace(config, run=replace(config.run, precision=precision))
    try:
        peak = peak_memory(on_gpu, layout.largest_share, layout.accumulation_steps)
    except Exception as error:  # torch's tracker does not know every model
        return f"cannot be counted ({type(error).__name__})"
    return f"{peak['total'] / 1e9:.3g} GB"


def print_settings(config: Config) -> None:
    """Print the settings that differ from the defaults, and the ranges that were searched."""
    rows = [[key, as_words(value)] for key, value in changed_settings_shown(config).items()]
    if rows:
        print_table("Settings that differ from the defaults", rows)
    rows = []
    for name, value in searched_settings(config).items():
        searched = "not searched"
        if name in SEARCHED:
            low, high = SEARCHED[name]
            searched = f"searched from {low:g} to {high:g}{searched_by(config)}"
        rows.append([f"{name} is {value:g}", searched])
    print_table("Small ViTs on the birds and on CIFAR-10 (configs/search.md)", rows)


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of two cells under a title."""
    print(f"\n{markdown_table([title, ''], rows)}")


def draw_crops(task: Pretraining, batches: Sequence[Batch]) -> Image.Image:
    """Training crops, each next to the model's input."""
    pairs = []
    for batch in batches:
        images = stretch(batch.images)
        corrupted = as_seen(images, batch.corruption, task.patch_size)
        pixels = as_rgb(torch.stack([images, corrupted])).movedim(2, -1).numpy()
        pairs += [pixels[:, index] for index in range(len(batch.images))]
    pairs = pairs[:CROPS_SHOWN]
    rows = []
    for first in range(0, len(pairs), CROPS_IN_A_ROW):
        rows.append([picture for pair in pairs[first : first + CROPS_IN_A_ROW] for picture in pair])
    return arrange_in_rows(rows, min_width=64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check as the command line, or `arguments`, say."""
    check(parse(Config, arguments))


if __name__ == "__main__":
    run_main(main)
