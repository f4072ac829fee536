"""Probe of frozen features while an encoder is trained: kNN accuracy and effective rank after each block.

Without labels: whether two crops of an image have the same neighbours. Besides, kNN accuracy on general images, and the
drift since the start. N images, D width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from mpp.config import DataConfig, ImageSize, ProbeConfig, Representation
from mpp.data.dataset import ImageDataset
from mpp.data.loader import FixedViewLoader
from mpp.data.overview import note_tested
from mpp.data.views import ViewDataset
from mpp.features.drift import GENERAL_NEIGHBOURS, OWN_NEIGHBOURS, Drift
from mpp.features.frozen import extract, features_at, stages
from mpp.features.general_images import GeneralImages, settings_of_general_images
from mpp.features.metrics import accuracy
from mpp.features.neighbours import knn_predict, nearest_others, share_by_chance, share_kept
from mpp.features.ranks import effective_ranks
from mpp.runtime.processes import on_main_process

MAX_IMAGES_FOR_RANK = 2048  # the effective rank is measured on at most so many
BASELINE_CELLS = 8  # per side, of the colour baseline: as `floor:pixels` of the evaluation
AGREEMENT_NEIGHBOURS = 5
KNN_TEMPERATURE = 0.07  # as in `mpp knn`
Part = tuple[float, float]
"""Part of each side of an image, as shares of its length: from, to."""
NORTH_WEST = (0.0, 0.75)  # with SOUTH_EAST, two crops that share a quarter of the image
SOUTH_EAST = (0.25, 1.0)


class ProbedFeatures(NamedTuple):
    """Features of a set of N images, on the main process; empty on the others."""

    by_depth: list[NDArray]
    """(N, D) after each block."""
    colours: NDArray | None
    """(N, C * 64) mean colours of a grid over the image, the colour baseline; None: not asked for."""
    labels: NDArray
    """(N,)."""


class LabelledViews(NamedTuple):
    """Two sets with labels: those of one are classified by their neighbours in the other."""

    reference: ViewDataset
    test: ViewDataset


class Probe:
    """Effective rank of the features after each block and, with labels, kNN accuracy; without, neighbours' agreement.

    Args:
        loader: of the images that are probed.
        train_images: their labelled ones, at most `probe.images`, are the reference set of the kNN classifier.
        held_out: its labelled images are classified. All of it counts for the effective rank and the agreement, but at
            most MAX_IMAGES_FOR_RANK images.
        data: `eval_images`, the seeds of the choices, and `eval_crop`.
        img_size: height and width of the crops.
        general: a second set with labels, of which at most `probe.images` and at most MAX_IMAGES_FOR_RANK count.
        drift: measures how far the features are from those at the start; None: the run began with random weights.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: FixedViewLoader,
        train_images: ImageDataset,
        held_out: ImageDataset,
        data: DataConfig,
        img_size: ImageSize,
        config: ProbeConfig,
        representation: Representation = "mean",
        general: GeneralImages | None = None,
        drift: Drift | None = None,
    ):
        self.accelerator = accelerator
        self.loader = loader
        self.k = config.neighbours
        self.representation = representation
        self.general = general
        self.drift = drift

        def add(dataset: ImageDataset, data: DataConfig = data) -> ViewDataset:
            return loader.add(ViewDataset(dataset, data, img_size))

        few = min(data.eval_images, MAX_IMAGES_FOR_RANK)
        self.rank_views = add(held_out.choose(few, data.cut_seed))
        self.general_views: LabelledViews | None = None
        if general is not None:
            general_data = settings_of_general_images(data)
            self.general_views = LabelledViews(
                add(general.reference.labelled().choose(config.images, data.eval_seed), general_data),
                add(general.test.labelled().choose(few, data.cut_seed), general_data),
            )
        self.own_views: LabelledViews | None = None  # None: there are no labels
        train, test = train_images.labelled(), held_out.labelled()
        if train is None or test is None or train.labels.ndim > 1:
            return
        all_labelled = len(test) == len(held_out)
        test = test.choose(data.eval_images, data.cut_seed)
        same_images = all_labelled and len(test) == len(self.rank_views.dataset)
        test_views = self.rank_views if same_images else add(test)
        self.own_views = LabelledViews(add(train.choose(config.images, data.eval_seed)), test_views)
        note_tested(train.labels, test.labels, train.class_names)

    @property
    def image_count(self) -> int:
        """Number of held-out images that are classified or, without labels, probed for agreement."""
        return len((self.own_views.test if self.own_views else self.rank_views).dataset)

    @property
    def general_count(self) -> int:
        """Number of general images that are classified; 0: there are none."""
        return len(self.general_views.test.dataset) if self.general_views else 0

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
        held_out = self.extract(model, self.rank_views, baseline)
        features = {OWN_NEIGHBOURS: held_out.by_depth}
        scalars = by_depth("features/rank", effective_ranks(held_out.by_depth, self.accelerator.device))
        if self.own_views is None:
            scalars |= self.agreements(model, baseline)
        else:
            if self.own_views.test is not self.rank_views:
                held_out = self.extract(model, self.own_views.test, baseline)
            scalars |= self.accuracies("knn", model, self.own_views.reference, held_out, baseline)
        if self.general_views is not None:
            general = self.extract(model, self.general_views.test, baseline)
            features[GENERAL_NEIGHBOURS] = general.by_depth
            scalars |= self.accuracies("general/knn", model, self.general_views.reference, general, baseline)
        if self.drift is not None:
            scalars |= self.measure_drift(model, features, baseline)
        return scalars

    def measure_drift(self, model: nn.Module, features: dict[str, list[NDArray]], at_start: bool) -> dict[str, float]:
        """Scalars of the drift since the start, which is kept first if this is it."""
        if at_start:
            on_main_process(self.accelerator, lambda: self.drift.keep_start(model.encoder, features))
        if not self.accelerator.is_main_process:
            return {}
        return self.drift.measure(model.encoder, features)

    def agreements(self, model: nn.Module, baseline: bool) -> dict[str, float]:
        """Agreement of the neighbours of two crops, with that by chance."""
        one_crop = self.extract(model, self.rank_views, baseline, NORTH_WEST)
        other_crop = self.extract(model, self.rank_views, baseline, SOUTH_EAST)
        scalars = self.score("agreement", one_crop, other_crop, agreement)
        if scalars:
            scalars["agreement/chance"] = share_by_chance(AGREEMENT_NEIGHBOURS, len(self.rank_views.dataset))
        return scalars

    def accuracies(
        self, name: str, model: nn.Module, reference_views: ViewDataset, test: ProbedFeatures, baseline: bool
    ) -> dict[str, float]:
        """kNN accuracy of a test set's features."""
        reference = self.extract(model, reference_views, baseline)
        reference_labels = self.on_device(reference.labels)
        test_labels = self.on_device(test.labels)

        def accuracy_of(reference_features: Tensor, test_features: Tensor) -> float:
            predictions = knn_predict(reference_features, reference_labels, test_features, [self.k], KNN_TEMPERATURE)
            return accuracy(predictions[self.k], test_labels)

        return self.score(name, reference, test, accuracy_of)

    def score(
        self, name: str, one: ProbedFeatures, other: ProbedFeatures, score: Callable[[Tensor, Tensor], float]
    ) -> dict[str, float]:
        """Scores of the features of two sets, by depth, and that of the colour baseline if they have it."""
        values = [
            score(self.on_device(of_one), self.on_device(of_other))
            for of_one, of_other in zip(one.by_depth, other.by_depth, strict=True)
        ]
        scalars = by_depth(name, values)
        if one.colours is not None:
            scalars[f"{name}/floor_pixels"] = score(self.on_device(one.colours), self.on_device(other.colours))
        return scalars

    def extract(self, model: nn.Module, views: ViewDataset, baseline: bool, part: Part | None = None) -> ProbedFeatures:
        """Features of a set, of a part of each image if one is given."""
        depths = range(1, 1 + len(stages(model.encoder)))

        def encode(images: Tensor) -> list[Tensor]:
            if part is not None:
                images = crop_and_enlarge(images, part)
            features = features_at(model.encoder, model.normalize(images), depths, self.representation)
            if baseline:
                features.append(F.adaptive_avg_pool2d(images.float(), BASELINE_CELLS).flatten(1))
            return features

        features, labels = extract(self.loader.batches(views), encode, len(views.dataset), self.accelerator)
        colours = features.pop() if baseline and features else None
        return ProbedFeatures(features, colours, labels)

    def on_device(self, array: NDArray) -> Tensor:
        """An array as a tensor on the accelerator."""
        return torch.from_numpy(array).to(self.accelerator.device)


def by_depth(name: str, values: Sequence[float]) -> dict[str, float]:
    """Scalars by the names of their depths."""
    return {f"{name}/depth_{depth:02d}": value for depth, value in enumerate(values, start=1)}


def crop_and_enlarge(images: Tensor, part: Part) -> Tensor:
    """That part of images (B, C, H, W), as large as they are and of their type."""
    height, width = images.shape[-2:]
    start, end = part
    rows = slice(round(start * height), round(end * height))
    columns = slice(round(start * width), round(end * width))
    cropped = images[..., rows, columns].float()
    pixels = F.interpolate(cropped, size=(height, width), mode="bilinear", antialias=True)
    return pixels.round().to(images.dtype) if images.dtype == torch.uint8 else pixels


def agreement(one: Tensor, other: Tensor, neighbours: int = AGREEMENT_NEIGHBOURS) -> float:
    """Agreement of images' neighbours between two crops: it needs no labels.

    Args:
        one, other: features (N, D) of two crops of the same images, in the same order.
    Returns:
        The share of the `neighbours` nearest images by one crop (cosine, the image itself left out) that are among as
        many by the other. By chance: neighbours / (N - 1). 1 where there are too few images to choose among.
    """
    return share_kept(nearest_others(one, neighbours), nearest_others(other, neighbours))
