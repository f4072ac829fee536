"""Decoded images kept in memory."""

import os
import resource

import datasets
import pytest
import torch
from conftest import dataset_of, encoded, picture
from mpp.data.decoded_cache import BatchesBySize, cache_decoded

from mpp.config import DataConfig, ImagesConfig
from mpp.data.dataset import ImageDataset
from mpp.data.sources import load_image_datasets
from mpp.errors import UnreadableImage


@pytest.fixture
def one_broken(image_folder) -> ImageDataset:
    """Twelve images of 40 x 48 pixels, one of which is no image: its name is 01.png."""
    (image_folder / "cat" / "01.png").write_bytes(b"no image")
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    return dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_are_held_in_memory_are_the_same(one_broken, workers):
    cached = cache_decoded(one_broken, DataConfig(workers=workers))
    for index in range(len(one_broken)):
        if one_broken.image_name(index).endswith("01.png"):
            with pytest.raises(UnreadableImage):
                cached.decode(index, ImagesConfig())
        else:
            assert torch.equal(cached.decode(index, ImagesConfig()), one_broken.decode(index, ImagesConfig()))
            decoded_again = ImagesConfig(max_pixels=1)  # would be refused
            assert cached.decode(index, decoded_again).shape == (3, 40, 48)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_held_in_memory_where_all_fit(one_broken, workers):
    size = sum(cache_decoded(one_broken, DataConfig(workers=workers)).decoded.shapes.prod(1))  # bytes
    assert cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=size / 1e9)).decoded
    assert not cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=(size - 1) / 1e9)).decoded
    one_broken.rows = None  # with no room at all, no image is read
    assert cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=0)) is one_broken


def test_holding_many_images_opens_few_files():
    """The memory that a loader process hands over is a file: 64 images each."""
    rows = dataset_of([encoded(picture(1, (4, 4)))] * 64 * 60).cast_column("image", datasets.Image(decode=False))
    dataset = ImageDataset(rows, "image", None, "train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 40, hard))
    try:
        cached = cache_decoded(dataset, DataConfig(workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert cached.decode(3839, ImagesConfig()).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("bytes_of_an_image", "sizes"),
    [
        pytest.param(2**10, [1, 64, 35], id="small images: 64 at most"),
        pytest.param(2**20, [1, *[4] * 24, 3], id="4 MB at a time"),
        pytest.param(2**25, [1] * 100, id="photographs one by one"),
    ],
)
def test_whole_images_come_in_batches_of_some_4_mb(bytes_of_an_image, sizes):
    batches = BatchesBySize(100)
    indices: list[int] = []
    sizes_of_batches = []
    for batch in batches:
        indices += batch
        sizes_of_batches.append(len(batch))
        batches.shapes += [torch.Size([1])] * len(batch)
        batches.size += bytes_of_an_image * len(batch)
    assert indices == list(range(100))
    assert sizes_of_batches == sizes
