"""The general images of `probe.path`: a second labelled set, which tests an encoder beyond its own images."""

from dataclasses import replace
from typing import Any, NamedTuple

from mpp.config import DataConfig, GeneralImagesConfig, ProbeConfig
from mpp.data.data_path import describe_source, is_hub_dataset
from mpp.data.dataset import ImageDataset
from mpp.data.identity import identify_images
from mpp.data.remote import cached_commit
from mpp.data.sources import find_held_out_split, load_image_datasets, load_splits
from mpp.errors import UserError

CUT_FRACTION = 0.5  # of a set without a held-out split: the rest is the reference of kNN, not trained on
REFERENCE, TEST = "probe.path", "probe.path, held out"
"""Parts of the record of a run's images that are general ones, as messages call them."""
OF_PHOTOGRAPHS = (1, 3)
"""Channels to which photographs are converted."""


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


def general_source(probe: ProbeConfig, data: DataConfig, revision: str | None = None) -> GeneralImagesConfig:
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
        if dataset.labelled() is None or reference.labels.ndim > 1:
            rule = "it must have one label of each image; probe.label_column may name their column"
            raise UserError(f"{describe_source(source)} has none, or several, in {dataset.split}; {rule}")
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
