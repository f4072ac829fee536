"""Candidates that `throughput.py` times: training steps of mpp, timm and other packages, and the loading of data.

All models have the width, depth, heads, patches, batch and precision of the one that is asked for.
"""

import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import timm.optim
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torchvision import datasets, transforms

from evaluation.frozen.encoder import load_frozen_encoder
from mpp.config import (
    Config,
    CorruptionConfig,
    DataConfig,
    ImagesConfig,
    ModelConfig,
    NetworkConfig,
    OptimConfig,
    RunConfig,
)
from mpp.data.decoding.decode import decode
from mpp.data.decoding.pictures import to_ppm
from mpp.data.loader import BatchLayout, training_loader
from mpp.data.views import Batch, ViewDataset, collate
from mpp.models.encoder import build_encoder
from mpp.models.timm_models import set_attention
from mpp.pretrain import Pretraining
from mpp.training.flops import flop_counter
from mpp.training.optim import build_optimizer, parameter_groups
from mpp.training.step import Update

SIDE = 2048  # of the square matrix product; on a GPU four times as much
LOOKED_AT = RunConfig().log_every  # updates between two looks at the device's verdict: a GPU is waited for then
IMAGE_FILES = 256  # that are loaded from


class Bench(NamedTuple):
    """Settings that all candidates are built for."""

    model: str
    batch_size: int
    compile: bool
    accelerator: Accelerator
    optimizer: str = "adam"  # what all peers have; Muon's cost is a peer of its own
    network: str = "predictor"  # and so is the autoencoder's

    @property
    def config(self) -> Config:
        """The pre-training that is timed: the paper's, or MAE's network with the paper's target."""
        masked = dict(rate=0.75, mask=1.0, random=0.0, keep=0.0) if self.network == "autoencoder" else {}
        return Config(
            run=RunConfig(dir="unused", trackers=()),
            model=ModelConfig(name=self.model),
            corruption=CorruptionConfig(**masked),
            network=NetworkConfig(name=self.network),
            optim=OptimConfig(name=self.optimizer, global_batch_size=self.batch_size),
        )


class Peer(NamedTuple):
    """A step that is timed."""

    step: Callable[[], object]
    flops: int  # executed by a step
    images: int  # of a step


def counted(step: Callable[[], object], bench: Bench, *compiled: nn.Module) -> Peer:
    """A step with its FLOPs, counted by doing it once; then its models are compiled, if that is asked for."""
    with flop_counter() as counter:
        step()
    for model in compiled if bench.compile else ():
        model.compile()
    return Peer(step, counter.get_total_flops(), bench.batch_size)


class Framework(NamedTuple):
    """Our pre-training, set up as `fit` does."""

    task: Pretraining
    update: Update
    batch: Batch  # one in memory


def set_up(bench: Bench) -> Framework:
    config, accelerator = bench.config, bench.accelerator
    layout = BatchLayout.of(bench.batch_size, None, 1, 0)
    task = Pretraining(config, accelerator, layout)
    batch = collate([task.views(task.train)[0, index % len(task.train)] for index in range(layout.batch_size)])
    return Framework(task, Update(task, config.optim), batch)


def mpp_update(bench: Bench) -> Peer:
    """The whole update: targets, forward, backward, clipping, the check for finite numbers, the optimiser."""
    return update_of(set_up(bench), bench)


def update_of(ours: Framework, bench: Bench) -> Peer:
    """The whole update, with whatever optimiser it has."""
    calls = count(1)

    def step() -> None:
        ours.update(0, [ours.batch], measure=False)
        if next(calls) % LOOKED_AT == 0:
            ours.update.finite.verify()

    return counted(step, bench, ours.task.model)


def muon_by_matrix(bench: Bench) -> Peer:
    """The same with Muon as timm has it: one matrix after the other. (In bf16, whatever the hardware has.)"""
    bench = bench._replace(optimizer="muon")
    ours, optim = set_up(bench), bench.config.optim
    settings = dict(lr=optim.lr, momentum=optim.momentum_or_default(), nesterov=True, betas=optim.betas)
    groups = parameter_groups(ours.task.model, optim)
    ours.update.optimizer.optimizer = timm.optim.Muon(groups, fallback_lr_scale=optim.adam_scale, **settings)
    return update_of(ours, bench)


def mpp_bare(bench: Bench) -> Peer:
    """The same network's forward, backward and optimiser, and nothing else."""
    ours, device = set_up(bench), bench.accelerator.device
    images, corruption = ours.batch.images.to(device), ours.batch.corruption.to(device)
    targets = ours.task.objective.targets(images, corruption.positions)

    def step() -> None:
        ours.task.objective.loss(ours.update.wrapped(images, corruption), targets).backward()
        ours.update.optimizer.step()
        ours.update.optimizer.zero_grad()

    return counted(step, bench, ours.task.model)


def timm_model(bench: Bench, fused: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """timm's model with its classification head, images and labels."""
    model = timm.create_model(bench.model, num_classes=1000).to(bench.accelerator.device)
    set_attention(model, fused)
    images = torch.randn(bench.batch_size, *model.pretrained_cfg["input_size"], device=bench.accelerator.device)
    return model, images, torch.randint(0, 1000, (bench.batch_size,), device=bench.accelerator.device)


def timm_bare(bench: Bench, fused: bool = True) -> Peer:
    """timm's forward and backward, without an optimiser."""
    model, images, labels = timm_model(bench, fused)

    def step() -> None:
        model.zero_grad()
        with bench.accelerator.autocast():
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()

    return counted(step, bench, model)


def training_step(bench: Bench, model: nn.Module, loss: Callable[[], Tensor]) -> Peer:
    """Forward, backward, clipping, and the optimiser that we use."""
    optimizer = build_optimizer(model, OptimConfig())

    def step() -> None:
        with bench.accelerator.autocast():
            value = loss()
        value.float().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return counted(step, bench, model)


def timm_training(bench: Bench) -> Peer:
    """timm's model as it comes, trained to classify."""
    model, images, labels = timm_model(bench, fused=True)
    return training_step(bench, model, lambda: F.cross_entropy(model(images), labels))


def hugging_face(bench: Bench) -> Peer:
    """Hugging Face's ViTForMaskedImageModeling, half of the patches masked."""
    from transformers import ViTConfig, ViTForMaskedImageModeling

    ours = build_encoder(bench.config.model)
    size, patch = ours.patch_embed.img_size[0], ours.patch_embed.patch_size[0]
    config = ViTConfig(
        hidden_size=ours.embed_dim,
        num_hidden_layers=len(ours.blocks),
        num_attention_heads=ours.blocks[0].attn.num_heads,
        intermediate_size=4 * ours.embed_dim,
        image_size=size,
        patch_size=patch,
        encoder_stride=patch,
    )
    device = bench.accelerator.device
    model = ViTForMaskedImageModeling(config).to(device).train()
    images = torch.randn(bench.batch_size, 3, size, size, device=device)
    masked = torch.rand(bench.batch_size, (size // patch) ** 2, device=device) < 0.5
    return training_step(bench, model, lambda: model(pixel_values=images, bool_masked_pos=masked).loss)


def vit_pytorch(bench: Bench) -> Peer:
    """vit-pytorch's masked patch prediction, half of the patches corrupted."""
    from vit_pytorch import ViT
    from vit_pytorch.mpp import MPP

    ours = build_encoder(bench.config.model)
    size, patch, heads = ours.patch_embed.img_size[0], ours.patch_embed.patch_size[0], ours.blocks[0].attn.num_heads
    numbers = dict(image_size=size, patch_size=patch, dim=ours.embed_dim, depth=len(ours.blocks), heads=heads)
    vit = ViT(num_classes=1000, dim_head=ours.embed_dim // heads, mlp_dim=4 * ours.embed_dim, **numbers)
    shares = dict(mask_prob=0.5, random_patch_prob=0.1, replace_prob=0.8)
    model = MPP(vit, patch_size=patch, dim=ours.embed_dim, **shares).to(bench.accelerator.device).train()
    images = torch.rand(bench.batch_size, 3, size, size, device=bench.accelerator.device)
    return training_step(bench, model, lambda: model(images))


def features(bench: Bench) -> Peer:
    """Features as the probes extract them, from pixels."""
    frozen = load_frozen_encoder(bench.model, random=True).to(bench.accelerator.device)
    images = torch.randint(0, 256, (bench.batch_size, 3, *frozen.img_size), dtype=torch.uint8)
    images, last = images.to(bench.accelerator.device), len(frozen.stages)

    def step() -> None:
        with torch.inference_mode(), bench.accelerator.autocast():
            frozen(images, "mean", [last])

    return counted(step, bench, frozen.model)


def timm_forward(bench: Bench) -> Peer:
    """The bare model's forward pass, from normalised input."""
    frozen = load_frozen_encoder(bench.model, random=True).to(bench.accelerator.device)
    images = torch.randn(bench.batch_size, 3, *frozen.img_size, device=bench.accelerator.device)

    def step() -> None:
        with torch.inference_mode(), bench.accelerator.autocast():
            frozen.model.forward_features(images)

    return counted(step, bench, frozen.model)


def matrix_product(bench: Bench, dtype: torch.dtype) -> Peer:
    """A square product: the highest rate of the machine."""
    side = SIDE * (4 if bench.accelerator.device.type == "cuda" else 1)
    left, right = (torch.randn(side, side, device=bench.accelerator.device, dtype=dtype) for _ in range(2))
    return Peer(lambda: left @ right, 2 * side**3, 0)


TRAINING: dict[str, Callable[[Bench], Peer]] = {
    "mpp update": mpp_update,
    "mpp update, Muon": lambda bench: mpp_update(bench._replace(optimizer="muon")),
    "mpp update, Muon matrix by matrix": muon_by_matrix,
    "mpp update, autoencoder": lambda bench: mpp_update(bench._replace(network="autoencoder")),
    "mpp forward, backward, optimiser": mpp_bare,
    "timm as it comes": timm_bare,
    "timm, attention unfused": lambda bench: timm_bare(bench, fused=False),
    "timm training step": timm_training,
} | {
    name: build
    for name, package, build in (
        ("Hugging Face ViTForMaskedImageModeling", "transformers", hugging_face),
        ("vit-pytorch MPP", "vit_pytorch", vit_pytorch),
    )
    if find_spec(package)
}
FORWARD: dict[str, Callable[[Bench], Peer]] = {"features": features, "timm forward": timm_forward}
CEILINGS: dict[str, Callable[[Bench], Peer]] = {
    "matrix product, bf16": lambda bench: matrix_product(bench, torch.bfloat16),
    "matrix product, fp32": lambda bench: matrix_product(bench, torch.float32),
}


def write_files(folder: Path, side: int, pixels: bool) -> None:
    """Photograph-like JPEGs, or PPMs of their pixels, 4/3 as wide as high, in two classes."""
    rng = np.random.default_rng(0)
    for number in range(IMAGE_FILES):
        small = Image.fromarray(rng.integers(0, 256, (side // 8, side // 6, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        file = folder / "ab"[number % 2] / f"{number}.{'ppm' if pixels else 'jpg'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        jpeg = buffer.getvalue()
        file.write_bytes(to_ppm(decode(jpeg, ImagesConfig())) if pixels else jpeg)


def end_to_end(bench: Bench, folder: Path, workers: int) -> Iterator[None]:
    """Updates on batches that are loaded from JPEG files; one for each `next`."""
    ours = set_up(bench)
    data = DataConfig(path=str(folder), crop_area=(0.05, 1.0), workers=workers, eval_split=None)
    task = Pretraining(
        replace(bench.config, data=data), bench.accelerator, BatchLayout.of(bench.batch_size, None, 1, 0)
    )
    views = task.views(task.train)
    if bench.compile:
        ours.task.model.compile()
    for step, batch in enumerate(training_loader(views, task.layout, 0, 1_000_000)):
        yield ours.update(step % 100, [batch], measure=False)


def our_images(folder: Path, size: int) -> Iterator[Tensor]:
    """Training crops as our loader makes them."""
    data = DataConfig(path=str(folder), crop_area=(0.05, 1.0), eval_split=None, eval_fraction=0.001)
    from mpp.data.sources import load_image_datasets

    views = ViewDataset(load_image_datasets(data)[0], data, size)
    for number in range(1_000_000):
        yield views[divmod(number, len(views.dataset))].images


def image_folder(folder: Path, size: int) -> Iterator[Tensor]:
    """Training crops by torchvision's ImageFolder with PIL, as most code has it."""
    crop = transforms.RandomResizedCrop(size, scale=(0.05, 1.0))
    chain = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    dataset = datasets.ImageFolder(str(folder), chain)
    for number in range(1_000_000):
        yield dataset[number % len(dataset)][0]


def files(side: int, pixels: bool = False) -> tempfile.TemporaryDirectory:
    """A folder of image files that goes when it is closed."""
    folder = tempfile.TemporaryDirectory()
    write_files(Path(folder.name), side, pixels)
    return folder
