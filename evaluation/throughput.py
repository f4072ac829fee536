"""Speed of training: ratios to other code and to the machine's own limits, all measured in one run.

    python evaluation/throughput.py --out throughput.json

Everything is timed in turn, round after round, so that a machine whose speed drifts slows all alike; the tables show
medians, and the median and range of the rounds' ratios. `pip install -e '.[peers]'` adds other packages to it. All
models have the width, depth, heads, patches, batch and precision of the one that is asked for.
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from evaluation.config import ThroughputConfig
from evaluation.frozen.results import write_json
from mpp.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, require
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout, training_loader
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining
from mpp.runtime.start import run_main, start
from mpp.training.flops import flop_counter
from mpp.training.log import memory_bytes
from mpp.training.loop import TrainingStep
from mpp.training.optim import build_optimizer

WARMUP_ROUNDS = 3
IMAGE_FILES = 256
"""Images that are loaded, again and again."""
LOADED_BATCH = 32
CROP_AREA = (0.05, 1.0)
ENDLESS_STEPS = 1_000_000
CEILING = "matrix product"
MATRIX_SIDE = {"cpu": 2048, "cuda": 8192}
MATRIX_PRODUCTS = {"cpu": 1, "cuda": 20}
"""Products in a row, which keep a GPU as busy as training does: its clock falls under a load that lasts."""
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "transformers", "vit-pytorch")
RATIOS = (
    ("timm training step", "mpp training step"),
    ("vit-pytorch MPP", "mpp training step"),
    ("Hugging Face ViTForMaskedImageModeling", "mpp training step"),
    ("ImageFolder with PIL", "mpp's loading"),
    ("ImageFolder with PIL", "mpp's loading of PPM"),
)
"""Pairs whose times are divided."""
ADAM = OptimConfig(name="adam")
"""The optimiser that other packages have too."""

Step = Callable[[], object]


# --- training steps ---


class Bench(NamedTuple):
    """Model, batch size and device of all steps."""

    model: ModelConfig
    batch_size: int
    compile: bool
    accelerator: Accelerator

    @property
    def images(self) -> Tensor:
        """Random images (B, 3, H, W) on the device."""
        size = build_encoder(self.model).patch_embed.img_size
        return torch.rand(self.batch_size, 3, *size, device=self.accelerator.device)


def mpp_step(bench: Bench) -> Step:
    """The whole step: targets, forward, backward, clipping, the check for finite sizes, the optimiser."""
    run = RunConfig(dir="unused", trackers=())
    optim = replace(ADAM, global_batch_size=bench.batch_size)
    config = Config(run=run, data=DataConfig(workers=0), model=bench.model, optim=optim)
    task = Pretraining(config, bench.accelerator, BatchLayout.of(bench.batch_size, None, 1, 0))
    batch = next(iter(training_loader(task.views(task.train), task.layout, 0, 1)))
    training_step = TrainingStep(task, optim)
    numbers = count(1)
    if bench.compile:
        task.model.compile()

    def step() -> None:
        training_step(0, [batch], measure=False)
        if next(numbers) % run.log_every == 0:
            training_step.verify()  # which waits for a GPU

    return step


def peer_step(bench: Bench, model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Another model's forward, backward, clipping, and the optimiser that we use."""
    optimizer = build_optimizer(model, ADAM)
    if bench.compile:
        model.compile()

    def step() -> None:
        with bench.accelerator.autocast():
            value = loss()
        value.float().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timm_step(bench: Bench) -> Step:
    """timm's model as it comes, trained to classify."""
    images, sizes = bench.images, bench.model
    model = timm.create_model(sizes.name, num_classes=1000, img_size=sizes.img_size).to(images.device)
    labels = torch.randint(0, 1000, (len(images),), device=images.device)
    return peer_step(bench, model, lambda: F.cross_entropy(model(images), labels))


def hugging_face_step(bench: Bench) -> Step:
    """Hugging Face's ViTForMaskedImageModeling, half of the patches masked."""
    from transformers import ViTConfig, ViTForMaskedImageModeling

    images, encoder = bench.images, build_encoder(bench.model)
    config = ViTConfig(
        hidden_size=encoder.embed_dim,
        num_hidden_layers=len(encoder.blocks),
        num_attention_heads=encoder.blocks[0].attn.num_heads,
        intermediate_size=4 * encoder.embed_dim,
        image_size=images.shape[-1],
        patch_size=encoder.patch_embed.patch_size[0],
        encoder_stride=encoder.patch_embed.patch_size[0],
    )
    model = ViTForMaskedImageModeling(config).to(images.device).train()
    masked = torch.rand(len(images), encoder.patch_embed.num_patches, device=images.device) < 0.5
    return peer_step(bench, model, lambda: model(pixel_values=images, bool_masked_pos=masked).loss)


def vit_pytorch_step(bench: Bench) -> Step:
    """vit-pytorch's masked patch prediction, half of the patches corrupted."""
    from vit_pytorch import ViT
    from vit_pytorch.mpp import MPP

    images, encoder = bench.images, build_encoder(bench.model)
    attention, sizes = encoder.blocks[0].attn, dict(patch_size=encoder.patch_embed.patch_size[0], dim=encoder.embed_dim)
    vit = ViT(
        image_size=images.shape[-1],
        num_classes=1000,
        depth=len(encoder.blocks),
        heads=attention.num_heads,
        dim_head=attention.head_dim,
        mlp_dim=4 * encoder.embed_dim,
        **sizes,
    )
    model = MPP(vit, mask_prob=0.5, random_patch_prob=0.1, replace_prob=0.8, **sizes).to(images.device).train()
    return peer_step(bench, model, lambda: model(images))


STEPS: dict[str, Callable[[Bench], Step]] = {"mpp training step": mpp_step, "timm training step": timm_step}
"""Training steps by name: of other packages, those that are installed."""
if find_spec("transformers"):
    STEPS["Hugging Face ViTForMaskedImageModeling"] = hugging_face_step
if find_spec("vit_pytorch"):
    STEPS["vit-pytorch MPP"] = vit_pytorch_step


def flops_of_image(build: Callable[[Bench], Step], bench: Bench) -> int:
    """FLOPs that a training step executes for an image."""
    step = build(bench._replace(batch_size=1, compile=False))
    with flop_counter() as counter:
        step()
    return counter.get_total_flops()


def matrix_products(accelerator: Accelerator) -> tuple[Step, int]:
    """Products of two square matrices, the highest rate that the machine reaches, and their FLOPs.

    They are of random numbers: products of ones take less power, so that a GPU does them at a higher clock.
    """
    kind = accelerator.device.type
    side, products = MATRIX_SIDE[kind], MATRIX_PRODUCTS[kind]
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    left, right = torch.randn(2, side, side, device=kind, dtype=dtype)
    return lambda: [left @ right for _ in range(products)], 2 * side**3 * products


# --- loading ---


@contextmanager
def image_files(side: int, kind: str = "jpg") -> Iterator[Path]:
    """A folder of photograph-like images, `side` pixels high and 4/3 as wide; deleted when it is closed.

    Args:
        kind: jpg, or ppm: plain pixels.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "all").mkdir()
        for number in range(IMAGE_FILES):
            small = Image.fromarray(rng.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8))
            large = small.resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
            large.save(Path(folder) / "all" / f"{number}.{kind}", quality=90)
        yield Path(folder)


def mpp_batches(folder: Path, size: int) -> Iterator[Any]:
    """Batches of LOADED_BATCH training crops as our loader makes them."""
    data = DataConfig(path=str(folder), crop_area=CROP_AREA, eval_split=None, eval_fraction=0.001, workers=0)
    train, _ = load_image_datasets(data)
    layout = BatchLayout.of(LOADED_BATCH, None, 1, 0)
    return iter(training_loader(ViewDataset(train, data, size), layout, 0, ENDLESS_STEPS))


def torchvision_batches(folder: Path, size: int) -> Iterator[Any]:
    """The same by torchvision's ImageFolder with PIL, as most code makes them."""
    crop = transforms.RandomResizedCrop(size, scale=CROP_AREA)
    transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    loader = DataLoader(datasets.ImageFolder(folder, transform), LOADED_BATCH, shuffle=True)
    while True:
        yield from loader


# --- times ---


def time_now() -> float:
    """A clock in seconds, read when a GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def time_in_turn(steps: dict[str, Step], rounds: int) -> pd.DataFrame:
    """Seconds of each step (a column) in each round (a row) after the warm-up, the work of a GPU included."""
    seconds = {name: [] for name in steps}
    for _ in range(WARMUP_ROUNDS + rounds):
        for name, step in steps.items():
            begin = time_now()
            step()
            seconds[name].append(time_now() - begin)
    return pd.DataFrame(seconds)[WARMUP_ROUNDS:]


def time_loading(config: ThroughputConfig, size: int) -> pd.DataFrame:
    """Seconds of loading a batch on one core, by loader and round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with image_files(config.jpeg_side) as jpegs, image_files(config.jpeg_side, "ppm") as ppms:
        steps = {
            "mpp's loading": partial(next, mpp_batches(jpegs, size)),
            "mpp's loading of PPM": partial(next, mpp_batches(ppms, size)),
            "ImageFolder with PIL": partial(next, torchvision_batches(jpegs, size)),
        }
        seconds = time_in_turn(steps, config.rounds)
    torch.set_num_threads(threads)
    return seconds


def measure(config: ThroughputConfig) -> dict[str, Any]:
    """All figures: seconds by round, FLOPs of each step, the highest rate of the machine, ratios, conditions."""
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    accelerator = start(RunConfig(dir="unused", trackers=(), precision=config.precision))
    model = ModelConfig(name=config.model, img_size=config.img_size)
    bench = Bench(model, config.batch_size, config.compile, accelerator)
    flops = {name: config.batch_size * flops_of_image(build, bench) for name, build in STEPS.items()}
    ours, *others = STEPS
    steps = {ours: STEPS[ours](bench)}
    steps[ours]()
    memory = memory_bytes(accelerator.device)  # before there are other models
    steps |= {name: STEPS[name](bench) for name in others}
    steps[CEILING], flops[CEILING] = matrix_products(accelerator)
    seconds = time_in_turn(steps, config.rounds)
    seconds = seconds.join(time_loading(config, bench.images.shape[-1]))
    ratios = {
        f"{slower} / {faster}": seconds[slower] / seconds[faster] for slower, faster in RATIOS if slower in seconds
    }
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.machine()
    versions = {each.name: each.version for each in distributions() if each.name in PACKAGES}
    return {
        "config": asdict(config),
        "precision": accelerator.mixed_precision,
        "machine": {"device": device, "threads": torch.get_num_threads()} | versions,
        "seconds": seconds.to_dict("list"),
        "flops": flops,
        "ceiling": flops[CEILING] / seconds[CEILING].median(),
        "memory_gb": memory / 1e9,
        "ratios": pd.DataFrame(ratios).agg(["median", "min", "max"]).to_dict(),
    }


def print_throughput(result: dict[str, Any]) -> None:
    """Print the tables."""
    batch_size = result["config"]["batch_size"]
    seconds, flops = pd.DataFrame(result["seconds"]).median(), pd.Series(result["flops"])
    columns = {
        "ms": 1e3 * seconds,
        "images/s": batch_size / seconds,
        "executed GFLOP an image": flops / batch_size / 1e9,
        "executed GFLOP/s": flops / seconds / 1e9,
        "of the ceiling": flops / seconds / result["ceiling"],
    }
    print(f"\n{result['config']['model']}, batch {batch_size}, {result['precision']}, {result['machine']}")
    print(f"memory of mpp's step: {result['memory_gb']:.3g} GB")
    print(pd.DataFrame(columns).loc[list(flops.index)].round(2).to_string())
    for name, each in seconds.drop(flops.index).items():
        print(f"{name}: {LOADED_BATCH / each:.0f} images/s a core")
    print(pd.DataFrame(result["ratios"]).T.round(3).to_string())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, with the settings of the command line, or of `arguments`."""
    config = parse(ThroughputConfig, arguments)
    require(timm.is_model(config.model), "model", config.model, "a timm VisionTransformer")
    result = measure(config)
    print_throughput(result)
    if config.out:
        write_json(Path(config.out), result)
        print(f"wrote {config.out}")


if __name__ == "__main__":
    run_main(main)
