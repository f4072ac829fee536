"""Frozen features of patches, judged by masks: which class each pixel shows.

    python evaluation/segmentation.py --encoder runs/birds
    python evaluation/segmentation.py --encoder runs/mine --data.path SET --data.mask_column mask --depth dev

Two readings: a batch norm and a linear layer on each patch, trained as DINOv2's linear segmentation is (Oquab et al.,
2023, section 7.4), and the classes of the nearest training patches, without training. Both predictions are upsampled to
the mask. The figure is the mean IoU over the classes, of all held-out pixels together.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from evaluation.config import SegmentationConfig
from evaluation.figures import DPI, plot_segmentation
from evaluation.frozen.encoder import (
    CELLS_PER_SIDE,
    ColorBaseline,
    FrozenEncoder,
    Unavailable,
    open_frozen_encoder,
    patch_grid,
    resolve_depths,
)
from evaluation.frozen.masks import (
    IGNORED,
    ExtractedPatches,
    Masked,
    PatchBaseline,
    PatchFeatures,
    class_shares,
    classes_in,
    classes_of,
    describe_masks,
    extract_patches,
    load_masked,
    masked_views,
    print_pixels,
    warn_of_turned,
)
from evaluation.frozen.parsing import parse_with_images
from evaluation.frozen.probing import evaluate_by_depth
from evaluation.frozen.provenance import check_labels_unseen
from evaluation.frozen.results import events_folder, report_path, report_suffix, table, write_probe_report
from mpp.config import RunConfig, require
from mpp.data.workers import deaths_explained
from mpp.errors import UserError
from mpp.features.neighbours import count_votes, find_neighbours
from mpp.features.reconstructions import as_rgb
from mpp.runtime.hardware import device
from mpp.runtime.randomness import FIXED
from mpp.runtime.start import command, start_alone
from mpp.training.log import event_writer

WARMUP = 0.04  # share of the updates; DINOv2 has 1500 of 40,000
AT_ONCE = 16  # images that are predicted together
NEVER = -1e4  # a logit whose probability is 0; infinity times a weight of 0 would be no number when upsampled
LOGITS = 2**24  # upsampled at a time: what bounds the memory
Predict = Callable[[Tensor], Tensor]
"""Features of patches (B, h, w, D), on the device, to scores (B, C, h, w)."""


class LinearReading(nn.Module):
    """A batch norm and a linear layer on each patch: features (B, h, w, D) to logits (B, C, h, w).

    Args:
        taught: the classes that there is something to learn of; another is never predicted.
    """

    def __init__(self, width: int, taught: Sequence[int]):
        super().__init__()
        classes = max(taught, default=0) + 1
        self.norm, self.classify = nn.BatchNorm1d(width), nn.Linear(width, classes)
        self.register_buffer("untaught", torch.tensor([number not in taught for number in range(classes)]))
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.zeros_(self.classify.bias)

    def forward(self, features: Tensor) -> Tensor:
        shape = features.shape[:-1]
        logits = self.classify(self.norm(features.flatten(0, -2))).masked_fill(self.untaught, NEVER)
        return logits.unflatten(0, shape).movedim(-1, 1)


def upsampled(scores: Tensor, size: Sequence[int]) -> Tensor:
    """Scores (B, C, h, w) of patches for each pixel of a mask: (B, C, H, W)."""
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


def masked_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy over the pixels that count; 0 where none does."""
    total = F.cross_entropy(logits, masks, ignore_index=IGNORED, reduction="sum")
    return total / (masks != IGNORED).sum().clamp(min=1)


def fit(features: PatchFeatures, config: SegmentationConfig, lr: float, seed: int) -> LinearReading:
    """A linear reading of the training patches."""
    own, generator = device(), torch.Generator().manual_seed(seed)
    taught = classes_in(features.train_masks).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reading = LinearReading(features.train.shape[-1], taught).to(own)
    optimizer = torch.optim.AdamW(reading.parameters(), lr=lr, weight_decay=config.weight_decay)
    warmup = max(1, round(WARMUP * config.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (config.steps - step) / max(1, config.steps - warmup))
    )
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(config.steps):
        while len(order) < config.images_a_step:
            order = torch.cat([order, torch.randperm(len(features.train), generator=generator)])
        chosen, order = np.sort(order[: config.images_a_step].numpy()), order[config.images_a_step :]
        inputs = torch.from_numpy(features.train[chosen]).to(own)
        masks = torch.from_numpy(features.train_masks[chosen]).long().to(own)
        optimizer.zero_grad()
        masked_loss(upsampled(reading(inputs), masks.shape[1:]), masks).backward()
        optimizer.step()
        schedule.step()
    return reading.eval()


def labelled_patches(features: PatchFeatures, config: SegmentationConfig, classes: int) -> tuple[NDArray, Tensor]:
    """Training patches (P, D) whose pixels count, at most `config.patches` of them, and the class of most of each."""
    grid = features.train.shape[1:3]
    shares = class_shares(features.train_masks, grid, classes)
    labels = torch.cat([part.argmax(-1).where(part.sum(-1) > 0, -1).flatten() for part in shares])
    known = (labels >= 0).nonzero().squeeze(1)
    if len(known) > config.patches:
        generator = torch.Generator().manual_seed(config.data.cut_seed)
        known = known[torch.randperm(len(known), generator=generator)[: config.patches].sort().values]
    return features.train.reshape(-1, features.train.shape[-1])[known.numpy()], labels[known]


def vote(features: Tensor, bank: NDArray, labels: Tensor, classes: int, config: SegmentationConfig) -> Tensor:
    """Shares of the votes of the nearest training patches: features (B, h, w, D) to (B, C, h, w)."""
    queries = features.flatten(0, -2)
    shares = []
    for neighbours in find_neighbours(bank, queries, min(config.neighbours, len(bank))):
        votes = count_votes(neighbours, labels.to(queries.device), classes, config.temperature)
        shares.append(votes / votes.sum(1, keepdim=True))
    return torch.cat(shares).unflatten(0, features.shape[:-1]).movedim(-1, 1)


@torch.no_grad()
def predicted(predict: Predict, features: NDArray, size: Sequence[int], classes: int) -> Tensor:
    """The class of each pixel, (n, H, W), of images whose patches have these features (n, h, w, D)."""
    found = []
    for first in range(0, len(features), AT_ONCE):
        scores = predict(torch.from_numpy(features[first : first + AT_ONCE]).to(device()))
        step = max(1, LOGITS // (classes * math.prod(size)))
        found += [upsampled(part, size).argmax(1).to(torch.int16).cpu() for part in scores.split(step)]
    return torch.cat(found)


def confusion(truth: Tensor, found: Tensor, classes: int) -> Tensor:
    """How many pixels of each class (rows) were taken for each class (columns): (C, C) int64."""
    total = torch.zeros(classes * classes, dtype=torch.int64)
    for of_truth, of_found in zip(truth.split(256), found.split(256), strict=True):
        counted = of_truth != IGNORED
        pairs = of_truth[counted].long() * classes + of_found[counted].long()
        total += torch.bincount(pairs, minlength=classes * classes)
    return total.view(classes, classes)


def numbered(features: PatchFeatures) -> tuple[PatchFeatures, NDArray[np.int16]]:
    """The same with classes that are numbered from 0 without gaps, and the numbers (C,) that the masks have for them.

    Raises:
        UserError: the masks are of one class.
    """
    most = classes_of(features)
    numbers = np.union1d(classes_in(features.train_masks), classes_in(features.test_masks))
    if len(numbers) == most:
        return features, numbers
    ranks = np.full(most + 1, IGNORED, np.int16)  # the last one is that of ignored pixels, whose number is -1
    ranks[numbers] = np.arange(len(numbers))
    masks = {"train_masks": ranks[features.train_masks], "test_masks": ranks[features.test_masks]}
    return features._replace(**masks), numbers


def scores_of(counts: Tensor, numbers: NDArray[np.int16] | None = None) -> dict[str, Any]:
    """Mean IoU, pixel accuracy, and the IoU of each class: null where it is neither in a mask nor predicted.

    Args:
        counts: see `confusion`.
        numbers: (C,) of the classes in the masks; None: from 0 without gaps.
    """
    right, either = counts.diagonal().double(), (counts.sum(0) + counts.sum(1) - counts.diagonal()).double()
    of_class = [float(a / b) if b else None for a, b in zip(right, either, strict=True)]
    present = [each for each in of_class if each is not None]
    if numbers is not None:
        by_number = dict(zip(numbers.tolist(), of_class, strict=True))
        of_class = [by_number.get(number) for number in range(int(numbers.max()) + 1)]
    return {
        "accuracy": float(np.mean(present)),  # what all evaluations call their figure
        "pixel_accuracy": float(right.sum() / counts.sum().double()),
        "iou": of_class,
    }


def evaluate(features: PatchFeatures, config: SegmentationConfig, shown: dict[str, Tensor] | None = None) -> list[dict]:
    """Mean IoU of each reading; the learning rate is chosen on the dev split.

    Args:
        shown: gets the predictions of each reading, by its name.
    """
    features, numbers = numbered(features)
    classes, size = len(numbers), features.test_masks.shape[1:]

    def judged(predict: Predict, of: PatchFeatures = features, name: str | None = None) -> dict[str, Any]:
        found = predicted(predict, of.test, size, classes)
        if shown is not None and name:
            shown[name] = torch.from_numpy(numbers)[found.long()]
        return scores_of(confusion(torch.from_numpy(of.test_masks), found, classes), numbers)

    results = []
    if "linear" in config.readings:
        best, on_dev = config.lr[0], {}
        if len(config.lr) > 1:
            dev = features.dev_split()
            on_dev = {lr: judged(fit(dev, config, lr, config.seeds[0]), dev)["accuracy"] for lr in config.lr}
            best = max(on_dev, key=on_dev.get)
        for seed in config.seeds:
            scores = judged(fit(features, config, best, seed), name="linear")
            results.append({"case": "linear", "seed": seed, "lr": best, "dev_accuracy": on_dev.get(best)} | scores)
    if "knn" in config.readings:
        bank, labels = labelled_patches(features, config, classes)
        voting = partial(vote, bank=bank, labels=labels, classes=classes, config=config)
        results.append({"case": "knn", "seed": 0} | judged(voting, name="knn"))
    return results


def most_frequent(features: PatchFeatures, config: SegmentationConfig) -> dict[str, Any]:
    """What the most frequent class of the training masks reaches, predicted for all pixels."""
    features, numbers = numbered(features)
    truth, masks = torch.from_numpy(features.test_masks), torch.from_numpy(features.train_masks)
    counts = confusion(masks, torch.zeros_like(masks), len(numbers)).sum(1)
    return scores_of(confusion(truth, torch.full_like(truth, int(counts.argmax())), len(numbers)), numbers)


def run(config: SegmentationConfig) -> dict[str, Any]:
    """Judge and report; the report.

    Raises:
        UserError: an encoder without patches, or images without masks.
    """
    run = RunConfig(precision=config.precision, trackers=(), threads=config.threads)
    accelerator = start_alone(run, "patches are judged")
    path = report_path(config.out, config.encoder, f"segmentation{report_suffix(config)}.json")
    splits = load_masked(config.data)
    name = "" if config.random else config.checkpoint or config.encoder
    check_labels_unseen(name, config.data, splits[0][0], splits[1][0])
    print(describe_masks(splits, config.data))
    warn_of_turned(splits, config.data)
    encoder = patch_encoder(config)
    shown: dict[str, Tensor] = {}
    with deaths_explained():
        features, splits, left_out = features_by_depth(config, encoder, splits, accelerator)
        print_pixels(next(iter(features.values())), config.data)
        report = evaluate_by_depth(config, features, lambda of_depth: evaluate(of_depth, config, shown), "case")
        report |= {"left_out": left_out} if any(left_out.values()) else {}
        lines = {config.encoder: results_at(report)}
        least = [most_frequent(next(iter(features.values())), config) | {"case": "all"}]
        del features  # the files of all depths, before the baselines write theirs
        for baseline, floor in baselines_of(config, encoder).items():
            of_floor = features_by_depth(config, floor, splits, accelerator).by_depth
            report.setdefault("baselines", {})[baseline] = evaluate_by_depth(
                config, of_floor, lambda of_depth: evaluate(of_depth, config), "case"
            )
            lines[baseline] = results_at(report["baselines"][baseline])
            del of_floor
    lines["the most frequent class"] = least
    report["baselines"] = report.get("baselines", {}) | {"the most frequent class": least}
    write_probe_report(path, report, "reading")
    print(table_of(lines, config.readings))
    print(table_of_classes(lines[config.encoder]))
    if config.images:
        count = len(splits[1][0])
        chosen = np.unique(np.linspace(0, count - 1, min(config.images, count)).astype(int))
        figure = picture(encoder, splits[1], chosen, shown, config)
        figure.savefig(path.with_suffix(".pictures.png"), dpi=DPI)
        with event_writer(events_folder(path)) as writer:
            writer.add_figure("segmentation", figure)
        print(f"wrote {path.with_suffix('.pictures.png')}")
    return report


def patch_encoder(config: SegmentationConfig) -> FrozenEncoder | PatchBaseline:
    """The encoder; of a floor, the colours and positions of patches."""
    encoder = open_frozen_encoder(config)
    if isinstance(encoder, ColorBaseline):
        require(encoder.kind == "pixels", "encoder", config.encoder, "floor:pixels, of the floors")
        return PatchBaseline(encoder.img_size, encoder.crop_pct, (CELLS_PER_SIDE, CELLS_PER_SIDE))
    try:
        patch_grid(encoder.model)
    except Unavailable as error:
        raise UserError(f"encoder is {config.encoder}, which has no patches to judge: {error}") from None
    return encoder.to(device())


def baselines_of(
    config: SegmentationConfig, encoder: FrozenEncoder | PatchBaseline
) -> dict[str, FrozenEncoder | PatchBaseline]:
    """What an encoder has to beat, with the same patches."""
    if not config.baselines or isinstance(encoder, PatchBaseline):
        return {}
    floor = PatchBaseline(encoder.img_size, encoder.crop_pct, patch_grid(encoder.model))
    random = {} if config.random else {"random weights": patch_encoder(dataclasses.replace(config, random=True))}
    return random | {"colour and position": floor}


def features_by_depth(
    config: SegmentationConfig,
    encoder: FrozenEncoder | PatchBaseline,
    splits: tuple[Masked, Masked],
    accelerator: Accelerator,
) -> ExtractedPatches:
    """Features at the depths that the config asks for."""
    deepest = len(encoder.stages)
    depths = resolve_depths(config.depth if deepest > 1 else "last", deepest)  # a floor has one
    return extract_patches(encoder, splits, depths, config.data, accelerator, config.strict)


def results_at(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of the depth that counts."""
    chosen = report["protocol"]["chosen_depth"]
    return [result for result in report["results"] if result["depth"] == chosen]


def table_of(lines: dict[str, list[dict[str, Any]]], readings: Sequence[str]) -> str:
    """Mean IoU and pixel accuracy of each reading, a line for each encoder; the mean over seeds."""
    rows = []
    for name, results in lines.items():
        cells = [name, str(results[0].get("depth", "-"))]
        for reading in readings:
            own = [result for result in results if result["case"] in (reading, "all")]
            cells += [mean_of([result[key] for result in own]) for key in ("accuracy", "pixel_accuracy")]
        rows.append(cells)
    return table(["%", "depth", *(f"{each} {key}" for each in readings for key in ("mIoU", "pixels"))], rows)


def mean_of(values: Sequence[float]) -> str:
    """A mean in percent, with its spread where there are several."""
    spread = f" ± {100 * np.std(values):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def table_of_classes(results: list[dict[str, Any]]) -> str:
    """IoU of each class, of each reading; the mean over seeds; without numbers that no pixel has."""
    of_case: dict[str, list[list[float | None]]] = {}
    for result in results:
        of_case.setdefault(result["case"], []).append(result["iou"])
    rows = []
    for number in range(len(results[0]["iou"])):
        values = [[of_seed[number] for of_seed in seeds if of_seed[number] is not None] for seeds in of_case.values()]
        if any(values):
            rows.append([f"class {number}", *(mean_of(each) if each else "-" for each in values)])
    return table(["IoU (%)", *of_case], rows)


def picture(
    encoder: FrozenEncoder | PatchBaseline,
    masked: Masked,
    chosen: NDArray[np.int64],
    shown: dict[str, Tensor],
    config: SegmentationConfig,
) -> Any:
    """Image, mask and predictions of some held-out images."""
    views = masked_views(encoder, masked, config.data)
    samples = [views[FIXED, int(index)] for index in chosen]
    images = torch.stack([sample.images for sample in samples])
    images = images if images.shape[1] in (1, 3) else images.float().mean(1, keepdim=True)
    columns = {"mask": torch.stack([sample.labels for sample in samples]).long().numpy()}
    columns |= {name: found[torch.from_numpy(chosen)].long().numpy() for name, found in shown.items()}
    classes = 1 + max(int(part.max()) for part in columns.values())
    return plot_segmentation(as_rgb(images).movedim(1, -1).numpy(), columns, classes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge as the command line, or `arguments`, say."""
    run(parse_with_images(SegmentationConfig, arguments, prog="python evaluation/segmentation.py"))


if __name__ == "__main__":
    command(main)
