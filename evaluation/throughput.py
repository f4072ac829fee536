"""Speed of training: ratios to other code and to the machine's own limits, all measured in one run.

    python evaluation/throughput.py --out throughput.json

Everything is timed in turn, round after round, so that a machine whose speed drifts slows all alike; the tables show
medians, and the median and range of the rounds' ratios. `pip install -e '.[peers]'` adds other packages to it. All
models have the width, depth, heads, patches, batch and precision of the one that is asked for.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import release_memory
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from evaluation.config import ThroughputConfig
from evaluation.frozen.results import write_json
from mpp.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from mpp.config.parsing import parse
from mpp.data.loader import BatchLayout, training_loader
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining
from mpp.runtime.messages import progress_bar
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
    """Model, images and device of all training steps."""

    model: ModelConfig
    encoder: nn.Module
    """As it says; the models of other packages have its sizes."""
    images: Tensor
    """Random images (B, 3, H, W) on the device."""
    compile: bool
    accelerator: Accelerator


def mpp_step(bench: Bench) -> Step:
    """The whole step: targets, forward, backward, clipping, the check for finite sizes, the optimiser."""
    optim = replace(ADAM, global_batch_size=len(bench.images))
    run = RunConfig(trackers=(), compile=bench.compile)
    config = Config(run, DataConfig(workers=0), model=bench.model, optim=optim)
    task = Pretraining(config, bench.accelerator, BatchLayout.of(len(bench.images), None, 1, 0))
    batches = list(training_loader(task.views(task.train), task.layout, 0, 1))
    training_step = TrainingStep(task, optim)

    def step() -> None:
        training_step(0, batches, measure=False)
        training_step.verify()

    return step


def peer_step(bench: Bench, model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Another model's forward, backward, clipping, and the optimiser that we use."""
    optimizer = build_optimizer(model.to(bench.images.device).train(), ADAM)
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
    images, config = bench.images, bench.model
    model = timm.create_model(config.name, num_classes=1000, img_size=config.img_size)
    labels = torch.randint(0, 1000, (len(images),), device=images.device)
    return peer_step(bench, model, lambda: F.cross_entropy(model(images), labels))


def hugging_face_step(bench: Bench) -> Step:
    """Hugging Face's ViTForMaskedImageModeling, half of the patches masked."""
    from transformers import ViTConfig, ViTForMaskedImageModeling

    images, encoder = bench.images, bench.encoder
    config = ViTConfig(
        hidden_size=encoder.embed_dim,
        num_hidden_layers=len(encoder.blocks),
        num_attention_heads=encoder.blocks[0].attn.num_heads,
        intermediate_size=4 * encoder.embed_dim,
        image_size=images.shape[-1],
        patch_size=encoder.patch_embed.patch_size[0],
        encoder_stride=encoder.patch_embed.patch_size[0],
    )
    model = ViTForMaskedImageModeling(config)
    masked = torch.rand(len(images), encoder.patch_embed.num_patches, device=images.device) < 0.5
    return peer_step(bench, model, lambda: model(pixel_values=images, bool_masked_pos=masked).loss)


def vit_pytorch_step(bench: Bench) -> Step:
    """vit-pytorch's masked patch prediction, half of the patches corrupted."""
    from vit_pytorch import ViT
    from vit_pytorch.mpp import MPP

    images, encoder = bench.images, bench.encoder
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
    model = MPP(vit, mask_prob=0.5, random_patch_prob=0.1, replace_prob=0.8, **sizes)
    return peer_step(bench, model, lambda: model(images))


STEPS: dict[str, Callable[[Bench], Step]] = {"mpp training step": mpp_step, "timm training step": timm_step}
"""Training steps by name: of other packages, those that are installed."""
if find_spec("transformers"):
    STEPS["Hugging Face ViTForMaskedImageModeling"] = hugging_face_step
if find_spec("vit_pytorch"):
    STEPS["vit-pytorch MPP"] = vit_pytorch_step


def flops_of(step: Step) -> int:
    """FLOPs that a step executes."""
    with flop_counter() as counter:
        step()
    return counter.get_total_flops()


def matrix_products(accelerator: Accelerator) -> Step:
    """Products of two square matrices, the highest rate that the machine reaches.

    They are of random numbers: products of ones take less power, so that a GPU does them at a higher clock.
    """
    kind = accelerator.device.type
    side = MATRIX_SIDE[kind]
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    left, right = torch.randn(2, side, side, device=kind, dtype=dtype)
    return lambda: [left @ right for _ in range(MATRIX_PRODUCTS[kind])]


# --- loading ---


def write_images(folder: Path, side: int, kind: str = "jpg") -> None:
    """Write a folder of photograph-like images of one class, `side` pixels high and 4/3 as wide.

    Args:
        kind: jpg, or ppm: plain pixels.
    """
    rng = np.random.default_rng(0)
    (folder / "all").mkdir(parents=True)
    for number in range(IMAGE_FILES):
        small = Image.fromarray(rng.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8))
        large = small.resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
        large.save(folder / "all" / f"{number}.{kind}", quality=90)


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


def time_in_turn(steps: dict[str, Step], rounds: int) -> pd.DataFrame:
    """Seconds of each step (a column) in each round (a row) after the warm-up, the work of a GPU included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    seconds = {name: [] for name in steps}
    for _ in progress_bar(range(WARMUP_ROUNDS + rounds), desc="rounds"):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            wait()
            seconds[name].append(time.perf_counter() - begin)
    return pd.DataFrame(seconds)[WARMUP_ROUNDS:]


def time_loading(side: int, size: int, rounds: int) -> pd.DataFrame:
    """Seconds of loading a batch of crops of `size` pixels, by loader and round: see `time_in_turn`.

    On one core: torch has one thread from here on.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        jpegs, ppms = Path(folder) / "jpg", Path(folder) / "ppm"
        write_images(jpegs, side)
        write_images(ppms, side, "ppm")
        steps = {
            "mpp's loading": partial(next, mpp_batches(jpegs, size)),
            "mpp's loading of PPM": partial(next, mpp_batches(ppms, size)),
            "ImageFolder with PIL": partial(next, torchvision_batches(jpegs, size)),
        }
        return time_in_turn(steps, rounds)


def measure(config: ThroughputConfig) -> dict[str, Any]:
    """Print the tables; return all figures: seconds by round, FLOPs, the machine's highest rate, ratios."""
    accelerator = start(RunConfig(trackers=(), precision=config.precision))
    model = ModelConfig(name=config.model, img_size=config.img_size)
    encoder = build_encoder(model)
    images = torch.rand(config.batch_size, 3, *encoder.patch_embed.img_size, device=accelerator.device)
    bench = Bench(model, encoder, images, config.compile, accelerator)
    of_an_image = bench._replace(images=images[:1], compile=False)
    flops = pd.Series({name: len(images) * flops_of(build(of_an_image)) for name, build in STEPS.items()})
    accelerator.free_memory()  # which counting took
    release_memory()  # once more, as a prepared model refers to itself
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps, memory_gb = {}, 0.0
    for name, build in STEPS.items():
        steps[name] = build(bench)
        steps[name]()
        memory_gb = memory_gb or memory_bytes(accelerator.device) / 1e9  # of the first, ours: no other model is there
    steps[CEILING] = matrix_products(accelerator)
    flops[CEILING] = flops_of(steps[CEILING])
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.machine()
    machine = {"device": device, "threads": torch.get_num_threads(), "precision": accelerator.mixed_precision}
    machine |= {"torch": torch.__version__, "timm": timm.__version__}
    seconds = time_in_turn(steps, config.rounds).join(time_loading(config.jpeg_side, images.shape[-1], config.rounds))

    median = seconds.median()
    image_counts = pd.Series(config.batch_size, flops.index).reindex(median.index, fill_value=LOADED_BATCH)
    rates = flops / median
    columns = {
        "ms": 1e3 * median,
        "images/s": image_counts / median,
        "executed GFLOP an image": flops / image_counts / 1e9,
        "executed GFLOP/s": rates / 1e9,
        "of the ceiling": rates / rates[CEILING],
    }
    pairs = {f"{slow} / {fast}": seconds[slow] / seconds[fast] for slow, fast in RATIOS if slow in seconds}
    ratios = pd.DataFrame(pairs).agg(["median", "min", "max"])
    print(f"\n{config.model}, batch {config.batch_size}, {machine}; loading on one core")
    print(f"memory of mpp's step: {memory_gb:.3g} GB")
    print(pd.DataFrame(columns).loc[median.index].round(2).to_string(na_rep=""))
    print(ratios.T.round(3).to_string())
    return {
        "config": asdict(config),
        "machine": machine,
        "seconds": seconds.to_dict("list"),
        "flops": flops.to_dict(),
        "memory_gb": memory_gb,
        "ratios": ratios.to_dict(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, with the settings of the command line, or of `arguments`."""
    config = parse(ThroughputConfig, arguments)
    result = measure(config)
    if config.out:
        write_json(Path(config.out), result)
        print(f"wrote {config.out}")


if __name__ == "__main__":
    run_main(main)
