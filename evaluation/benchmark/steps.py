"""Training steps that throughput.py times, of mpp and of other packages, and the matrix product that limits them.

All models have the width, depth, heads, patches, batch and precision of the one that is asked for.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Literal, NamedTuple

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from mpp.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from mpp.data.loader import BatchLayout, training_loader
from mpp.data.views import Batch
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining
from mpp.runtime.start import start
from mpp.training.flops import flop_counter
from mpp.training.loop import TrainingStep
from mpp.training.optim import build_optimizer

CPU_MATRIX_SIDE = 2048
GPU_MATRIX_SIDE = 4 * CPU_MATRIX_SIDE
GPU_MATRIX_PRODUCTS = 20
"""Products in a row, which keep a GPU as busy as training does: its clock falls under a load that lasts."""


class Bench(NamedTuple):
    """Model, batch size and device of all steps."""

    model: ModelConfig
    batch_size: int
    compile: bool
    accelerator: Accelerator

    @property
    def config(self) -> Config:
        """The pre-training that is timed: the paper's, with the optimiser that other packages have too."""
        precision = "bf16" if self.accelerator.mixed_precision == "bf16" else "fp32"
        return Config(
            run=RunConfig(dir="unused", trackers=(), precision=precision),
            data=DataConfig(workers=0),
            model=self.model,
            optim=OptimConfig(name="adam", global_batch_size=self.batch_size),
        )

    @property
    def layout(self) -> BatchLayout:
        """One forward pass of the whole batch."""
        return BatchLayout.of(self.batch_size, None, 1, 0)


def open_bench(
    model: ModelConfig,
    batch_size: int,
    *,
    device: Literal["auto", "cpu"],
    precision: Literal["auto", "bf16", "fp32"] = "auto",
    compile: bool = False,
) -> Bench:
    """The device in its precision, and the sizes that all steps are built to."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    accelerator = start(RunConfig(dir="unused", precision=precision, trackers=(), compile=compile))
    return Bench(model, batch_size, compile, accelerator)


class TimedStep(NamedTuple):
    """A step that is timed."""

    step: Callable[[], object]
    flops: int
    """FLOPs that it executes."""


class ViTSizes(NamedTuple):
    """Sizes of a Vision Transformer, for packages that build one by them."""

    img_size: int
    patch_size: int
    width: int
    depth: int
    heads: int


def seconds_of(step: Callable[[], object]) -> float:
    """Duration of a step, the work of a GPU included."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    begin = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - begin


def repeat(step: Callable[[], object], count: int) -> None:
    """Do a step several times."""
    for _ in range(count):
        step()


def count_and_compile(step: Callable[[], object], bench: Bench, model: nn.Module) -> TimedStep:
    """A step with its FLOPs, counted by doing it once; then its model is compiled, if that is asked for."""
    with flop_counter() as counter:
        step()
    if bench.compile:
        model.compile()
    return TimedStep(step, counter.get_total_flops())


def set_up_pretraining(bench: Bench) -> tuple[Pretraining, TrainingStep, Batch]:
    """Our pre-training as a run sets it up, and a batch of the package's photographs as the loader returns it."""
    task = Pretraining(bench.config, bench.accelerator, bench.layout)
    (batch,) = training_loader(task.views(task.train), bench.layout, 0, 1)
    return task, TrainingStep(task, bench.config.optim), batch


def mpp_step(bench: Bench) -> TimedStep:
    """The whole step: targets, forward, backward, clipping, the check for finite sizes, the optimiser."""
    task, training_step, batch = set_up_pretraining(bench)
    calls = count(1)

    def step() -> None:
        training_step(0, [batch], measure=False)
        if next(calls) % bench.config.run.log_every == 0:
            training_step.verify()  # which waits for a GPU

    return count_and_compile(step, bench, task.model)


def training_step(bench: Bench, model: nn.Module, loss: Callable[[], torch.Tensor]) -> TimedStep:
    """Forward, backward, clipping, and the optimiser that we use."""
    optimizer = build_optimizer(model, bench.config.optim)

    def step() -> None:
        with bench.accelerator.autocast():
            value = loss()
        value.float().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return count_and_compile(step, bench, model)


def timm_step(bench: Bench) -> TimedStep:
    """timm's model as it comes, trained to classify."""
    device = bench.accelerator.device
    model = timm.create_model(bench.model.name, num_classes=1000, img_size=bench.model.img_size).to(device)
    images = torch.randn(bench.batch_size, 3, *model.patch_embed.img_size, device=device)
    labels = torch.randint(0, 1000, (bench.batch_size,), device=device)
    return training_step(bench, model, lambda: F.cross_entropy(model(images), labels))


def hugging_face_step(bench: Bench) -> TimedStep:
    """Hugging Face's ViTForMaskedImageModeling, half of the patches masked."""
    from transformers import ViTConfig, ViTForMaskedImageModeling

    sizes, device = sizes_of_model(bench), bench.accelerator.device
    config = ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        image_size=sizes.img_size,
        patch_size=sizes.patch_size,
        encoder_stride=sizes.patch_size,
    )
    model = ViTForMaskedImageModeling(config).to(device).train()
    images = torch.randn(bench.batch_size, 3, sizes.img_size, sizes.img_size, device=device)
    patches = (sizes.img_size // sizes.patch_size) ** 2
    masked = torch.rand(bench.batch_size, patches, device=device) < 0.5
    return training_step(bench, model, lambda: model(pixel_values=images, bool_masked_pos=masked).loss)


def vit_pytorch_step(bench: Bench) -> TimedStep:
    """vit-pytorch's masked patch prediction, half of the patches corrupted."""
    from vit_pytorch import ViT
    from vit_pytorch.mpp import MPP

    sizes, device = sizes_of_model(bench), bench.accelerator.device
    vit = ViT(
        image_size=sizes.img_size,
        patch_size=sizes.patch_size,
        num_classes=1000,
        dim=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        dim_head=sizes.width // sizes.heads,
        mlp_dim=4 * sizes.width,
    )
    model = MPP(
        vit,
        patch_size=sizes.patch_size,
        dim=sizes.width,
        mask_prob=0.5,
        random_patch_prob=0.1,
        replace_prob=0.8,
    )
    model = model.to(device).train()
    images = torch.rand(bench.batch_size, 3, sizes.img_size, sizes.img_size, device=device)
    return training_step(bench, model, lambda: model(images))


def sizes_of_model(bench: Bench) -> ViTSizes:
    """The sizes of the model that is asked for."""
    encoder = build_encoder(bench.config.model)
    return ViTSizes(
        img_size=encoder.patch_embed.img_size[0],
        patch_size=encoder.patch_embed.patch_size[0],
        width=encoder.embed_dim,
        depth=len(encoder.blocks),
        heads=encoder.blocks[0].attn.num_heads,
    )


def matrix_product(bench: Bench, dtype: torch.dtype) -> TimedStep:
    """Products of two square matrices: the highest rate that the machine reaches.

    They are of random numbers: products of ones take less power, so that a GPU does them at a higher clock.
    """
    device = bench.accelerator.device
    on_gpu = device.type == "cuda"
    side = GPU_MATRIX_SIDE if on_gpu else CPU_MATRIX_SIDE
    products = GPU_MATRIX_PRODUCTS if on_gpu else 1
    left = torch.randn(side, side, device=device, dtype=dtype)
    right = torch.randn(side, side, device=device, dtype=dtype)
    return TimedStep(partial(repeat, lambda: left @ right, products), 2 * side**3 * products)


BuildStep = Callable[[Bench], TimedStep]
TRAINING_STEPS: dict[str, BuildStep] = {"mpp training step": mpp_step, "timm training step": timm_step}
"""Training steps by name: of other packages, those that are installed."""
if find_spec("transformers"):
    TRAINING_STEPS["Hugging Face ViTForMaskedImageModeling"] = hugging_face_step
if find_spec("vit_pytorch"):
    TRAINING_STEPS["vit-pytorch MPP"] = vit_pytorch_step
MATRIX_PRODUCTS: dict[str, BuildStep] = {
    "matrix product, bf16": lambda bench: matrix_product(bench, torch.bfloat16),
    "matrix product, fp32": lambda bench: matrix_product(bench, torch.float32),
}
