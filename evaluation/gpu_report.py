"""Measurements and tests of mpp on this machine's GPU, in one text file to send: `mpp gpu-report`, at most ten minutes.

Versions and card; speed and memory of training ViT-B/16 and ViT-L/16 by `mpp throughput`, compiled and not; the tests
of tests/test_gpu.py but those that compile, losses equal to the CPU's among them, from a clone with
`pip install -e '.[test]'`. The last two lines are settings to paste on a command line.

Each part is a process of its own: an error or a timeout in one does not affect the others.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple, TextIO

import torch

from evaluation.config import GpuReportConfig
from evaluation.memory import peak_memory
from mpp.config import Config, ModelConfig, OptimConfig
from mpp.config.parsing import parse
from mpp.errors import UserError
from mpp.runtime.start import run_main

ROOT = Path(__file__).parent.parent
TESTS = ("pytest", "-m", "gpu", "-k", "not compiled", "-v", "--no-header", "--tb=short", "tests/test_gpu.py")
MODELS = {"cuda": ("vit_base_patch16_224", "vit_large_patch16_224"), "cpu": ("test_vit",)}
REHEARSED_BYTES = 10**8
"""Instead of a GPU's free memory."""
BATCH_SIZES = tuple(2**power for power in range(10, -1, -1))
USED_SHARE = 0.5
"""Share of the free memory that a batch may take: other models are there too, and may keep their attention's scores."""
COMPILING_GAIN = 1.02
"""Ratio of speeds from which compiling is recommended."""


class Report(NamedTuple):
    """The file, and how its parts are run."""

    file: TextIO
    environment: dict[str, str]
    """Variables that choose the device."""
    end: float
    """Time of `time.monotonic` until which it is written."""

    def add(self, title: str, *words: str) -> None:
        """Write a part: the output of a Python module's command, as far as it comes in the time that is left."""
        print(f"== {title}\n", file=self.file, flush=True)
        print(f"{title} ...", flush=True)
        try:
            done = subprocess.run(
                (sys.executable, "-m", *words),
                cwd=ROOT,
                env=os.environ | self.environment,
                stdout=self.file,
                stderr=subprocess.STDOUT,
                timeout=self.end - time.monotonic(),
            )
            end = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            end = "stopped: the time is over"
        print(f"\n{end}\n", file=self.file, flush=True)
        print(f"{title}: {end}", flush=True)

    def add_training(self, model: str, batch_size: int, compile: bool) -> float:
        """Speed of training a model, in images a second; 0 where it could not be measured."""
        with TemporaryDirectory() as folder:
            out = Path(folder) / "throughput.json"
            self.add(
                f"{model}, {'compiled' if compile else 'eager'}, batch {batch_size}",
                "evaluation.throughput",
                f"--model={model}",
                f"--batch_size={batch_size}",
                f"--compile={str(compile).lower()}",
                f"--out={out}",
            )
            if not out.is_file():
                return 0.0
            seconds = json.loads(out.read_text(encoding="utf-8"))["seconds"]
        return batch_size / median(seconds["mpp training step"])


def largest_batch(model: str) -> int:
    """The largest batch that fits into half of the GPU's free memory, accumulation included."""
    config = Config(model=ModelConfig(name=model), optim=OptimConfig(name="adam"))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else REHEARSED_BYTES
    fitting = (size for size in BATCH_SIZES if peak_memory(config, size, passes=2)["total"] <= USED_SHARE * free)
    return next(fitting, 1)


def advice(batch_size: int, eager: float, compiled: float) -> str:
    """Settings for ViT-B/16 by its speeds in images a second; the last two lines can be pasted on a command line."""
    compiles = str(compiled > COMPILING_GAIN * eager).lower()
    title = "for ViT-B/16, after `mpp pretrain --config imagenet_vit_b16`:"
    return f"{title}\n--data.batch_size={batch_size} \\\n--run.compile={compiles}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Report with the settings of the command line, or of `arguments`."""
    config = parse(GpuReportConfig, arguments)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu rehearses the report")
    batch_sizes = {model: config.batch_size or largest_batch(model) for model in MODELS[config.device]}
    first, *others = batch_sizes
    counted = (f"--model.name={first}", f"--optim.global_batch_size={batch_sizes[first]}", "--optim.name=adam")
    with open(config.out, "w", encoding="utf-8") as file:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.device == "cpu" else {}
        report = Report(file, {"GPU_SUITE_DEVICE": config.device} | hidden, time.monotonic() + 60 * config.minutes)
        report.add("versions and card", "torch.utils.collect_env")
        report.add(f"{first}, memory as it is counted", "evaluation.memory", *counted)
        eager, compiled = (report.add_training(first, batch_sizes[first], compile) for compile in (False, True))
        report.add("tests", *TESTS)
        for model, compile in product(others, (False, True)):
            report.add_training(model, batch_sizes[model], compile)
        recommended = advice(batch_sizes[first], eager, compiled)
        print(f"== recommended settings\n\n{recommended}", file=file)
    print(f"wrote {config.out}: send this file\n{recommended}")


if __name__ == "__main__":
    run_main(main)
