"""Measurements and tests of mpp on this machine's GPU, in one text file to send: `mpp gpu-report`, at most ten minutes.

Versions and card; the rate that the card reaches; speed and memory of training ViT-B/16 and ViT-L/16, compiled and
not; losses compared with the CPU; the loader apart from a model; the tests of tests/test_gpu.py but those that compile,
from a clone with `pip install -e '.[test]'`. The last three lines are settings to paste on a command line.

Each part is a process of its own: an error or a timeout in one does not affect the others.
"""

import importlib.util
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as ResultTimeout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.collect_env import get_pretty_env_info

import mpp
from evaluation.benchmark.card import (
    LOSS_STEPS,
    CardLimits,
    LoadingSpeed,
    ModelSpeed,
    losses_of_training,
    measure_limits,
    time_loader,
    time_model,
)
from evaluation.config import GpuReportConfig
from evaluation.memory import BYTES_PER_GB, peak_memory
from evaluation.throughput import installed_versions
from mpp.config import Config, ModelConfig, OptimConfig, RunConfig
from mpp.config.parsing import parse
from mpp.data.workers import MAX_DEFAULT_WORKERS
from mpp.errors import UserError
from mpp.runtime.hardware import cores
from mpp.runtime.start import run_main

ROOT = Path(__file__).parent.parent
TESTS = ("pytest", "-m", "gpu", "-k", "not compiled", "-v", "--no-header", "--tb=short", "tests/test_gpu.py")
PACKAGES = ("timm", "accelerate", "datasets", "torchvision", "triton", "numpy")
BATCH_SIZES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1)
COUNTED_BATCHES = (128, 256)
"""Memory grows by the same amount with each image; it is counted at these batch sizes."""
USED_SHARE = 0.9
"""Share of the free memory that a batch may take."""
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of losses that rounding explains."""
COMPILING_GAIN = 1.02
"""Ratio of speeds from which compiling is recommended."""
FILE_SIDES = (256, 375)
"""Shorter sides of images: as `mpp prepare` writes them, and of a typical one of ImageNet."""


class ReportSizes(NamedTuple):
    """Sizes of everything that is measured, on a GPU or in a rehearsal."""

    models: dict[str, ModelConfig]
    batch_sizes: tuple[int, ...]
    compared_model: ModelConfig
    """The model whose losses are compared with the CPU's."""
    compared_batch: int
    loading_seconds: float


ON_GPU = ReportSizes(
    models={
        "ViT-B/16": ModelConfig(name="vit_base_patch16_224"),
        "ViT-L/16": ModelConfig(name="vit_large_patch16_224"),
    },
    batch_sizes=BATCH_SIZES,
    compared_model=ModelConfig(name="vit_tiny_patch16_224"),
    compared_batch=32,
    loading_seconds=4.0,
)
TINY_MODEL = ModelConfig(width=16, depth=1, heads=2, img_size=32, patch_size=8)
REHEARSAL = ReportSizes(
    models={"tiny ViT": TINY_MODEL},
    batch_sizes=(4, 2),
    compared_model=TINY_MODEL,
    compared_batch=4,
    loading_seconds=0.2,
)


class ReportPart(NamedTuple):
    """A part of the report."""

    title: str
    gpu_seconds: float
    """Estimate of its time on a GPU; it is left out where less is left."""
    write: Callable[[], str]


class GpuReport:
    """The report: its parts in their order, and the figures that the advice at its end is made of."""

    def __init__(self, config: GpuReportConfig):
        self.config = config
        self.on_gpu = config.device == "cuda"
        self.device = "auto" if self.on_gpu else "cpu"
        self.sizes = ON_GPU if self.on_gpu else REHEARSAL
        self.end = time.monotonic() + 60 * config.minutes
        self.limits: CardLimits | None = None
        self.speeds: dict[tuple[str, bool], ModelSpeed] = {}
        """By model and whether it was compiled."""
        self.loading: LoadingSpeed | None = None

    def parts(self) -> list[ReportPart]:
        """The parts, those first that matter most: time may run out."""
        first, *others = self.sizes.models
        parts = [
            ReportPart("versions and card", 0, self.describe_versions),
            ReportPart("limits of the card", 15, self.describe_limits),
            ReportPart(f"{first}, eager", 40, partial(self.describe_speed, first, False)),
            ReportPart(f"{first}, compiled", 90, partial(self.describe_speed, first, True)),
            ReportPart("losses compared with the CPU", 60, self.describe_losses),
            ReportPart("loader", 45, self.describe_loader),
        ]
        parts += [ReportPart(f"{name}, eager", 50, partial(self.describe_speed, name, False)) for name in others]
        parts.append(ReportPart("tests", 30, self.describe_tests))
        parts += [ReportPart(f"{name}, compiled", 120, partial(self.describe_speed, name, True)) for name in others]
        return parts

    def text_of(self, part: ReportPart) -> str:
        """Text of a part, or the reason why it is missing."""
        if self.on_gpu and self.seconds_left() < part.gpu_seconds:
            return (
                f"left out: it takes about {part.gpu_seconds:.0f} s, and {max(0, self.seconds_left()):.0f} s of "
                f"minutes {self.config.minutes:g} are left"
            )
        try:
            return part.write()
        except ResultTimeout:
            return f"stopped: minutes {self.config.minutes:g} are over"
        except Exception as error:  # the other parts are worth having
            trace = "".join(traceback.format_exception(error))
            return f"failed: {type(error).__name__}: {error}\n\n{trace}"

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def measure(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Result of a function in a process of its own, which is killed when the time is over."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            future = pool.submit(function, *arguments)
            try:
                return future.result(self.seconds_left())
            except (ResultTimeout, KeyboardInterrupt):
                for child in multiprocessing.active_children():
                    child.kill()
                raise

    def describe_versions(self) -> str:
        versions = {"mpp": mpp.__version__} | installed_versions(PACKAGES)
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        return f"{listed}\n{get_pretty_env_info()}"

    def describe_limits(self) -> str:
        model = next(iter(self.sizes.models.values()))
        self.limits = self.measure(measure_limits, model, self.device)
        memory = ""
        if self.limits.free_bytes:
            memory = f"{self.limits.free_bytes / BYTES_PER_GB:.1f} GB of memory are free\n"
        return (
            f"{self.limits.name}, {cores()} CPU cores, {self.limits.precision}\n{memory}"
            f"matrix product of random numbers, {self.limits.precision}: "
            f"{self.limits.highest_rate / 1e12:.3g} TFLOP/s, the ceiling for the shares below\n"
            f"attention kernel: {self.limits.attention_kernel}"
        )

    def describe_speed(self, name: str, compile: bool) -> str:
        eager = self.speeds.get((name, False))
        batch_sizes = self.batch_sizes(self.sizes.models[name])
        if eager:
            batch_sizes = [size for size in batch_sizes if size <= eager.batch_size]
        speed = self.measure(time_model, self.sizes.models[name], batch_sizes, compile, self.device)
        self.speeds[name, compile] = speed
        share = ""
        if self.limits:
            share = f" ({speed.flops_per_second / self.limits.highest_rate:.0%} of the ceiling)"
        lines = [
            f"batch {speed.batch_size}: {speed.images_per_second:.4g} images/s, "
            f"{speed.flops_per_second / 1e12:.3g} TFLOP/s{share}"
        ]
        if speed.too_large:
            lines.append(f"out of memory at batch {', '.join(map(str, speed.too_large))}")
        counted = peak_memory(self.counted_config(self.sizes.models[name]), speed.batch_size)["total"]
        measured = "not measured on a CPU"
        if speed.peak_bytes:
            measured = f"{speed.peak_bytes / BYTES_PER_GB:.3g} GB"
        lines.append(f"peak memory: {measured}; `mpp memory` counts {counted / BYTES_PER_GB:.3g} GB, uncompiled")
        if compile:
            lines.append(f"first step, which compiles: {speed.first_step_seconds:.0f} s")
        if compile and eager:
            lines.append(f"{speed.images_per_second / eager.images_per_second:.2f} times the eager speed")
        return "\n".join(lines)

    def batch_sizes(self, model: ModelConfig) -> list[int]:
        """Batch sizes to try, largest first."""
        if self.config.batch_size:
            smaller = [size for size in self.sizes.batch_sizes if size < self.config.batch_size]
            return [self.config.batch_size, *smaller]
        if self.limits is None or self.limits.free_bytes is None:
            return list(self.sizes.batch_sizes)
        return sizes_that_fit(self.counted_config(model), self.sizes.batch_sizes, self.limits.free_bytes)

    def counted_config(self, model: ModelConfig) -> Config:
        """Settings of the training that is timed, for counting its memory."""
        precision = self.limits.precision if self.limits else "auto"
        run = RunConfig(dir="unused", precision=precision)
        return Config(run=run, model=model, optim=OptimConfig(name="adam"))

    def describe_losses(self) -> str:
        settings = (self.sizes.compared_model, self.sizes.compared_batch)
        on_cpu = self.measure(losses_of_training, *settings, "cpu")
        on_card = self.measure(losses_of_training, *settings, self.device)
        difference = largest_relative_difference(on_card, on_cpu)
        verdict = "the card computes what the CPU computes"
        if not difference <= LOSS_TOLERANCE:  # which is true of not-a-number, too
            verdict = "WRONG: the card does not compute what the CPU computes; please report it"
        name = self.sizes.compared_model.name or "tiny ViT"
        lines = [
            f"{name}, batch {self.sizes.compared_batch}, {LOSS_STEPS} steps in fp32, TF32 off, same seed and batches",
            f"largest relative difference: {difference:.2g} (at most {LOSS_TOLERANCE:g} by rounding): {verdict}",
            "step       card        CPU",
        ]
        for step, (card, cpu) in enumerate(zip(on_card, on_cpu, strict=True)):
            lines.append(f"{step:4} {card:10.6f} {cpu:10.6f}")
        return "\n".join(lines)

    def describe_loader(self) -> str:
        size = 224 if self.on_gpu else 32
        workers = self.spare_cores()
        self.loading = self.measure(time_loader, FILE_SIDES, size, workers, self.sizes.loading_seconds)
        lines = []
        for side, rate in self.loading.by_side.items():
            lines.append(f"JPEG files with a shorter side of {side}: {rate:.4g} images/s a core")
        lines.append(
            f"{workers} loader processes together: {self.loading.by_all:.4g} images/s (side {min(FILE_SIDES)})"
        )
        for name in self.sizes.models:
            speed = self.fastest(name)
            if speed:
                lines.append(
                    f"cores that {name} needs at {speed.images_per_second:.4g} images/s: {self.cores_needed(speed)}"
                )
        return "\n".join(lines)

    def cores_needed(self, speed: ModelSpeed) -> str:
        """Cores that load as fast as the model trains, by the size of files."""
        by_side = []
        for side, rate in self.loading.by_side.items():
            by_side.append(f"{math.ceil(speed.images_per_second / rate)} (side {side})")
        return ", ".join(by_side)

    def spare_cores(self) -> int:
        """Cores of a GPU's share that are left for loading, besides that of the training process."""
        gpus = max(1, torch.cuda.device_count()) if self.on_gpu else 1
        return max(1, min(MAX_DEFAULT_WORKERS, cores() // gpus - 1))

    def fastest(self, name: str) -> ModelSpeed | None:
        """The better of the model's two speeds; None: neither was measured."""
        measured = [speed for (model, _), speed in self.speeds.items() if model == name]
        return max(measured, key=lambda speed: speed.images_per_second, default=None)

    def describe_tests(self) -> str:
        if not (ROOT / "tests" / "test_gpu.py").is_file() or not importlib.util.find_spec("pytest"):
            return "not run: they need a clone, and its extra `test`"
        return output_of(self.config.device, self.seconds_left(), *TESTS)

    def advice(self) -> str:
        """Advice on settings for the first model; its last three lines can be pasted on a command line."""
        name = next(iter(self.sizes.models))
        speed = self.fastest(name)
        lines = []
        for other in self.sizes.models:
            measured = self.fastest(other)
            fits = f"batch {measured.batch_size} fits" if measured else "not measured"
            lines.append(f"{other}: {fits}")
        batch_size = speed.batch_size if speed else self.sizes.batch_sizes[-1]
        workers = self.spare_cores()
        if speed and self.loading:
            slowest = min(self.loading.by_side.values())
            needed = math.ceil(speed.images_per_second / slowest)
            if needed > workers:
                lines.append(
                    f"{name} trains faster than {workers} cores, a GPU's share, load "
                    f"files of side {max(FILE_SIDES)}: make them smaller with `mpp prepare`"
                )
            workers = min(workers, needed)
        lines += [
            f"for {name}, after `mpp pretrain --config imagenet_vit_b16`:",
            f"--data.batch_size={batch_size} \\",
            f"--run.compile={str(self.compiling_pays(name)).lower()} \\",
            f"--data.workers={workers}",
        ]
        return "\n".join(lines)

    def compiling_pays(self, name: str) -> bool:
        """Whether the compiled model was measured to be faster."""
        eager = self.speeds.get((name, False))
        compiled = self.speeds.get((name, True))
        if compiled is None:
            return False
        return eager is None or compiled.images_per_second > COMPILING_GAIN * eager.images_per_second


def sizes_that_fit(config: Config, batch_sizes: Sequence[int], free_bytes: int) -> list[int]:
    """The batch sizes that fit into so much memory with a tenth left free, accumulation included; at least the last."""
    few, many = COUNTED_BATCHES
    of_few, of_many = (peak_memory(config, images, passes=2)["total"] for images in COUNTED_BATCHES)
    of_image = (of_many - of_few) / (many - few)
    fitting = [size for size in batch_sizes if of_few + (size - few) * of_image <= USED_SHARE * free_bytes]
    return fitting or [batch_sizes[-1]]


def largest_relative_difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference; not-a-number if a value is."""
    differences = [abs(value - other) / abs(other) for value, other in zip(values, reference, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def output_of(device: str, seconds: float, *words: str) -> str:
    """Output of a Python module's command on a device, with its exit code and duration.

    Args:
        seconds: after which it is killed.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", *words),
            cwd=ROOT,
            env=os.environ | {"GPU_SUITE_DEVICE": device},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
            end = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            end = "stopped: the time is over"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    return f"{text}\n{end}, {time.monotonic() - begin:.0f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    config = parse(GpuReportConfig, arguments)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu rehearses the report")
    report = GpuReport(config)
    with open(config.out, "w", encoding="utf-8") as file:
        for part in report.parts():
            begin = time.monotonic()
            text = report.text_of(part)
            seconds = time.monotonic() - begin
            print(f"== {part.title} ({seconds:.0f} s)\n\n{text}\n", file=file, flush=True)
            print(f"{part.title}: done", flush=True)
        advice = report.advice()
        print(f"== recommended settings\n\n{advice}", file=file)
    print(f"wrote {config.out}: send this file\n{advice}")


if __name__ == "__main__":
    run_main(main)
