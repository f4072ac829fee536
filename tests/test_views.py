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


def batch_with(
    pattern: str | None = None,
    image: tuple[int, ...] = (3, 32, 32),
    label: torch.Tensor = NO_LABEL,
    cursor: torch.Tensor | None = None,
) -> Batch:
    samples = []
    for index in range(3):
        corruption = pattern and draw(CorruptionConfig(pattern=pattern), (14, 14), 0, 0, index)
        pixels = torch.randint(0, 256, image, dtype=torch.uint8)
        samples.append(Batch(pixels, corruption, label, torch.tensor(2**40 + index), []))
    return collate(samples)._replace(cursor=cursor, unreadable=["broken.png: empty"])


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": "random"},
        {"pattern": "multiblock"},  # with hidden patches
        {"cursor": torch.arange(6)},
        {"label": torch.tensor([3, -1])},
        {"label": torch.ones(5, 7, dtype=torch.int16)},  # a mask
        {"image": (2, 3, 32, 32)},  # two views
    ],
    ids=["masked", "hidden", "streamed", "several labels", "segmentation", "two views"],
)
def test_a_loader_process_sends_one_tensor_and_the_batch_arrives_unchanged(settings, monkeypatch):
    share = torch.UntypedStorage._share_fd_cpu_
    files = []

    def noted_share(storage, *args, **kwargs):
        files.append(storage.nbytes())
        return share(storage, *args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", noted_share)
    sent = batch_with(**settings)
    arrived = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert files == [sent.images.nbytes]
    leaves = tree_leaves(sent)
    assert type(arrived) is Batch and type(arrived.corruption) is (Corruption if "pattern" in settings else type(None))
    for one, other in zip(leaves, tree_leaves(arrived), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other) and other.is_contiguous()
        else:
            assert one == other
    assert arrived.indices.untyped_storage().nbytes() == arrived.indices.nbytes  # a step keeps them until it is logged
