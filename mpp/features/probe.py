"""Probe of frozen features while an encoder is trained: kNN accuracy and effective rank after each block.

Without labels: whether two crops of an image have the same neighbours. Besides, kNN accuracy on general images (a
second labelled set, `probe.path`, which tests an encoder beyond its own images), and the drift of the weights since the
start. N images, D width.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from mpp.config import DataConfig, GeneralImagesConfig, ImageSize, Representation, RunProbeConfig, require
from mpp.data.data_path import is_hub_dataset
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.loader import FixedViewLoader
from mpp.data.overview import note_tested
from mpp.data.remote import cached_commit
from mpp.data.sources import find_held_out_split, load_image_datasets, load_splits
from mpp.data.views import ViewDataset
from mpp.features.drift import keep_start, measure_drift
from mpp.features.frozen import BASELINE_CELLS, extract, features_at, stages
from mpp.features.metrics import effective_rank, is_right
from mpp.features.neighbours import find_other_neighbours, knn_predict
from mpp.runtime.processes import on_main_process

MAX_IMAGES_FOR_RANK = 2048  # at most so many are compared with each other, by their neighbours or in a picture
PIXEL_COLOURS = "floor_pixels"
"""Name of the mean colours of a grid, among those of depths."""
GENERAL_KNN = "general/knn"
"""Group of the kNN accuracy on the general images of `probe.path`."""
AGREEMENT_NEIGHBOURS = 5
KNN_TEMPERATURE = 0.07  # as in `mpp knn`
Part = tuple[float, float]
"""Part of each side of an image, as shares of its length: from, to."""
NORTH_WEST = (0.0, 0.75)  # with SOUTH_EAST, two crops that share a quarter of the image
SOUTH_EAST = (0.25, 1.0)
CUT_FRACTION = 0.5  # of general images without a held-out split: the rest is the reference of kNN, not trained on
REFERENCE, TEST = "probe.path", "probe.path, held out"
"""Parts of the record of a run's images that are general ones, as messages call them."""
OF_PHOTOGRAPHS = (1, 3)  # channels to which photographs are converted


# --- general images ---


class GeneralImages(NamedTuple):
    """A general set: the images that are compared with, and those that are classified."""

    reference: ImageDataset
    test: ImageDataset
    revision: str | None
    """The commit of a hub dataset."""

    def identify(self, retries: int) -> dict[str, Any]:
        """Their record, labels included: see mpp/data/identity.py."""
        parts = {REFERENCE: self.reference, TEST: self.test}
        return {part: identify_images(dataset, True, retries, self.revision) for part, dataset in parts.items()}


def general_source(probe: RunProbeConfig, data: DataConfig, revision: str | None = None) -> GeneralImagesConfig:
    """The settings of the general images.

    Args:
        data: those of the run's own images, for the number of channels.
        revision: the commit of a hub dataset.
    """
    return GeneralImagesConfig(
        path=probe.path,
        revision=revision,
        image_column=probe.image_column,
        label_column=probe.label_column,
        channels=data.channels,
        max_pixels=data.max_pixels,
        read_retries=data.read_retries,
        cut_seed=data.cut_seed,
    )


def load_general_images(source: GeneralImagesConfig) -> GeneralImages:
    """Load the general images: the training split, and a held-out split or, without one, a cut of the training split.

    Raises:
        UserError: no images there, or images without labels.
    """
    splits = load_splits(source)
    if source.split not in splits:
        source = replace(source, split=next(iter(splits)))
    if find_held_out_split(source, [*splits]) is None:
        source = replace(source, eval_fraction=CUT_FRACTION)
    reference, test = load_image_datasets(source, splits)
    for dataset in (reference, test):
        has_classes = dataset.labelled() is not None and reference.labels.ndim == 1
        allowed = f"images with one label each, in {dataset.split} too; probe.label_column may name their column"
        require(has_classes, "probe.path", source.path, allowed)
    commit = source.revision or cached_commit(splits[source.split]) if is_hub_dataset(source) else None
    return GeneralImages(reference, test, commit)


def settings_of_general_images(data: DataConfig) -> DataConfig:
    """The settings by which general images become pixels.

    With 1 or 3 channels they are photographs: bands, range and nodata, which are of the run's files, do not count. With
    other channels their files are taken for such as the run's.
    """
    if data.channels not in OF_PHOTOGRAPHS:
        return data
    return replace(data, bands=None, range=None, nodata=None)


# --- the probe ---


class Probe:
    """Effective rank of the features after each block and, with labels, kNN accuracy; without, neighbours' agreement.

    Args:
        loader: of the images that are probed.
        train_images: their labelled ones, at most `probe.images`, are the reference set of the kNN classifier.
        held_out: its labelled images are probed, at most `data.eval_images`. Without labels, at most
            MAX_IMAGES_FOR_RANK images, too.
        data: `eval_images`, the seeds of the choices, and `eval_crop`.
        img_size: height and width of the crops.
        general: a second set with labels, of which at most `probe.images` and at most `data.eval_images` count.
        start: file with the weights at the start, from which drift is measured; None: they were random.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: FixedViewLoader,
        train_images: ImageDataset,
        held_out: ImageDataset,
        data: DataConfig,
        img_size: ImageSize,
        config: RunProbeConfig,
        representation: Representation = "mean",
        general: GeneralImages | None = None,
        start: Path | None = None,
    ):
        self.accelerator = accelerator
        self.loader = loader
        self.k = config.neighbours
        self.every = config.every
        self.representation = representation
        self.general = general
        self.start = start

        self.sets: dict[str, list[ViewDataset]] = {}
        """Scalars' name -> the images that are probed and, unless it is `agreement`, those whose labels vote."""

        def add(name: str, data: DataConfig, *images: ImageDataset) -> None:
            evaluated, *voting = images
            chosen = [evaluated.to_evaluate_on(data, data.eval_images)]
            chosen += [each.choose(config.images, data.eval_seed) for each in voting]
            self.sets[name] = [loader.add(ViewDataset(each, data, img_size)) for each in chosen]

        train, test = train_images.labelled(), held_out.labelled()
        if train is None or test is None or train.labels.ndim > 1:  # there are no labels
            few = min(data.eval_images, MAX_IMAGES_FOR_RANK)
            add("agreement", replace(data, eval_images=few), held_out)
        else:
            add("knn", data, test, train)
            note_tested(train.labels, self.sets["knn"][0].dataset.labels, train.class_names)
        if general is not None:
            add(GENERAL_KNN, settings_of_general_images(data), general.test.labelled(), general.reference.labelled())

    def __call__(self, model: nn.Module, baseline: bool = False) -> dict[str, float]:
        """Probe a model that has an `encoder` and a `normalize`. All processes call it.

        Args:
            baseline: it is at the start of its run: probe the mean colours of a grid over the image, too, which need no
                model, and keep the state that drift is measured from.
        Returns:
            `features/rank/depth_XX`; `knn/depth_XX` or, without labels, `agreement/depth_XX`; `general/knn/depth_XX`
            and `drift/...` if they are asked for; with `baseline` also `knn/floor_pixels` and the like. Empty except on
            the main process.
        """
        scalars: dict[str, float] = {}
        device = self.accelerator.device
        for name, (tested, *voting) in self.sets.items():
            features, labels = self.extract(model, tested, baseline)
            for depth, rows in features.items():
                if name != GENERAL_KNN and depth != PIXEL_COLOURS:
                    scalars[f"features/rank/{depth}"] = effective_rank(rows, device)
            if voting:
                references, classes = self.extract(model, *voting, baseline)
                for depth, rows in features.items():
                    predicted = knn_predict(references[depth], classes, rows.to(device), [self.k], KNN_TEMPERATURE)
                    scalars[f"{name}/{depth}"] = float(is_right(predicted[self.k].cpu(), labels).double().mean())
            else:
                others = max(len(tested.dataset) - 1, 1)
                scalars[f"{name}/chance"] = min(1.0, AGREEMENT_NEIGHBOURS / others)
                one, other = (self.extract(model, tested, baseline, part)[0] for part in (NORTH_WEST, SOUTH_EAST))
                for depth in one:
                    scalars[f"{name}/{depth}"] = agreement(one[depth].to(device), other[depth].to(device))
        if self.start is not None:
            if baseline:
                on_main_process(self.accelerator, lambda: keep_start(self.start, model.encoder))
            if self.accelerator.is_main_process:
                scalars |= measure_drift(self.start, model.encoder)
        return scalars if self.accelerator.is_main_process else {}

    def extract(
        self, model: nn.Module, views: ViewDataset, baseline: bool, part: Part | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Features of a set of N images, of a part of each if one is given, on the CPU of the main process.

        Returns:
            `depth_XX` -> (N, D) after that block; PIXEL_COLOURS -> (N, C * 64) mean colours of a grid, with `baseline`.
            labels (N,). Both are empty on the other processes.
        """
        depths = range(1, 1 + len(stages(model.encoder)))
        names = [f"depth_{depth:02d}" for depth in depths] + [PIXEL_COLOURS] * baseline

        def encode(images: Tensor) -> list[Tensor]:
            if part is not None:
                images = crop_and_enlarge(images, part)
            features = features_at(model.encoder, model.normalize(images), depths, self.representation)
            if baseline:
                features.append(F.adaptive_avg_pool2d(images.float(), BASELINE_CELLS).flatten(1))
            return features

        features, labels = extract(self.loader.batches(views), encode, len(views.dataset), self.accelerator)
        return dict(zip(names, features, strict=False)), labels


def crop_and_enlarge(images: Tensor, part: Part) -> Tensor:
    """That part of images (B, C, H, W), as large as they are and of their type."""
    sides = images.shape[-2:]
    top, bottom, left, right = (round(share * side) for side in sides for share in part)
    box = (top, left, bottom - top, right - left)
    pixels = functional.resized_crop(images.float(), *box, list(sides), antialias=True)
    return pixels.round().to(images.dtype) if images.dtype == torch.uint8 else pixels


def agreement(one: Tensor, other: Tensor, neighbours: int = AGREEMENT_NEIGHBOURS) -> float:
    """Agreement of images' neighbours between two crops: it needs no labels.

    Args:
        one, other: features (N, D) of two crops of the same images, in the same order.
    Returns:
        The share of the `neighbours` nearest images by one crop (cosine, the image itself left out) that are among as
        many by the other. 1 where there are too few images to choose among.
    """
    near, other_near = (find_other_neighbours(each, neighbours).index for each in (one, other))
    kept = (near[:, :, None] == other_near[:, None, :]).any(2)
    return float(kept.sum() / kept.numel()) if kept.numel() else 1.0
