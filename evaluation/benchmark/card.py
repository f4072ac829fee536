"""Measurements of one card for `mpp gpu-report`. Each is made in a process of its own, and returns plain numbers."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from evaluation.benchmark.loading import image_files, loading_rate
from evaluation.benchmark.steps import (
    Bench,
    matrix_product,
    mpp_step,
    open_bench,
    repeat,
    seconds_of,
)
from mpp.config import ModelConfig
from mpp.data.loader import training_loader
from mpp.models.encoder import build_encoder
from mpp.models.plain import has_fused_attention
from mpp.pretrain import Pretraining
from mpp.runtime.start import is_out_of_memory
from mpp.training.loop import TrainingStep

Device = Literal["auto", "cpu"]
ResultT = TypeVar("ResultT")
LOSS_STEPS = 20
TIMED_SECONDS = 4.0
MIN_TIMED_STEPS = 4
WARMUP_STEPS = 3
"""The first of which compiles."""


class CardLimits(NamedTuple):
    """The card, and the limits to training on it."""

    name: str
    precision: str
    highest_rate: float
    """FLOP/s of a product of two large matrices of random numbers in this precision."""
    free_bytes: int | None
    """None: a CPU."""
    attention_kernel: str
    """Whether attention is computed by torch's fused kernel: "fused" or "unfused"."""


class ModelSpeed(NamedTuple):
    """Speed of training a model."""

    batch_size: int
    too_large: tuple[int, ...]
    """Batch sizes before this one that ran out of memory."""
    images_per_second: float
    flops_per_second: float
    first_step_seconds: float
    """Duration of the first step, which compiles."""
    peak_bytes: int | None
    """Allocated at the peak of a step; None: a CPU."""


class LoadingSpeed(NamedTuple):
    """Images a second of the loader, apart from a model."""

    by_side: dict[int, float]
    """Shorter side of the JPEG files -> images a second of one loader process."""
    by_all: float
    """Images a second of all loader processes together, from the smallest files."""


def measure_limits(model: ModelConfig, device: Device) -> CardLimits:
    """The card's highest rate, its free memory, and the kernel of the model's attention."""
    bench = open_bench(model, 2, device=device)
    place = bench.accelerator.device
    precision = bench.config.run.precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    name = "CPU"
    free_bytes = None
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        free_bytes = torch.cuda.mem_get_info(place)[0]
    product = matrix_product(bench, dtype)
    seconds = seconds_per_step(product.step)
    kernel = "fused" if has_fused_attention(build_encoder(model)) else "unfused"
    return CardLimits(name, precision, product.flops / seconds, free_bytes, kernel)


def time_model(model: ModelConfig, batch_sizes: Sequence[int], compile: bool, device: Device) -> ModelSpeed:
    """Speed of training at the first of these batch sizes that fits into memory.

    Raises:
        torch.OutOfMemoryError: none fits.
    """
    accelerator = open_bench(model, 1, device=device).accelerator

    def attempt(batch_size: int) -> ModelSpeed:
        too_large = tuple(size for size in batch_sizes if size > batch_size)
        return time_bench(Bench(model, batch_size, compile, accelerator), too_large)

    def release() -> None:
        torch.compiler.reset()
        accelerator.free_memory()

    return first_that_fits(batch_sizes, attempt, release)


def first_that_fits(
    batch_sizes: Sequence[int], attempt: Callable[[int], ResultT], release: Callable[[], object]
) -> ResultT:
    """Result of an attempt at the first batch size that does not run out of memory.

    Args:
        release: frees the memory of an attempt that failed.
    """
    for batch_size in batch_sizes[:-1]:
        try:
            return attempt(batch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        release()  # now that the error, which holds the tensors, is gone
    return attempt(batch_sizes[-1])


def time_bench(bench: Bench, too_large: tuple[int, ...]) -> ModelSpeed:
    """Speed of mpp's training step."""
    device = bench.accelerator.device
    on_gpu = device.type == "cuda"
    timed = mpp_step(bench)
    first = seconds_of(timed.step)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_per_step(timed.step)
    return ModelSpeed(
        batch_size=bench.batch_size,
        too_large=too_large,
        images_per_second=bench.batch_size / seconds,
        flops_per_second=timed.flops / seconds,
        first_step_seconds=first,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )


def seconds_per_step(step: Callable[[], object]) -> float:
    """Seconds of a step among many in a row, between which nothing waits for a GPU."""
    repeat(step, WARMUP_STEPS)
    one = seconds_of(step)
    count = max(MIN_TIMED_STEPS, round(TIMED_SECONDS / one))
    if not torch.cuda.is_available():
        count = MIN_TIMED_STEPS
    repeat(step, count)  # a GPU's clock has fallen by now to its rate under this load
    return seconds_of(lambda: repeat(step, count)) / count


def losses_of_training(model: ModelConfig, batch_size: int, device: Device) -> list[float]:
    """Losses of some steps in float32, which depend only on the arithmetic of the device: TF32 is off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    bench = open_bench(model, batch_size, device=device, precision="fp32")
    config = bench.config
    task = Pretraining(config, bench.accelerator, bench.layout)
    training_step = TrainingStep(task, config.optim)
    losses = []
    for step, batch in enumerate(training_loader(task.views(task.train), bench.layout, 0, LOSS_STEPS)):
        values, _ = training_step(step, [batch], measure=True)
        losses.append(float(values["loss"]))
    return losses


def time_loader(sides: Sequence[int], size: int, workers: int, seconds: float) -> LoadingSpeed:
    """Images a second of the loader.

    Args:
        sides: shorter sides of the JPEG files.
        workers: loader processes; a single one is timed, too.
    """
    by_side = {}
    for side in sides:
        with image_files(side) as folder:
            by_side[side] = loading_rate(folder, size, 1, seconds)
    with image_files(min(sides)) as folder:
        by_all = loading_rate(folder, size, workers, seconds)
    return LoadingSpeed(by_side, by_all)
