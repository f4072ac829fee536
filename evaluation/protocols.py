"""Published linear probes as presets: heads that are trained at once, on frozen features of random crops.

Random resized crops (area 0.08 to 1, ratio 3/4 to 4/3) and flips, bilinear as everywhere in mpp, and not bicubic; a
centre crop at test. Length and batch are scaled to the number of images. Where one of several heads is chosen, a tenth
of the training images chooses, and the head is then trained again on all of them.

N training images, B images of a step, D width of a head's input, C classes.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import Lars
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from evaluation.config import LinearConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, patch_grid, resolve_depths
from evaluation.frozen.features import (
    DEFAULT_BATCH_SIZE,
    LabelledSplits,
    RecordedBatches,
    cut_dev_split,
    describe_input,
    extract_split,
    load_labelled,
    views_for,
    warn_left_out,
)
from evaluation.frozen.results import evaluate_by_depth, report_path_of_command, write_probe_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.scoring import Outcomes, score_of
from evaluation.supervision.classification import number_of_classes
from mpp.config import DataConfig, flatten, rebuild
from mpp.data.loader import BatchLayout, in_memory, training_loader
from mpp.data.views import ViewDataset
from mpp.data.workers import deaths_explained
from mpp.features.frozen import pool, tokens_at
from mpp.models.plain import has_class
from mpp.runtime.messages import note, progress_bar
from mpp.runtime.start import start_alone

IMAGENET_IMAGES = 1_281_167
"""Training images of ImageNet-1k, for which the published lengths and batches are."""
CROPS = DataConfig(crop_area=(0.08, 1.0), crop_ratio=(3 / 4, 4 / 3), flip=True)
FEW_IMAGES = 20_000
"""With fewer, the sum of all of MAE's rates is too small: on 430 birds, 7,000 steps of batch 256 still improved the
head."""
BASE_BATCH = 256
"""The batch that base learning rates are of: a rate is base rate x batch / 256 (Goyal et al., 2017)."""


class Candidate(NamedTuple):
    """A head that is trained: its input and its learning rate."""

    input: int
    """Position in the list of inputs that `encode` returns."""
    base_rate: float
    """Learning rate at a batch of 256."""
    about: dict[str, Any]
    """Its entries in the report."""


class CropProbe:
    """A published protocol for one encoder and its images. Its subclasses are the presets, which have:

    - batch, epochs: as published, for ImageNet; least_batch, least_steps, most_steps: where there are fewer images.
    - warmup: share of the steps over which the rate rises; then it falls to 0 by half a cosine.
    - norm: of a head's input, by its width; draw: of a head's first weights; optimizer.
    - candidates: the heads, which are trained at once, on the same crops.
    - encode(images) -> list[Tensor]: inputs of heads, (B, D) float32 each, of images (B, C, H, W) from 0 to 255.

    Args:
        encoder: on its device.
        splits: images to learn from and to test on.
        depth: after how many blocks, where the protocol does not say.
    """

    def __init__(
        self,
        encoder: FrozenEncoder,
        config: LinearConfig,
        accelerator: Accelerator,
        splits: LabelledSplits,
        depth: int,
    ):
        self.encoder, self.config, self.accelerator, self.depth = encoder, config, accelerator, depth
        self.learned, self.tested, _ = splits
        self.classes = number_of_classes(splits)
        self.batch_size, self.steps = self.plan(len(self.learned))
        self.unreadable: list[str] = []

    def dev_split(self) -> "CropProbe":
        """The same probe with a tenth of the training images as the test images."""
        probe = copy(self)
        probe.learned, probe.tested = (self.learned.select(each) for each in cut_dev_split(len(self.learned)))
        return probe

    def evaluate(self) -> tuple[list[dict[str, Any]], nn.Sequential]:
        """The result of the candidate that is best on the dev split, and its head."""
        tested, chosen = self.candidates, {}
        if len(tested) > 1:
            on_dev, _ = self.dev_split().fit_and_test(tested)
            scores = [score_of(outcomes) for outcomes in on_dev]
            tested, chosen = [tested[int(np.argmax(scores))]], {"dev_accuracy": max(scores)}
        (outcomes,), (head,) = self.fit_and_test(tested)
        result = {"protocol": self.config.protocol, "seed": self.config.frozen.seed}
        return [result | tested[0].about | chosen | {"outcomes": outcomes}], head

    def fit_and_test(self, candidates: Sequence[Candidate]) -> tuple[list[Outcomes], list[nn.Sequential]]:
        """Test outcomes of some candidates' heads, on centre crops of the images that can be decoded, and the heads."""
        heads = self.fit(candidates)
        views = views_for(self.encoder, self.tested, self.config.data)
        split = extract_split(views, self.encode, self.accelerator, self.config.probe.strict, "centre crops")
        self.unreadable = split.unreadable
        warn_left_out(split.unreadable)
        known = self.tested.class_names[: self.classes], np.array(self.tested.image_names())[split.kept].tolist()
        outcomes = []
        for head, candidate in zip(heads, candidates, strict=True):
            inputs = torch.from_numpy(split.by_depth[candidate.input]).to(self.accelerator.device)
            with torch.no_grad():
                predicted = head(inputs).argmax(1).cpu().numpy()
            outcomes.append(Outcomes("class", split.labels, predicted, *known))
        return outcomes, heads

    def plan(self, image_count: int) -> tuple[int, int]:
        """Batch and steps: the published length, and the same share of the images as on ImageNet, within bounds."""
        proportional = self.batch * image_count // IMAGENET_IMAGES
        batch = min(image_count, max(self.least_batch, min(self.batch, proportional)))
        steps = round(self.epochs * image_count / batch)
        return batch, min(self.most_steps, max(self.least_steps, steps))

    def rate_share(self, step: int, steps: int) -> float:
        """The learning rate of a step from 0, as a share of the highest one."""
        progress = step / steps
        if progress < self.warmup:
            return progress / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))

    def build_heads(self, widths: Sequence[int]) -> list[nn.Sequential]:
        """New heads, (B, width) to logits (B, C) each."""
        generator = torch.Generator().manual_seed(self.config.frozen.seed)
        heads = []
        for width in widths:
            classify = nn.Linear(width, self.classes)
            self.draw(classify.weight, std=0.01, generator=generator)
            nn.init.zeros_(classify.bias)
            heads.append(nn.Sequential(self.norm(width), classify).to(self.accelerator.device))
        return heads

    def build_optimizer(self, heads: Sequence[nn.Sequential], rates: Sequence[float]) -> torch.optim.Optimizer:
        """An optimiser of all heads, each at its highest learning rate."""
        groups = []
        for (_, classify), rate in zip(heads, rates, strict=True):
            groups.append({"params": [classify.weight], "lr": rate, "always_adapt": True})  # which LARS reads
            groups.append({"params": [classify.bias], "lr": rate, "always_adapt": False})
        return self.optimizer(groups, momentum=0.9, weight_decay=0)

    def fit(self, candidates: Sequence[Candidate]) -> list[nn.Sequential]:
        """The heads of some candidates, in eval mode, trained at once on the same crops of the images."""
        device, config = self.accelerator.device, self.config
        settings = {key: value for key, value in flatten(config.data).items() if key != "eval_crop"}
        views = ViewDataset(self.learned, rebuild(CROPS, settings), self.encoder.img_size, config.frozen.seed)
        views = in_memory(views, self.steps * self.batch_size, device)
        layout = BatchLayout.of(self.batch_size, config.data.batch_size or DEFAULT_BATCH_SIZE, world_size=1, rank=0)
        passes = layout.accumulation_steps
        loader = training_loader(views, layout, 0, self.steps)
        batches = RecordedBatches(loader, self.learned.split, config.probe.strict)
        heads: list[nn.Sequential] = []
        parts: list[list[Tensor]] = []
        for batch in progress_bar(batches, total=self.steps * passes, desc=config.protocol, unit="pass"):
            with torch.no_grad(), self.accelerator.autocast():
                features = self.encode(batch.images.to(device, non_blocking=True))
            parts.append([*features, batch.labels.to(device)])
            if len(parts) < passes:
                continue
            *inputs, labels = map(torch.cat, zip(*parts, strict=True))
            inputs = [inputs[each.input] for each in candidates]
            parts = []
            if not heads:
                heads = self.build_heads([each.shape[1] for each in inputs])
                rates = [each.base_rate * self.batch_size / BASE_BATCH for each in candidates]
                optimizer = self.build_optimizer(heads, rates)
                schedule = LambdaLR(optimizer, partial(self.rate_share, steps=self.steps))
            losses = [F.cross_entropy(head(each), labels) for head, each in zip(heads, inputs, strict=True)]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            schedule.step()
        warn_left_out(sorted(set(batches.unreadable)))
        return [head.eval() for head in heads]


class Mae(CropProbe):
    """MAE's (He et al., CVPR 2022, appendix A.1, Table 10; facebookresearch/mae, main_linprobe.py, util/lars.py).

    - A batch norm without affine parameters (eps 1e-6, running statistics at test) before one linear layer, whose
      weights begin as normal numbers of deviation 0.01, and its bias at 0.
    - LARS (You et al., 2017; timm.optim.Lars): trust coefficient 0.001, momentum 0.9, no weight decay. The bias is not
      adapted. Base rate 0.1 for a batch of 256.
    - 90 epochs of batch 16,384; the rate rises over the first 10, then falls to 0 by half a cosine, from step to step.

    Differences: the authors' loader leaves an epoch's last part of a batch out, and their batch norm takes its
    statistics on each GPU (of 512 images); here they are of the whole batch. The mean of the patches is taken after the
    encoder's norm, theirs before it. A step of LARS is a share of the weights' length, so fewer than 1,000 steps would
    hardly leave the first weights.
    """

    batch, epochs, warmup = 16_384, 90, 10 / 90
    least_batch, least_steps, most_steps = 256, 1000, math.inf
    norm = staticmethod(partial(nn.BatchNorm1d, affine=False, eps=1e-6))
    draw = staticmethod(nn.init.trunc_normal_)
    optimizer = staticmethod(partial(Lars, trust_coeff=0.001))
    candidates = (Candidate(0, 0.1, {}),)

    def encode(self, images: Tensor) -> list[Tensor]:
        return self.encoder(images, self.config.probe.representation, [self.depth])


class Dinov2(CropProbe):
    """DINOv2's (Oquab et al., TMLR 2024, B.3; facebookresearch/dinov2, dinov2/eval/linear.py).

    - Linear layers that are trained at once, on the same crops: 13 learning rates, on the [class] tokens of the last
      block or of the last 4, side by side, without and with the mean of the last block's patches. All tokens have
      passed the encoder's final norm. Weights begin as normal numbers of deviation 0.01, the bias at 0.
    - SGD: momentum 0.9, no weight decay, 12,500 steps of batch 1,024; the rate falls to 0 by half a cosine.

    Differences: the authors choose among the layers by the images that they report. An encoder without a [class] token
    has the mean of each block's patches instead; one with fewer than 4 blocks has all.

    Raises:
        Unavailable: the encoder has no patches.
    """

    batch, epochs, warmup = 1024, 12_500 * 1024 / IMAGENET_IMAGES, 0
    least_batch, least_steps, most_steps = 128, 1250, 12_500
    norm = nn.Identity
    draw = staticmethod(nn.init.normal_)
    optimizer = torch.optim.SGD
    rates = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)

    def __init__(self, encoder: FrozenEncoder, *others: Any):
        super().__init__(encoder, *others)
        model, deepest = encoder.model, len(encoder.stages)
        patch_grid(model)
        most = min(4, deepest)
        self.depths = list(range(deepest - most + 1, deepest + 1))
        self.pooling = "class" if has_class(model) else "mean"
        self.inputs = list(product(sorted({1, most}), (False, True) if has_class(model) else (False,)))
        self.candidates = []
        for (place, (blocks, adds_mean)), rate in product(enumerate(self.inputs), self.rates):
            about = {"blocks": blocks, "adds_mean": adds_mean, "base_lr": rate}
            self.candidates.append(Candidate(place, rate, about))

    def encode(self, images: Tensor) -> list[Tensor]:
        model = self.encoder.model
        *earlier, last = tokens_at(model, self.encoder.normalize(images), self.depths)
        tokens = [*(model.norm(each) for each in earlier), last]
        of_block = [pool(model, each, self.pooling).float() for each in tokens]
        mean = pool(model, last, "mean").float()
        return [torch.cat([*of_block[-blocks:], *[mean] * adds_mean], dim=-1) for blocks, adds_mean in self.inputs]


PROTOCOLS: dict[str, type[CropProbe]] = {"mae": Mae, "dinov2": Dinov2}


def run_protocol(
    config: LinearConfig, evaluate: Callable[[CropProbe], list[dict[str, Any]]], loaded: LoadedSplits | None
) -> dict[str, Any]:
    """Probe an encoder by `config.protocol`, write the report, and return it.

    Raises:
        UserError: the images have no labels, are too few, or there is no such encoder or depth.
        Unavailable: the encoder lacks the features that the protocol reads.
    """
    frozen, data, probe = config.frozen, config.data, config.probe
    accelerator = start_alone(frozen.run_settings(probe.precision), f"protocol {config.protocol} is carried out")
    path = report_path_of_command(config, "linear")
    encoder = open_frozen_encoder(frozen, data)
    depths = resolve_depths(probe.depth, len(encoder.stages)) if config.protocol == "mae" else [0]
    splits = load_labelled(data, accelerator, frozen.weights, loaded=loaded, on_dev=not probe.test)
    parts = encoder.to(accelerator.device), config, accelerator, splits
    by_depth = {depth: PROTOCOLS[config.protocol](*parts, depth) for depth in depths}
    images, batch, steps = len(splits.train), by_depth[depths[0]].batch_size, by_depth[depths[0]].steps
    plan = {"images": images, "batch": batch, "steps": steps, "epochs": steps * batch / images}
    print(f"protocol {config.protocol}: {steps:,} steps of {batch:,} random crops, {plan['epochs']:,.0f} epochs")
    if images < FEW_IMAGES and config.protocol == "mae":
        note(f"MAE's learning rates and length train little on {images:,} images: use --protocol logistic")
    with deaths_explained():
        report = evaluate_by_depth(config, by_depth, evaluate, "protocol")
    report["protocol"] |= {"plan": plan, "input": describe_input(encoder, data, accelerator)}
    report["class_names"] = splits.train.class_names
    left_out = max(len(each.unreadable) for each in by_depth.values())
    if left_out:
        report["left_out"] = {"train": 0, "test" if probe.test else "dev": left_out}
    return write_probe_report(path, report, "protocol")
