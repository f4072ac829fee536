"""Decoded images kept in memory."""

import pytest
import torch

from mpp.config import DataConfig, ImagesConfig
from mpp.data import loader
from mpp.data.dataset import ImageDataset
from mpp.data.loader import WholeImages, cache_decoded, in_memory
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset
from mpp.errors import UnreadableImage

IMAGE_BYTES = 40 * 48 * 3


@pytest.fixture
def one_broken(image_folder) -> ImageDataset:
    """Twelve images of 40 x 48 pixels, one of which is no image: its name is 01.png."""
    (image_folder / "cat" / "01.png").write_bytes(b"no image")
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None, eval_fraction=0.01))
    return dataset


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_are_held_in_memory_are_the_same(one_broken, workers):
    cached = cache_decoded(one_broken, DataConfig(workers=workers))
    for index in range(len(one_broken)):
        if one_broken.image_name(index).endswith("01.png"):
            with pytest.raises(UnreadableImage):
                cached.decode(index, ImagesConfig())
        else:
            held = cached.decode(index, ImagesConfig(max_pixels=1))  # would be refused, were it decoded again
            assert torch.equal(held, one_broken.decode(index, ImagesConfig()))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_held_in_memory_where_all_fit(one_broken, workers, monkeypatch):
    monkeypatch.setattr(loader, "CHUNK_BYTES", 2 * IMAGE_BYTES)
    chunks = [*map(len, WholeImages(one_broken, DataConfig()))]
    assert chunks[:-1] == [2] * (len(chunks) - 1)
    size = IMAGE_BYTES * (len(one_broken) - 1)
    assert cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=size / 1e9)).decoded
    assert not cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=(size - 1) / 1e9)).decoded
    one_broken.rows = None  # with no room at all, no image is read
    assert cache_decoded(one_broken, DataConfig(workers=workers, cache_gb=0)) is one_broken


def test_images_that_will_not_fit_are_not_all_decoded(one_broken, monkeypatch):
    decode, decoded = ImageDataset.decode, []
    monkeypatch.setattr(ImageDataset, "decode", lambda self, *given: decoded.append(given) or decode(self, *given))
    monkeypatch.setattr(loader, "CHUNK_BYTES", 2 * IMAGE_BYTES)
    monkeypatch.setattr(loader, "TELLING_IMAGES", 2)
    assert not cache_decoded(one_broken, DataConfig(workers=0, cache_gb=4 * IMAGE_BYTES / 1e9)).decoded
    assert len(decoded) <= 3


@pytest.mark.parametrize(
    ("randaugment", "threads", "device", "missing", "workers"),
    [
        (0, 2, "cpu", 0, 0),
        (1, 2, "cpu", 0, None),
        (0, 3, "cpu", 0, None),
        (0, 2, "cuda", 0, None),
        (0, 2, "cpu", 1, None),  # not every image twice
    ],
)
def test_the_training_process_crops_held_images_itself_where_that_is_quick(
    one_broken, monkeypatch, randaugment, threads, device, missing, workers
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    views = ViewDataset(one_broken, DataConfig(), 32, randaugment=randaugment)
    chosen = in_memory(views, 2 * len(one_broken) - missing, torch.device(device))
    assert chosen.data.workers == workers
    assert bool(chosen.dataset.decoded) == (missing == 0)
