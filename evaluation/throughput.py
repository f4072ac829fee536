"""Speed of training: ratios to other code and to the machine's own limits, all measured in one run.

    python evaluation/throughput.py --out throughput.json

Everything is timed in turn, round after round, so that a machine whose speed drifts slows all alike; the table shows
medians, and the median and range of the rounds' ratios. `pip install -e '.[peers]'` adds other packages to it.
"""

import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch

from evaluation.benchmark.loading import image_files, mpp_crops, steps_from_files, torchvision_crops
from evaluation.benchmark.steps import (
    MATRIX_PRODUCTS,
    TRAINING_STEPS,
    Bench,
    mpp_step,
    open_bench,
    repeat,
    seconds_of,
    sizes_of_model,
)
from evaluation.config import ThroughputConfig
from evaluation.figures.markdown import markdown_table
from evaluation.frozen.results import write_json
from mpp.config import ModelConfig, require
from mpp.config.parsing import parse
from mpp.runtime.hardware import bf16_is_native
from mpp.runtime.start import run_main

WARMUP_ROUNDS = 3
CROPS_PER_ROUND = 32
STEPS_PER_ROUND = 6
"""Steps in a row where loading is a part of them."""
DRAINED_STEPS = 4
"""Steps before them, which use up the batches loaded meanwhile."""
CEILINGS = {"bf16": "matrix product, bf16", "no": "matrix product, fp32"}
"""The matrix product that a precision is compared with."""
TIMED_LOADERS = ("mpp's loading", "mpp's loading of PPM", "ImageFolder with PIL")
TIMED_PACKAGES = ("torch", "torchvision", "timm", "accelerate", "transformers", "vit-pytorch")
TIMED_RATIOS = (
    ("timm training step", "mpp training step"),
    ("vit-pytorch MPP", "mpp training step"),
    ("Hugging Face ViTForMaskedImageModeling", "mpp training step"),
    ("steps in memory", "steps from JPEG"),
    ("ImageFolder with PIL", "mpp's loading"),
    ("ImageFolder with PIL", "mpp's loading of PPM"),
)
"""Pairs whose times are divided."""

Seconds = dict[str, list[float]]
"""Name -> seconds in each round."""


def measure_all(config: ThroughputConfig) -> dict[str, Any]:
    """All figures: seconds and FLOPs of each step, the highest rate of the machine, and ratios."""
    bench = open_bench(
        ModelConfig(name=config.model, img_size=config.img_size),
        config.batch_size,
        device=config.device,
        precision=config.precision,
        compile=config.compile,
    )
    ceiling = CEILINGS[bench.accelerator.mixed_precision]
    builders = dict(TRAINING_STEPS)
    for name, build in MATRIX_PRODUCTS.items():
        if name == ceiling or bf16_is_native():
            builders[name] = build
    timed = {name: build(bench) for name, build in builders.items()}
    flops = {name: each.flops for name, each in timed.items()}
    seconds = time_in_turn({name: each.step for name, each in timed.items()}, config.rounds, WARMUP_ROUNDS)
    del timed
    bench.accelerator.free_memory()
    seconds |= time_loading(bench, config)
    ratios = {}
    for slower, faster in TIMED_RATIOS:
        if slower in seconds:
            ratios[f"{slower} / {faster}"] = ratio_by_round(seconds[slower], seconds[faster])
    highest_rate = flops[ceiling] / statistics.median(seconds[ceiling])
    figures = {"seconds": seconds, "flops": flops, "ceiling": highest_rate, "ratios": ratios}
    return describe_conditions(config, bench) | figures


def time_in_turn(steps: dict[str, Callable[[], object]], rounds: int, warmup: int) -> Seconds:
    """Seconds of each step in each round after the warm-up."""
    seconds: Seconds = {name: [] for name in steps}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            duration = seconds_of(step)
            if number >= warmup:
                seconds[name].append(duration)
    return seconds


def time_loading(bench: Bench, config: ThroughputConfig) -> Seconds:
    """Steps from JPEG files and from memory; and only loading, on one core, by mpp and by torchvision."""
    with image_files(config.jpeg_side) as jpegs, image_files(config.jpeg_side, as_ppm=True) as ppms:
        seconds = time_crops(jpegs, ppms, sizes_of_model(bench).img_size, config.rounds)
        in_memory = mpp_step(bench).step
        from_files = steps_from_files(bench, jpegs, config.workers)
        steps = {
            "steps in memory": partial(repeat, in_memory, STEPS_PER_ROUND),
            "drain": partial(take_next, from_files, DRAINED_STEPS),
            "steps from JPEG": partial(take_next, from_files, STEPS_PER_ROUND),
        }
        seconds |= time_in_turn(steps, max(1, config.rounds // 3), warmup=1)
        from_files.close()
    del seconds["drain"]
    return seconds


def time_crops(jpegs: Path, ppms: Path, size: int, rounds: int) -> Seconds:
    """Seconds of making training crops on one core, by loader."""
    loaders = (mpp_crops(jpegs, size), mpp_crops(ppms, size), torchvision_crops(jpegs, size))
    steps = {}
    for name, crops in zip(TIMED_LOADERS, loaders, strict=True):
        steps[name] = partial(take_next, crops, CROPS_PER_ROUND)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = time_in_turn(steps, rounds, WARMUP_ROUNDS)
    torch.set_num_threads(threads)
    return seconds


def take_next(items: Iterator[Any], count: int) -> list[Any]:
    """The next items."""
    return list(islice(items, count))


def ratio_by_round(slower: list[float], faster: list[float]) -> dict[str, float]:
    """Median and extremes of the ratios of two times in the same round."""
    ratios = [a / b for a, b in zip(slower, faster, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def describe_conditions(config: ThroughputConfig, bench: Bench) -> dict[str, Any]:
    """Conditions of the figures: settings, machine, versions."""
    device = bench.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    machine = {
        "device": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    machine |= installed_versions(TIMED_PACKAGES)
    return {"config": asdict(config), "precision": bench.accelerator.mixed_precision, "machine": machine}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def print_throughput(result: dict[str, Any]) -> None:
    """Print the tables."""
    seconds = {name: statistics.median(times) for name, times in result["seconds"].items()}
    batch_size = result["config"]["batch_size"]
    print(f"\n{result['config']['model']}, batch {batch_size}, {result['precision']}, {result['machine']}")
    rows = []
    for name in TRAINING_STEPS:
        flops = result["flops"][name]
        rate = flops / seconds[name]
        row = [f"{1e3 * seconds[name]:.1f}", f"{batch_size / seconds[name]:.1f}", f"{flops / batch_size / 1e9:.2f}"]
        row += [f"{rate / 1e9:.0f}", f"{rate / result['ceiling']:.0%}"]
        rows.append([name, *row])
    headings = ["step", "ms", "images/s", "executed GFLOP an image", "executed GFLOP/s", "of the ceiling"]
    print(markdown_table(headings, rows))
    for name in MATRIX_PRODUCTS:
        if name in seconds:
            print(f"{name}: {result['flops'][name] / seconds[name] / 1e9:.0f} GFLOP/s")
    for name in TIMED_LOADERS:
        print(f"{name}: {CROPS_PER_ROUND / seconds[name]:.0f} images/s a core")
    rows = []
    for name, ratio in result["ratios"].items():
        rows.append([name, f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"])
    print(markdown_table(["ratio of times", "median (range)"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, with the settings of the command line, or of `arguments`."""
    config = parse(ThroughputConfig, arguments)
    require(timm.is_model(config.model), "model", config.model, "a timm VisionTransformer")
    result = measure_all(config)
    print_throughput(result)
    if config.out:
        write_json(Path(config.out), result)
        print(f"wrote {config.out}")


if __name__ == "__main__":
    run_main(main)
