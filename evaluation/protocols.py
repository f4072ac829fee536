"""Published linear probes as presets: heads that are trained at once, on frozen features of random crops.

Random resized crops (area 0.08 to 1, ratio 3/4 to 4/3) and flips, bilinear as everywhere in mpp, and not bicubic; a
centre crop at test. Length and batch are scaled to the number of images. Where one of several heads is chosen, a tenth
of the training images chooses, and the head is then trained again on all of them.

N training images, B images of a step, D width of a head's input, C classes.
"""

import math
from collections.abc import Sequence
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
from evaluation.frozen.extraction import (
    DEFAULT_BATCH_SIZE,
    RecordedBatches,
    describe_input,
    extract_split,
    views_for,
    warn_left_out,
)
from evaluation.frozen.labelled import load_labelled
from evaluation.frozen.labelled_features import cut_dev_split
from evaluation.frozen.probing import assemble_report
from evaluation.frozen.run_images import LoadedSplits
from evaluation.metrics.outcomes import Outcomes
from evaluation.metrics.scoring import add_figures, score_of
from evaluation.supervision.classification import number_of_classes
from mpp.config import DataConfig, flatten, nested, rebuild, require
from mpp.data.dataset import ImageDataset
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
    """Its entries in the report, such as its depth."""


class CropProbe:
    """A published protocol for one encoder. Its subclasses are the presets, which have:

    - batch, epochs: as published, for ImageNet; least_batch, least_steps, most_steps: where there are fewer images.
    - warmup: share of the steps over which the rate rises; then it falls to 0 by half a cosine.
    - norm: of a head's input, by its width; draw: of a head's first weights; optimizer.
    - candidates: the heads, which are trained at once, on the same crops. The best one on dev images is tested.
    - encode(images) -> list[Tensor]: inputs of heads, (B, D) float32 each, of images (B, C, H, W) from 0 to 255.

    Args:
        encoder: on its device.
        classes: C.
    """

    candidates: list[Candidate]

    def __init__(self, encoder: FrozenEncoder, config: LinearConfig, accelerator: Accelerator, classes: int):
        self.encoder, self.config, self.accelerator, self.classes = encoder, config, accelerator, classes
        self.prepare()

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

    def train(self, images: ImageDataset, candidates: Sequence[Candidate], batch: int, steps: int) -> list[nn.Module]:
        """The heads of some candidates, in eval mode, trained at once on the same crops of the images."""
        device, config = self.accelerator.device, self.config
        settings = {key: value for key, value in flatten(config.data).items() if key != "eval_crop"}
        views = ViewDataset(images, rebuild(CROPS, settings), self.encoder.img_size, config.frozen.seed)
        views = in_memory(views, steps * batch, device)
        layout = BatchLayout.of(batch, config.data.batch_size or DEFAULT_BATCH_SIZE, world_size=1, rank=0)
        passes = layout.accumulation_steps
        loader = RecordedBatches(training_loader(views, layout, 0, steps), images.split, config.probe.strict)
        heads: list[nn.Sequential] = []
        parts: list[list[Tensor]] = []
        for part in progress_bar(loader, total=steps * passes, desc=config.protocol, unit="pass"):
            with torch.no_grad(), self.accelerator.autocast():
                features = self.encode(part.images.to(device, non_blocking=True))
            parts.append([*features, part.labels.to(device)])
            if len(parts) < passes:
                continue
            *inputs, labels = map(torch.cat, zip(*parts, strict=True))
            inputs = [inputs[each.input] for each in candidates]
            parts = []
            if not heads:
                heads = self.build_heads([each.shape[1] for each in inputs])
                optimizer = self.build_optimizer(heads, [each.base_rate * batch / BASE_BATCH for each in candidates])
                schedule = LambdaLR(optimizer, partial(self.rate_share, steps=steps))
            losses = [F.cross_entropy(head(each), labels) for head, each in zip(heads, inputs, strict=True)]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            schedule.step()
        warn_left_out(sorted(set(loader.unreadable)))
        return [head.eval() for head in heads]

    def predict(
        self, images: ImageDataset, heads: Sequence[nn.Module], candidates: Sequence[Candidate]
    ) -> tuple[list[Outcomes], list[str]]:
        """Outcomes of each head for centre crops; names of the images that cannot be decoded and are left out."""
        views = views_for(self.encoder, images, self.config.data)
        split = extract_split(views, self.encode, self.accelerator, self.config.probe.strict, "centre crops")
        known = images.class_names[: self.classes], np.array(images.image_names())[split.kept].tolist()
        outcomes = []
        for head, candidate in zip(heads, candidates, strict=True):
            inputs = torch.from_numpy(split.by_depth[candidate.input]).to(self.accelerator.device)
            with torch.no_grad():
                predicted = head(inputs).argmax(1).cpu().numpy()
            outcomes.append(Outcomes("class", split.labels, predicted, *known))
        return outcomes, split.unreadable


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

    def prepare(self) -> None:
        depth = self.config.probe.depth
        require(depth not in ("all", "dev"), "depth", depth, "last or a number with protocol mae; logistic takes all")
        self.depths = resolve_depths(depth, len(self.encoder.stages))
        self.candidates = [Candidate(0, 0.1, {"depth": self.depths[0]})]

    def encode(self, images: Tensor) -> list[Tensor]:
        return self.encoder(images, self.config.probe.representation, self.depths)


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

    def prepare(self) -> None:
        model, deepest = self.encoder.model, len(self.encoder.stages)
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


def run_protocol(config: LinearConfig, loaded: LoadedSplits | None = None) -> tuple[dict[str, Any], nn.Module]:
    """Probe an encoder by `config.protocol`.

    Returns:
        The report; the head that was tested, in eval mode.
    Raises:
        UserError: the images have no labels, are too few, or there is no such encoder or depth.
        Unavailable: the encoder lacks the features that the protocol reads.
    """
    frozen, data, probe = config.frozen, config.data, config.probe
    accelerator = start_alone(frozen.run_settings(probe.precision), f"protocol {config.protocol} is carried out")
    encoder = open_frozen_encoder(frozen, data)
    splits = load_labelled(data, accelerator, frozen.weights, loaded=loaded, on_dev=not probe.test)
    train, classes = splits.train, number_of_classes(splits)
    protocol = PROTOCOLS[config.protocol](encoder.to(accelerator.device), config, accelerator, classes)
    batch, steps = protocol.plan(len(train))
    epochs = steps * batch / len(train)
    print(f"protocol {config.protocol}: {steps:,} steps of {batch:,} random crops, {epochs:,.0f} epochs")
    if len(train) < FEW_IMAGES and config.protocol == "mae":
        note(f"MAE's learning rates and length train little on {len(train):,} images: use --protocol logistic")
    about = nested(config) | {"input": describe_input(encoder, data, accelerator)}
    about["plan"] = {"images": len(train), "batch": batch, "steps": steps, "epochs": epochs}
    result: dict[str, Any] = {"protocol": config.protocol, "seed": frozen.seed}
    tested = protocol.candidates
    with deaths_explained():
        if len(tested) > 1:
            learned, dev = (train.select(indices) for indices in cut_dev_split(len(train)))
            on_dev, _ = protocol.predict(dev, protocol.train(learned, tested, batch, steps), tested)
            accuracies = [score_of(each) for each in on_dev]
            about["dev"] = [
                each.about | {"accuracy": accuracy} for each, accuracy in zip(tested, accuracies, strict=True)
            ]
            result["dev_accuracy"] = max(accuracies)
            tested = [tested[int(np.argmax(accuracies))]]
        heads = protocol.train(train, tested, batch, steps)
        (outcomes,), unreadable = protocol.predict(splits.held_out, heads, tested)
    warn_left_out(unreadable)
    depth = tested[0].about.get("depth", 0)
    about |= {"chosen_depth": depth} if depth else {}
    results = add_figures([result | tested[0].about | {"outcomes": outcomes}])
    report = assemble_report({depth: results}, depth, about, "protocol") | {"class_names": train.class_names}
    if unreadable:
        report["left_out"] = {"train": 0, "test" if probe.test else "dev": len(unreadable)}
    return report, heads[0]
