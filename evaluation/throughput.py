"""How fast a training step is, as ratios measured in one run.

    python evaluation/throughput.py --out throughput.json

Everything is timed in turn, round after round, so that a machine whose speed drifts slows all alike; the table shows
medians, their spread, and the median of the rounds' ratios.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from evaluation.encoders import load_frozen
from mpp.config import Config, CorruptionConfig, ModelConfig, OptimConfig, RunConfig, require
from mpp.data import Batch, Share, collate
from mpp.encoder import set_attention
from mpp.launch import command, start
from mpp.loop import Update
from mpp.optim import build_optimizer
from mpp.parsing import parse
from mpp.pretrain import Pretraining

SIDE = 2048  # of the square matrix product


@dataclass(frozen=True)
class ThroughputConfig:
    """Throughput of the training step and of feature extraction against a bare timm model."""

    model: str = "vit_tiny_patch16_224"
    """A timm VisionTransformer, at its own image size."""
    batch_size: int = 16
    """Images a step."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type. auto: bf16 where the hardware computes in it."""
    rounds: int = 15
    """Rounds that count, after three that do not."""
    out: str | None = None
    """JSON file of all figures. null: none."""

    def __post_init__(self):
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")


def framework_step(config: Config, accelerator: Accelerator) -> tuple[Callable[[], object], Callable[[], object], int]:
    """The framework's whole update on a batch in memory; its forward, backward and optimiser alone; FLOPs an image."""
    share = Share.of(config.optim.global_batch_size, None, 1, 0)
    task = Pretraining(config, accelerator, share)
    batch: Batch = collate([task.views(task.train)[0, index] for index in range(share.batch)])
    flops = task.flops()
    model, optimizer = accelerator.prepare(task.model, build_optimizer(task.model, config.optim))
    update = Update(task, accelerator, model, optimizer, config.optim, share, config.run)
    images, corruption = batch.images.to(accelerator.device), batch.corruption.to(accelerator.device)
    targets = task.targets(images, corruption)

    def whole():
        update(0, [batch], measure=False)

    def bare():
        task.objective.loss(model(images, corruption), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return whole, bare, flops


def bare_timm(name: str, batch_size: int, accelerator: Accelerator, fused: bool) -> Callable[[], object]:
    """Forward and backward of timm's model with its classification head, without an optimiser."""
    model = timm.create_model(name).to(accelerator.device)
    set_attention(model, fused)
    images = torch.randn(batch_size, *model.pretrained_cfg["input_size"], device=accelerator.device)
    labels = torch.randint(0, 1000, (batch_size,), device=accelerator.device)

    def step():
        model.zero_grad()
        with accelerator.autocast():
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()

    return step


def forward_passes(
    name: str, batch_size: int, accelerator: Accelerator
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Features as the probes extract them, from pixels; and the bare model's forward pass, from normalised input."""
    frozen = load_frozen(name).to(accelerator.device)
    images = torch.randint(0, 256, (batch_size, 3, frozen.img_size, frozen.img_size), dtype=torch.uint8)
    images = images.to(accelerator.device)
    normalized, last = frozen.normalize(images), len(frozen.stages)

    def features():
        with torch.inference_mode(), accelerator.autocast():
            frozen(images, "mean", [last])

    def bare():
        with torch.inference_mode(), accelerator.autocast():
            frozen.model.forward_features(normalized)

    return features, bare


def matrix_product(accelerator: Accelerator) -> Callable[[], object]:
    """A square product in the step's precision: what the machine reaches at best."""
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    left, right = (torch.randn(SIDE, SIDE, device=accelerator.device, dtype=dtype) for _ in range(2))
    return lambda: left @ right


def time_in_turn(steps: dict[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each step in each round."""
    cuda = torch.cuda.is_available()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratios(seconds: dict[str, list[float]], slower: str, faster: str) -> dict[str, float]:
    """Median and extremes of slower / faster, round by round."""
    each = [a / b for a, b in zip(seconds[slower], seconds[faster], strict=True)]
    return {"median": statistics.median(each), "min": min(each), "max": max(each)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, as the command line, or `arguments`, say."""
    bench = parse(ThroughputConfig, arguments, prog="python evaluation/throughput.py")
    config = Config(
        run=RunConfig(dir="unused", precision=bench.precision, trackers=()),
        model=ModelConfig(name=bench.model),
        optim=OptimConfig(global_batch_size=bench.batch_size),
        corruption=CorruptionConfig(),
    )
    accelerator = start(config.run)
    whole, bare, flops = framework_step(config, accelerator)
    features, forward = forward_passes(bench.model, bench.batch_size, accelerator)
    seconds = time_in_turn(
        {
            "mpp update": whole,
            "mpp forward, backward, optimiser": bare,
            "timm as it comes": bare_timm(bench.model, bench.batch_size, accelerator, fused=True),
            "timm, attention unfused": bare_timm(bench.model, bench.batch_size, accelerator, fused=False),
            "features": features,
            "timm forward": forward,
            "matrix product": matrix_product(accelerator),
        },
        bench.rounds,
    )
    print(f"\n{bench.model}, batch {bench.batch_size}, {accelerator.mixed_precision}, torch {torch.__version__}")
    ceiling = 2 * SIDE**3 / statistics.median(seconds.pop("matrix product"))
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:34s} {median * 1e3:8.1f} ms  {bench.batch_size / median:8.1f} images/s")
    rate = flops * bench.batch_size / statistics.median(seconds["mpp update"])
    print(f"executed by mpp: {rate / 1e9:.0f} GFLOP/s, {rate / ceiling:.0%} of a matrix product's {ceiling / 1e9:.0f}")
    timms = ["timm as it comes", "timm, attention unfused"]
    compared = {f"{name} / mpp update": ratios(seconds, name, "mpp update") for name in timms}
    compared["mpp update / its forward, backward, optimiser"] = ratios(
        seconds, "mpp update", "mpp forward, backward, optimiser"
    )
    compared["features / timm forward"] = ratios(seconds, "features", "timm forward")
    for name, ratio in compared.items():
        print(f"{name:46s} {ratio['median']:.3f}  ({ratio['min']:.3f} to {ratio['max']:.3f})")
    if bench.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
        result = {"config": vars(bench), "machine": machine, "seconds": seconds, "ratios": compared}
        result |= {"executed_flops_per_second": rate, "matrix_product_flops_per_second": ceiling}
        Path(bench.out).write_text(json.dumps(result, indent=1))
        print(f"wrote {bench.out}")


if __name__ == "__main__":
    command(main)
