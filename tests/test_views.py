"""Samples: one view of held-out images, others in each epoch, and replacements of images that cannot be decoded."""

import numpy as np
import torch
from conftest import views_of
from torch.utils.data import DataLoader

from mpp.config import DataConfig
from mpp.data.sources import load_image_datasets
from mpp.runtime.randomness import FIXED_VIEW


def test_held_out_images_have_one_view_and_training_images_one_an_epoch():
    _, test = load_image_datasets(DataConfig())
    views = views_of(test)
    other_views = views_of(test)
    assert torch.equal(views[FIXED_VIEW, 3].images, other_views[FIXED_VIEW, 3].images)
    assert not torch.equal(views[0, 3].images, other_views[1, 3].images)


def test_unreadable_images_are_named_and_replaced(image_folder):
    (image_folder / "cat" / "broken.png").write_bytes(b"nothing")
    (image_folder / "cat" / "text.jpg").write_text("this is no image")
    train, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_fraction=0.01))
    views = views_of(train)
    names = [train.image_name(index) for index in range(len(train))]
    broken = {index for index, name in enumerate(names) if name.endswith(("broken.png", "text.jpg"))}
    for index in broken:
        sample = views[0, index]
        assert int(sample.indices) not in broken
        assert names[index] in sample.unreadable[0]
        assert torch.equal(sample.images, views[0, index].images)  # always replaced by the same
    readable = set(range(len(train))) - broken
    assert views[0, readable.pop()].unreadable == []


def test_views_fit_torchs_own_loader():
    _, test = load_image_datasets(DataConfig())
    loader = DataLoader(views_of(test), sampler=[(0, 0), (0, 1)], batch_size=None)
    assert np.shape([sample.images for sample in loader]) == (2, 3, 32, 32)
