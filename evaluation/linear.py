"""Linear probe of frozen features, with all labels: multinomial logistic regression, or a published protocol.

    python evaluation/linear.py --encoder runs/birds
    python evaluation/linear.py --encoder runs/birds --protocol mae

Features are standardised by the training set. The penalty is chosen on a tenth of the training set; the classifier is
then fitted to all of it, and tested once. Several classes are a logistic regression each, and numbers a ridge
regression.

Published protocols are presets of heads that are trained at once, on features of random crops: resized crops (area 0.08
to 1, ratio 3/4 to 4/3) and flips, bilinear as everywhere in mpp, and not bicubic; a centre crop at test. Length and
batch are scaled to the number of images. One of several heads is chosen as a penalty is.

N training images, B images of a step, D width of a head's input, C classes.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.optim import Lars
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from evaluation.config import LinearConfig
from evaluation.frozen.encoder import FrozenEncoder, open_frozen_encoder, resolve_depths
from evaluation.frozen.features import (
    DEFAULT_BATCH_SIZE,
    LabelledFeatures,
    LabelledSplits,
    RecordedBatches,
    cut_dev_split,
    describe_input,
    describe_learned,
    extract_split,
    load_labelled,
    views_for,
    warn_left_out,
)
from evaluation.frozen.kept_heads import StandardizedLinear, save_head
from evaluation.frozen.results import report_path_of_command, run_probe, write_probe_report
from evaluation.frozen.run_images import LoadedSplits, command_of, is_colour_baseline
from evaluation.metrics.scoring import Outcomes, add_figures, best_choice, score_of, summarize_accuracies
from evaluation.supervision.learners import Learner, learner_of, number_of_classes, zero_head
from mpp.config import DataConfig, flatten, nested, rebuild, require
from mpp.data.dataset import ImageDataset
from mpp.data.labels import LABEL_KINDS
from mpp.data.loader import BatchLayout, in_memory, training_loader
from mpp.data.views import Batch, ViewDataset
from mpp.data.workers import deaths_explained
from mpp.errors import Unavailable
from mpp.models.plain import has_class, is_plain
from mpp.runtime.hardware import device
from mpp.runtime.messages import progress_bar
from mpp.runtime.start import run_main, start_alone

LOGITS_PER_BLOCK = 2**24  # computed at a time, which bounds the memory
DEVIATION_OFFSET = 1e-6  # added to the deviation of a feature: a constant one is not divided by 0
SHOW_BAR_AFTER = 5  # seconds
SOLVER = "lbfgs"  # as reports and tables name the logistic regression
IMAGENET_IMAGES = 1_281_167
"""Training images of ImageNet-1k, for which the published lengths and batches are."""
CROPS = DataConfig(crop_area=(0.08, 1.0), crop_ratio=(3 / 4, 4 / 3), flip=True)
BASE_BATCH = 256
"""The batch that base learning rates are of: a rate is base rate x batch / 256 (Goyal et al., 2017)."""
Candidate = tuple[int, float]
"""A head that is trained: the position of its input in the list that `encode` returns, and its base learning rate."""


def run(config: LinearConfig, loaded: LoadedSplits | None = None) -> dict[str, Any]:
    """Probe the features, write the report and, if asked, the head of the chosen depth, and return the report."""
    if config.protocol != "logistic":
        return run_protocol(config, loaded)
    allowed = "left out: a colour baseline has no weights, so its head is not kept"
    require(not (config.save and is_colour_baseline(config.frozen.encoder)), "save", True, allowed)

    def save(head: tuple[StandardizedLinear, list[str]], report: dict[str, Any]) -> None:
        module, class_names = head
        kind = report["labels"]["kind"]
        save_head(
            report_path_of_command(config, "linear"),
            module,
            config.frozen,
            task="classes" if kind == "class" else kind,
            class_names=class_names,
            representation=config.probe.representation,
            depth=report["protocol"]["chosen_depth"],
            input=report["protocol"]["input"],
            learned=describe_learned(config.data, loaded, config.probe.task),
        )

    return run_probe(config, "linear", evaluate, "solver", loaded, LABEL_KINDS, save if config.save else None)


# --- logistic regression, on the features of one crop ---


def evaluate(features: LabelledFeatures, config: LinearConfig) -> list[dict[str, Any]]:
    """The result of the head with the penalty that is best on the dev split; its `head`: it and its classes' names."""
    classes = features.train_labels.shape[-1]  # of several; a number has none
    if features.kind == "class":
        features, numbers = features.with_numbered_classes()
        classes = len(numbers)
    on_dev = fit_and_test(features.dev_split(), config, classes, config.l2)
    scores = {l2: score_of(outcomes) for l2, (outcomes, _) in zip(config.l2, on_dev, strict=True)}
    l2 = best_choice(scores)
    ((outcomes, head),) = fit_and_test(features, config, classes, [l2])
    result = {"solver": SOLVER, "seed": 0, "l2": l2, "dev_accuracy": scores[l2], "outcomes": outcomes}
    return [result | {"head": (head, list(features.class_names))}]


def fit_and_test(
    features: LabelledFeatures, config: LinearConfig, classes: int, penalties: Sequence[float]
) -> Iterator[tuple[Outcomes, StandardizedLinear]]:
    """The test outcomes of a head with each of these penalties, and the head. All learn from one copy of the features.

    Args:
        classes: number of classes, of one class an image numbered from 0.
    """
    train = torch.tensor(features.train, dtype=torch.float32, device=device())
    mean = train.mean(0)
    std = train.std(0, correction=0) + DEVIATION_OFFSET
    train.sub_(mean).div_(std)
    labels = torch.from_numpy(features.train_labels).to(device())
    learner = learner_of(features.kind, features.train_labels, classes)
    tested = torch.from_numpy(features.test).split(rows_per_block(learner))
    for l2 in progress_bar(penalties, desc=SOLVER, unit="fit", delay=SHOW_BAR_AFTER):
        head = StandardizedLinear(fit(train, labels, learner, config, l2), mean, std)
        with torch.no_grad():
            predicted = [learner.predict(head(block.to(device(), torch.float32))).cpu() for block in tested]
        yield features.outcomes(torch.cat(predicted).numpy()), head


def rows_per_block(learner: Learner) -> int:
    """Number of images whose logits are computed at a time."""
    return max(1, LOGITS_PER_BLOCK // learner.outputs)


def fit(features: Tensor, labels: Tensor, learner: Learner, config: LinearConfig, l2: float) -> nn.Linear:
    """The layer with the least mean loss of the learner + l2 / 2 * |W|^2, by L-BFGS; the bias is free.

    Args:
        features: (N, D).
        labels: (N, ...).
    """
    layer = zero_head(features.shape[1], learner.outputs).to(features.device)
    head = learner.complete(layer).to(features.device)
    rows = rows_per_block(learner)
    blocks = list(zip(features.split(rows), labels.split(rows), strict=True))
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=config.iterations,
        history_size=20,
        tolerance_grad=1e-6,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = l2 / 2 * layer.weight.square().sum()
        total.backward()
        for block, block_labels in blocks:
            share = len(block_labels) / len(labels)
            loss = learner.loss(head(block), block_labels) * share
            loss.backward()
            total = total.detach() + loss.detach()
        return total

    optimizer.step(closure)
    return learner.merge(layer)


# --- published protocols, on the features of random crops ---


def run_protocol(config: LinearConfig, loaded: LoadedSplits | None) -> dict[str, Any]:
    """Probe an encoder by `config.protocol`, write the report, and return it.

    Raises:
        UserError: the images have no labels, or not one class each; are too few; or no such encoder or depth.
        Unavailable: the encoder lacks the features that the protocol reads.
    """
    frozen, data, name = config.frozen, config.data, config.protocol
    accelerator = start_alone(frozen.run_settings(config.probe.precision), f"protocol {name} is carried out")
    path = report_path_of_command(config, "linear")
    encoder = open_frozen_encoder(frozen, data.channels).to(accelerator.device)
    on_dev, task = not config.probe.test, config.probe.task
    splits = load_labelled(data, accelerator, frozen.weights, 0, loaded, on_dev, task, kinds=("class",))
    train, test, _ = splits
    probe = PROTOCOLS[name](encoder, config, accelerator, splits)
    print("protocol {}: {steps:,} steps of {batch:,} random crops, {epochs:,.0f} epochs".format(name, **probe.plan))
    protocol = nested(config) | {"plan": probe.plan, "input": describe_input(encoder, data, accelerator)}
    about = {"protocol": name, "seed": frozen.seed}
    candidates = probe.candidates
    with deaths_explained():
        if len(candidates) > 1 and config.probe.depth != "all":
            compared = probe.fit_and_test(*map(train.select, cut_dev_split(len(train))), candidates)
            scores = [score_of(result.pop("outcomes")) for result in compared]
            protocol["dev"] = [result | {"accuracy": score} for result, score in zip(compared, scores, strict=True)]
            candidates, about["dev_accuracy"] = [candidates[int(np.argmax(scores))]], max(scores)
        tested = probe.fit_and_test(train, test, candidates)
    results = add_figures([about | result for result in tested])
    summaries = {result.get("depth"): summarize_accuracies([result], "protocol") for result in results}
    *_, protocol["chosen_depth"] = summaries
    report = {"results": results, "summary": summaries[protocol["chosen_depth"]], "protocol": protocol}
    report |= {"class_names": train.class_names} | ({"summary_by_depth": summaries} if len(summaries) > 1 else {})
    return write_probe_report(path, report, "protocol")


class CropProbe:
    """A published protocol for one encoder and its images. Its subclasses are the presets, which have:

    - batch, epochs: as published, for ImageNet; least_batch, least_steps, most_steps: where there are fewer images.
    - rates: for a batch of 256; warmup: share of the steps over which they rise; then they fall to 0 by half a cosine.
    - norm: of a head's input, by its width; draw: of a head's first weights; optimizer.
    - list_inputs() -> list[dict[str, Any]]: the inputs of heads, as the report names them; a head each at each rate.
    - encode(images) -> list[Tensor]: these inputs, (B, D) float32 each, of images (B, C, H, W) from 0 to 255.
    """

    def __init__(self, encoder: FrozenEncoder, config: LinearConfig, accelerator: Accelerator, splits: LabelledSplits):
        self.encoder, self.config, self.accelerator = encoder, config, accelerator
        self.classes = number_of_classes(splits)
        self.plan = self.plan_of(len(splits.train))
        self.batch_size, self.steps = self.plan["batch"], self.plan["steps"]
        self.inputs = self.list_inputs()
        self.candidates: list[Candidate] = [*product(range(len(self.inputs)), self.rates)]

    def plan_of(self, images: int) -> dict[str, Any]:
        """Batch and steps: the published length, and the same share of the images as on ImageNet, within bounds."""
        proportional = self.batch * images // IMAGENET_IMAGES
        batch = min(images, max(self.least_batch, min(self.batch, proportional)))
        steps = min(self.most_steps, max(self.least_steps, round(self.epochs * images / batch)))
        return {"images": images, "batch": batch, "steps": steps, "epochs": steps * batch / images}

    def fit_and_test(
        self, train: ImageDataset, test: ImageDataset, candidates: Sequence[Candidate]
    ) -> list[dict[str, Any]]:
        """Results of some candidates on centre crops of the images that can be decoded."""
        heads = self.fit(train, candidates)
        views = views_for(self.encoder, test, self.config.data)
        split = extract_split(views, self.encode, self.accelerator, self.config.probe.strict, "centre crops")
        warn_left_out(split.unreadable)
        known = test.class_names[: self.classes], np.array(test.image_names())[split.kept].tolist()
        results = []
        for head, (place, rate) in zip(heads, candidates, strict=True):
            inputs = torch.from_numpy(split.by_depth[place]).to(self.accelerator.device)
            with torch.no_grad():
                predicted = head(inputs).argmax(1).cpu().numpy()
            outcomes = Outcomes("class", split.labels, predicted, *known)
            results.append(self.inputs[place] | {"base_lr": rate, "outcomes": outcomes})
        return results

    def fit(self, train: ImageDataset, candidates: Sequence[Candidate]) -> list[nn.Sequential]:
        """The heads of some candidates, in eval mode, trained at once on the same crops of the images."""
        config, target = self.config, self.accelerator.device
        data = rebuild(CROPS, flatten(config.data) | {"eval_crop": 1.0})  # a random crop does not read it
        views = ViewDataset(train, data, self.encoder.img_size, config.frozen.seed)
        views = in_memory(views, self.steps * self.batch_size, target)
        layout = BatchLayout.of(self.batch_size, data.batch_size or DEFAULT_BATCH_SIZE, world_size=1, rank=0)
        batches = RecordedBatches(training_loader(views, layout, 0, self.steps), train.split, config.probe.strict)

        def encode(batch: Batch) -> list[Tensor]:
            with torch.no_grad(), self.accelerator.autocast():
                return [*self.encode(batch.images.to(target, non_blocking=True)), batch.labels.to(target)]

        passes = layout.accumulation_steps
        bar = progress_bar(batches, total=self.steps * passes, desc=config.protocol, unit="pass")
        heads: list[nn.Sequential] = []
        for parts in zip(*[map(encode, bar)] * passes, strict=True):  # so many passes are a step
            *features, labels = map(torch.cat, zip(*parts, strict=True))
            inputs = [features[place] for place, _ in candidates]
            if not heads:
                heads, optimizer = self.build(candidates, [each.shape[1] for each in inputs])
                schedule = LambdaLR(optimizer, self.rate_share)
            losses = [F.cross_entropy(head(each), labels) for head, each in zip(heads, inputs, strict=True)]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            schedule.step()
        warn_left_out(sorted(set(batches.unreadable)))
        return [head.eval() for head in heads]

    def build(
        self, candidates: Sequence[Candidate], widths: Sequence[int]
    ) -> tuple[list[nn.Sequential], torch.optim.Optimizer]:
        """New heads, (B, width) to logits (B, C) each, and their optimiser at the highest learning rates."""
        generator = torch.Generator().manual_seed(self.config.frozen.seed)
        heads, groups = [], []
        for (_, base_rate), width in zip(candidates, widths, strict=True):
            classify = zero_head(width, self.classes)
            self.draw(classify.weight, std=0.01, generator=generator)
            heads.append(nn.Sequential(self.norm(width), classify).to(self.accelerator.device))
            rate = base_rate * self.batch_size / BASE_BATCH
            for parameter, adapts in ((classify.weight, True), (classify.bias, False)):
                groups.append({"params": [parameter], "lr": rate, "always_adapt": adapts})  # which LARS reads
        return heads, self.optimizer(groups, momentum=0.9, weight_decay=0)

    def rate_share(self, step: int) -> float:
        """The learning rate of a step from 0, as a share of the highest one."""
        progress = step / self.steps
        if progress < self.warmup:
            return progress / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


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
    hardly leave the first weights. With `--depth last` features are the encoder's output, as theirs.
    """

    batch, epochs, warmup = 16_384, 90, 10 / 90
    least_batch, least_steps, most_steps = 256, 1000, math.inf
    rates = (0.1,)
    norm = staticmethod(partial(nn.BatchNorm1d, affine=False, eps=1e-6))
    draw = staticmethod(nn.init.trunc_normal_)
    optimizer = staticmethod(partial(Lars, trust_coeff=0.001))

    def list_inputs(self) -> list[dict[str, Any]]:
        return [{"depth": depth} for depth in resolve_depths(self.config.probe.depth, len(self.encoder.stages))]

    def encode(self, images: Tensor) -> list[Tensor]:
        return self.encoder(images, self.config.probe.representation, [each["depth"] for each in self.inputs])


class Dinov2(CropProbe):
    """DINOv2's (Oquab et al., TMLR 2024, B.3; facebookresearch/dinov2, dinov2/eval/linear.py).

    - Linear layers that are trained at once, on the same crops: 13 learning rates, on the [class] tokens of the last
      block or of the last 4, side by side, without and with the mean of the last block's patches. All tokens have
      passed the encoder's final norm. Weights begin as normal numbers of deviation 0.01, the bias at 0.
    - SGD: momentum 0.9, no weight decay, 12,500 steps of batch 1,024; the rate falls to 0 by half a cosine.

    Differences: the authors choose among the layers by the images that they report. An encoder with fewer than 4 blocks
    has all.

    Raises:
        Unavailable: the encoder is no plain transformer with a [class] token.
    """

    batch, epochs, warmup = 1024, 12_500 * 1024 / IMAGENET_IMAGES, 0
    least_batch, least_steps, most_steps = 128, 1250, 12_500
    rates = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
    norm = nn.Identity
    draw = staticmethod(nn.init.normal_)
    optimizer = torch.optim.SGD

    def list_inputs(self) -> list[dict[str, Any]]:
        if not (is_plain(self.encoder.model) and has_class(self.encoder.model)):
            raise Unavailable("protocol dinov2 reads the [class] tokens of a plain transformer; this encoder has none")
        blocks = sorted({1, min(4, len(self.encoder.stages))})
        return [{"blocks": count, "adds_mean": adds} for count, adds in product(blocks, (False, True))]

    def encode(self, images: Tensor) -> list[Tensor]:
        model, blocks = self.encoder.model, self.inputs[-1]["blocks"]
        options = {"return_prefix_tokens": True, "norm": True, "output_fmt": "NLC", "intermediates_only": True}
        tokens = model.forward_intermediates(self.encoder.normalize(images), blocks, **options)  # (patches, prefix)
        of_block = [model.fc_norm(prefix[:, 0]).float() for _, prefix in tokens]
        mean = model.fc_norm(tokens[-1][0].mean(1)).float()
        return [torch.cat([*of_block[-each["blocks"] :], *[mean] * each["adds_mean"]], dim=-1) for each in self.inputs]


PROTOCOLS: dict[str, type[CropProbe]] = {"mae": Mae, "dinov2": Dinov2}


main = command_of(run, LinearConfig)


if __name__ == "__main__":
    run_main(main)
