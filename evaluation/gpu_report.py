"""Measurements and tests of mpp on this machine's GPU, in one text file to send: `mpp gpu-report`, at most ten minutes.

Versions and card; speed and memory of training ViT-B/16 and ViT-L/16 by `mpp throughput`, compiled and not; the tests
of tests/test_gpu.py but those that compile, losses equal to the CPU's among them, from a clone with
`pip install -e '.[test]'`. The last three lines are settings to paste on a command line.

Each part is a process of its own: an error or a timeout in one does not affect the others.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, TextIO

import torch

from evaluation.config import GpuReportConfig
from evaluation.memory import peak_memory
from evaluation.throughput import LOADED_BATCH
from mpp.config import Config, ModelConfig, OptimConfig, RunConfig
from mpp.config.parsing import parse
from mpp.data.workers import MAX_DEFAULT_WORKERS
from mpp.errors import UserError
from mpp.runtime.hardware import cores
from mpp.runtime.start import run_main

ROOT = Path(__file__).parent.parent
TESTS = ("pytest", "-m", "gpu", "-k", "not compiled", "-v", "--no-header", "--tb=short", "tests/test_gpu.py")
MODELS = ("vit_base_patch16_224", "vit_large_patch16_224")
REHEARSED = ("test_vit",)
"""Instead of these, on a CPU."""
REHEARSED_BYTES = 10**8
"""Instead of a GPU's free memory."""
BATCH_SIZES = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1)
USED_SHARE = 0.8
"""Share of the free memory that a batch may take: other models are there too."""
COMPILING_GAIN = 1.02
"""Ratio of speeds from which compiling is recommended."""


class Speed(NamedTuple):
    """Speed of training; where none was measured, a batch of 1, no images and no limit by loading."""

    batch_size: int
    training: float
    """Images a second."""
    loading: float
    """Images a second that one core loads."""


class Report:
    """The file, and the time until which it is written."""

    def __init__(self, file: TextIO, config: GpuReportConfig):
        self.file, self.config = file, config
        self.end = time.monotonic() + 60 * config.minutes

    def add(self, title: str, *words: str) -> None:
        """Write a part: the output of a Python module's command, as far as it comes in the time that is left."""
        print(f"== {title}\n", file=self.file, flush=True)
        try:
            done = subprocess.run(
                (sys.executable, "-m", *words),
                cwd=ROOT,
                env=os.environ | {"GPU_SUITE_DEVICE": self.config.device},
                stdout=self.file,
                stderr=subprocess.STDOUT,
                timeout=self.end - time.monotonic(),
            )
            end = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"stopped: minutes {self.config.minutes:g} are over"
        print(f"\n{end}\n", file=self.file, flush=True)
        print(f"{title}: {end}", flush=True)

    def add_training(self, model: str, batch_size: int, compile: bool) -> Speed:
        """Speed of training a model; with half the batch where it fails, such as for want of memory."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "throughput.json"
            for size in (batch_size, batch_size // 2):
                words = [
                    f"--model={model}",
                    f"--batch_size={size}",
                    f"--compile={str(compile).lower()}",
                    f"--out={out}",
                ]
                words.append(f"--device={'auto' if self.config.device == 'cuda' else 'cpu'}")
                title = f"{model}, {'compiled' if compile else 'eager'}, batch {size}"
                self.add(title, "evaluation.throughput", *words)
                if out.is_file():
                    seconds = json.loads(out.read_text(encoding="utf-8"))["seconds"]
                    training, loading = (median(seconds[name]) for name in ("mpp training step", "mpp's loading"))
                    return Speed(size, size / training, LOADED_BATCH / loading)
        return Speed(1, 0.0, math.inf)


def largest_batch(model: str) -> int:
    """The largest batch that fits into the GPU's free memory with a fifth left free, accumulation included."""
    config = Config(run=RunConfig(dir="unused"), model=ModelConfig(name=model), optim=OptimConfig(name="adam"))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else REHEARSED_BYTES
    fitting = (size for size in BATCH_SIZES if peak_memory(config, size, passes=2)["total"] <= USED_SHARE * free)
    return next(fitting, 1)


def advice(eager: Speed, compiled: Speed, workers: int) -> str:
    """Advice on settings for ViT-B/16; its last three lines can be pasted on a command line."""
    compiles = compiled.training > COMPILING_GAIN * eager.training
    best = compiled if compiles else eager
    needed = math.ceil(best.training / best.loading) or workers
    lines = []
    if needed > workers:
        lines.append(f"it trains as fast as {needed} cores load, a GPU's share is {workers}: see `mpp prepare`")
    lines += [
        "for ViT-B/16, after `mpp pretrain --config imagenet_vit_b16`:",
        f"--data.batch_size={best.batch_size} \\",
        f"--run.compile={str(compiles).lower()} \\",
        f"--data.workers={min(workers, needed)}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    config = parse(GpuReportConfig, arguments)
    on_gpu = config.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu rehearses the report")
    workers = max(1, min(MAX_DEFAULT_WORKERS, cores() // max(1, torch.cuda.device_count()) - 1))  # a GPU's share
    first, *others = MODELS if on_gpu else REHEARSED
    with open(config.out, "w", encoding="utf-8") as file:
        report = Report(file, config)
        report.add("versions and card", "torch.utils.collect_env")
        batch_size = config.batch_size or largest_batch(first)
        counted = (f"--model.name={first}", f"--optim.global_batch_size={batch_size}", "--optim.name=adam")
        report.add(f"{first}, memory as it is counted", "evaluation.memory", *counted)
        eager, compiled = (report.add_training(first, batch_size, compile) for compile in (False, True))
        report.add("tests", *TESTS)
        for model in others:
            for compile in (False, True):
                report.add_training(model, config.batch_size or largest_batch(model), compile)
        recommended = advice(eager, compiled, workers)
        print(f"== recommended settings\n\n{recommended}", file=file)
    print(f"wrote {config.out}: send this file\n{recommended}")


if __name__ == "__main__":
    run_main(main)
