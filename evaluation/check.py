"""A look before a long run, in about a minute: images, crops, memory, time, disk, and whether the settings are usual.

    mpp check --data.path FOLDER --run.dir runs/mine --run.steps 20000

The settings are those of `mpp pretrain`. Nothing is trained that is kept: a few updates are done to be timed. The page
is `check.html` in the run folder.
"""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from evaluation.memory import peak_memory
from evaluation.pages.about import Missing, machine_blocks, settings_rows
from evaluation.pages.page import Link, Page, Section, Table, Text, picture, write_page
from evaluation.pictures.gallery import sheet
from mpp.config import Config
from mpp.config.parsing import parse
from mpp.data.data_path import describe_source
from mpp.data.loader import BatchLayout
from mpp.data.moments import channel_moments
from mpp.data.shards import Shards
from mpp.data.survey import Survey, survey
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained
from mpp.features.reconstructions import as_rgb, as_seen
from mpp.pretrain import Pretraining
from mpp.runtime.start import command, start_alone
from mpp.training.feed import Feed
from mpp.training.health import MAX_UNREADABLE_SHARE, Facts, find_warnings
from mpp.training.history import RECENT_LINES
from mpp.training.run import fill_in_moments, resolve_config
from mpp.training.run_folder import CHECK_PAGE, refuse_other_run
from mpp.training.step import Update
from mpp.training.verdict import duration

LOOK = 20.0  # seconds for the images
TIMED, LONG = 8, 15.0  # updates that are timed, and seconds after which fewer have to do
CROPS = 32
SEARCHED = {  # what was ever searched here: configs/search.md, configs/compare/rates_cifar10.yaml
    "optim.global_batch_size": (32, 256),
    "run.steps": (400, 8000),
    "optim.lr of muon": (2.5e-3, 3e-2),
    "optim.lr of adam": (3e-3, 8e-3),
}


@dataclass(frozen=True)
class Timing:
    """What an update takes here, in seconds: all of it, and waiting for its images; memory in GB; parameters' bytes."""

    update: float
    waiting: float
    memory: float
    checkpoint: float


def check(config: Config) -> Path:
    """Look, and write the page; where it is.

    Raises:
        UserError: a setting or images with which the run would not begin either.
    """
    accelerator = start_alone(config.run, "a check is made")
    precision, folder = config.run.precision, Path(config.run.dir)
    config = resolve_config(config, accelerator)
    refuse_other_run(config, folder)
    layout = BatchLayout.of(config.optim.global_batch_size, config.data.batch_size, 1, 0)
    missing: Missing = {}
    with deaths_explained():
        if "auto" in (config.model.mean, config.model.std):
            config = fill_in_moments(config, *channel_moments(config.data))
        task = Pretraining(config, accelerator, layout)
        found = None if isinstance(task.train, Shards) else survey(task.train, task.held_out, config.data, LOOK)
        if found is None:
            missing["Copies, sizes and classes"] = "a stream is not looked through"
        feed = Feed(task.batches(0, {}), layout.accumulation_steps)
        timing, seen = timed(task, config, feed)
        sections = [
            Section("images", "The images", images_blocks(task, found)),
            Section("crops", "What a crop looks like", crops_blocks(task, seen)),
            Section("cost", "Memory, time, disk", cost_blocks(config, precision, layout, timing, missing)),
            Section("usual", "What was ever searched", usual_blocks(config)),
            Section("settings", "Settings", settings_rows(config)),
            Section("machine", "Versions and machine", machine_blocks()),
        ]
    about = f"{task.describe_model()}; {describe_source(config.data)}: {task.describe_images()}"
    said = verdict_points(task, config, found, timing), warnings(task, config, found, timing)
    shown = [section for section in sections if section.blocks]
    page = Page(f"{folder}: before the run", about, *said, shown, missing)
    path = folder / CHECK_PAGE
    write_page(path, page)
    for text, _ in page.verdict:
        print(text)
    for text in page.warnings:
        print(f"look at: {text}")
    print(f"wrote {path}")
    return folder


# --- what is measured ---


def timed(task: Pretraining, config: Config, feed: Feed) -> tuple[Timing, list[Batch]]:
    """Some updates, the first of which does not count where there are several; and the batches that they saw."""
    update = Update(task, config.optim)
    begin, done, seen = time.perf_counter(), 0, []
    for step in range(min(1 + TIMED, config.run.steps)):
        micro = feed.take()
        update(step, micro, measure=False)
        synchronize(task.accelerator.device)
        seen += micro if sum(len(batch.images) for batch in seen) < CROPS else []
        done += 1
        if step == 0 and config.run.steps > 1:
            begin, done = time.perf_counter(), 0
            feed.reset_wait()
        if time.perf_counter() - begin > LONG:
            break
    seconds = time.perf_counter() - begin
    cuda = task.accelerator.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated() if cuda else psutil.Process().memory_info().rss
    kept = [each for state in update.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    size = sum(tensor.nbytes for tensor in [*update.model.state_dict().values(), *kept])
    return Timing(seconds / max(done, 1), feed.reset_wait() / max(done, 1), memory / 1e9, size), seen


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def disk(config: Config, timing: Timing) -> float:
    """Bytes: the checkpoints that stay, the one that is being written, and the encoder, at most as large as one."""
    return timing.checkpoint * (config.run.keep_checkpoints + 2)


# --- what is said ---


def verdict_points(
    task: Pretraining, config: Config, found: Survey | None, timing: Timing
) -> list[tuple[str, Link | None]]:
    """What the run would be, in sentences."""
    points = [(f"{task.describe_images()}", Link("why", "#images"))]
    if found:
        sizes = found.sizes.most_common(1)
        size = f", mostly {sizes[0][0][0]} x {sizes[0][0][1]} pixels" if sizes else ""
        broken = f"{len(found.broken)} of them cannot be decoded" if found.broken else "all of them can be decoded"
        points.append((f"{found.looked_at:,} images were looked at{size}: {broken}", Link("why", "#images")))
    waits = f", of which it waits {timing.waiting / timing.update:.0%} for images" if timing.waiting else ""
    cost = Link("why", "#cost")
    points.append((f"An update takes {timing.update:.3g} s here{waits}, and {timing.memory:.2g} GB of memory", cost))
    whole = duration(config.run.steps * timing.update)  # evaluations left out
    points.append((f"{config.run.steps:,} updates take one process {whole} here", cost))
    free = shutil.disk_usage(existing(Path(config.run.dir))).free
    points.append((f"The run folder takes {disk(config, timing) / 1e9:.2g} GB; {free / 1e9:.3g} GB are free", cost))
    return points


def warnings(task: Pretraining, config: Config, found: Survey | None, timing: Timing) -> list[str]:
    """What is off before anything is trained: the same checks, by the same names, as while it trains."""
    optim, run = config.optim, config.run
    facts = Facts(run.steps, optim.global_batch_size, optim.lr, optim.warmup(run.steps), optim.clip, **task.facts())
    if found:
        facts = replace(facts, duplicates=found.duplicates, constant=found.constant)
    waiting = [{"step": step, "speed/data_wait": timing.waiting / timing.update} for step in range(RECENT_LINES)]
    said = [f"{name}: {message}" for name, message in find_warnings(waiting, facts)]
    if found and len(found.broken) > MAX_UNREADABLE_SHARE * found.looked_at:
        said.append(f"unreadable images: {len(found.broken)} of those looked at, such as {found.broken[0]}")
    if shutil.disk_usage(existing(Path(run.dir))).free < disk(config, timing):
        said.append(
            "the disk is too small for the run's checkpoints; choose another run.dir, or lower run.keep_checkpoints"
        )
    advice = "try half and double of optim.lr for a tenth of the steps first"
    for name, value, low, high in usual(config):
        if value < low or value > high:  # what was never searched: NaN
            said.append(f"{name} is {value:g}, outside of what was ever searched here ({low:g} to {high:g}); {advice}")
    return said


def usual(config: Config) -> list[tuple[str, float, float, float]]:
    """(setting, value, least, most) of what was searched."""
    optim, values = config.optim, {"optim.global_batch_size": config.optim.global_batch_size}
    values |= {"run.steps": config.run.steps, f"optim.lr of {optim.name}": optim.lr}
    return [(name, value, *SEARCHED.get(name, (math.nan, math.nan))) for name, value in values.items()]


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


# --- sections ---


def images_blocks(task: Pretraining, found: Survey | None) -> list:
    """Counts, sizes, channels, broken and double images, classes."""
    rows = [["training images", task.train.describe()], ["held out", f"{len(task.held_out)} images"]]
    rows += [["channels", str(task.config.data.channels)]]
    if found is None:
        return [Table(["", ""], rows)]
    rows += [["decoded", f"{found.training} training, {found.held_out} held out"]]
    rows += [["cannot be decoded", str(len(found.broken))], ["of one colour", f"{found.constant:.1%}"]]
    unsure = f" (a share below {found.visible:.1%} would not be seen)" if found.duplicates < found.visible else ""
    rows += [["held out, nearly the same as a training image", f"{found.duplicates:.1%}{unsure}"]]
    rows += [["training, nearly the same as another", f"{found.doubles:.1%}"]]
    sizes = [[f"{height} x {width}", str(count)] for (height, width), count in found.sizes.most_common(8)]
    blocks: list = [Table(["", ""], rows), Table(["height x width", "images"], sizes, "Sizes", folded=len(sizes) > 3)]
    if found.classes:
        shares = [[name, f"{share:.1%}"] for name, share in list(found.classes.items())[:20]]
        blocks.append(Table(["class", "share of the labelled images"], shares, "Classes", folded=True))
    if found.pairs:
        blocks.append(Table(["held out", "training"], found.pairs, "Nearly the same image in both, some of them"))
    if found.broken:
        blocks.append(Text("\n".join(found.broken[:20]), code=True))
    return blocks


def crops_blocks(task: Pretraining, seen: Sequence[Batch]) -> list:
    """Training crops, each beside what the model sees of it."""
    pairs: list = []
    for batch in seen:
        pair = torch.stack([batch.images, as_seen(batch.images, batch.corruption, task.patch_size)])
        columns = as_rgb(pair).movedim(2, -1).numpy()
        pairs += [columns[:, i] for i in range(len(batch.images))]
    pairs = pairs[:CROPS]
    rows = [[part for pair in pairs[i : i + 4] for part in pair] for i in range(0, len(pairs), 4)]
    alt = f"{len(pairs)} training crops, each beside what the model sees of it"
    return [picture(sheet(rows, side=64), alt, f"{alt}: grey patches are masked, others are copied from elsewhere.")]


def cost_blocks(config: Config, precision: str, layout: BatchLayout, timing: Timing, missing: Missing) -> list:
    """What an update takes here, what a GPU would need at the precision that is asked for, and the whole run."""
    rows = [
        ["an update", f"{timing.update:.4g} s"],
        ["of which it waits for images", f"{timing.waiting:.4g} s"],
        ["images/s", f"{layout.images / timing.update:.4g}"],
        ["memory of this process", f"{timing.memory:.3g} GB"],
        [
            f"{config.run.steps} updates of one process, evaluations left out",
            duration(config.run.steps * timing.update),
        ],
        ["a checkpoint", f"{timing.checkpoint / 1e9:.3g} GB"],
        ["the run folder", f"{disk(config, timing) / 1e9:.3g} GB"],
    ]
    try:
        on_gpu = replace(config, run=replace(config.run, precision=precision))
        peak = peak_memory(on_gpu, layout.batch_size, layout.accumulation_steps)
        rows.append(["on a GPU, counted: the peak of an update", f"{peak['total'] / 1e9:.3g} GB (mpp memory)"])
    except Exception as error:  # torch's tracker does not know every model
        missing["Memory on a GPU"] = f"it cannot be counted ({type(error).__name__})"
    return [Table(["", ""], rows)]


def usual_blocks(config: Config) -> list:
    """Whether batch, length and learning rate are in the range that was ever searched here."""
    rows = []
    for name, value, low, high in usual(config):
        searched = "not searched" if math.isnan(low) else f"{low:g} to {high:g}"
        rows.append([name, f"{value:g}", searched, "yes" if low <= value <= high else "no"])
    caption = "Small ViTs on the birds and on CIFAR-10: configs/search.md"
    return [Table(["setting", "value", "searched", "inside"], rows, caption)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Check as the command line, or `arguments`, say."""
    check(parse(Config, arguments, prog="mpp check"))


if __name__ == "__main__":
    command(main)
