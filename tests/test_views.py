"""Samples: one view of held-out images, others in each epoch, and replacements of images that cannot be decoded."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from conftest import views_of
from torch.utils._pytree import tree_leaves

from mpp.config import CorruptionConfig, DataConfig
from mpp.corruption import Corruption, draw
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, collate
from mpp.runtime.randomness import FIXED_VIEW

NO_LABEL = torch.tensor(-1)


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


# --- batches that loader processes send ---


KINDS = {  # kind -> pattern of corruption, shape of an image, label
    "masked": ("random", (3, 32, 32), NO_LABEL),
    "hidden patches, two views": ("multiblock", (2, 3, 32, 32), NO_LABEL),
    "several labels": (None, (3, 32, 32), torch.tensor([3, -1])),
    "segmentation": (None, (3, 32, 32), torch.ones(5, 7, dtype=torch.int16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_process_sends_one_tensor_and_the_batch_arrives_unchanged(kind, monkeypatch):
    pattern, shape, label = KINDS[kind]
    samples = []
    for index in range(3):
        corruption = pattern and draw(CorruptionConfig(pattern=pattern), (14, 14), 0, 0, index)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
        samples.append(Batch(pixels, corruption, label, torch.tensor(2**40 + index), []))
    sent = collate(samples)._replace(cursor=torch.arange(6), unreadable=["broken.png: empty"])

    share = torch.UntypedStorage._share_fd_cpu_
    files = []
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_fd_cpu_", lambda storage: files.append(storage.nbytes()) or share(storage)
    )
    arrived = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert files == [sent.images.nbytes]
    assert type(arrived) is Batch and type(arrived.corruption) is (Corruption if pattern else type(None))
    for one, other in zip(tree_leaves(sent), tree_leaves(arrived), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other) and other.is_contiguous()
        else:
            assert one == other
    assert arrived.indices.untyped_storage().nbytes() == arrived.indices.nbytes  # a step keeps them until it is logged
