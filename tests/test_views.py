"""Samples: one view of held-out images, others in each epoch, and replacements of images that cannot be decoded."""

from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from conftest import views_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mpp.config import CorruptionConfig, DataConfig
from mpp.corruption import Corruption, draw
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, collate
from mpp.errors import Undecodable, UnreadableImage
from mpp.runtime.randomness import FIXED_VIEW


def test_held_out_images_have_one_view_and_training_images_one_an_epoch():
    """Also where runs have other seeds, but for another cut."""
    _, test = load_image_datasets(DataConfig())
    views = views_of(test)
    other = replace(views, seed=1)
    for one, two in zip(tree_leaves(views[FIXED_VIEW, 3]), tree_leaves(other[FIXED_VIEW, 3]), strict=True):
        assert one is two is None or torch.equal(one, two)
    assert not torch.equal(views[0, 3].images, views[1, 3].images)
    assert not torch.equal(views[0, 3].images, other[0, 3].images)
    assert views_of(replace(test, labels=None))[FIXED_VIEW, 3].labels == -1
    moved = replace(views, data=replace(views.data, cut_seed=1))
    assert not torch.equal(views[FIXED_VIEW, 3].corruption.positions, moved[FIXED_VIEW, 3].corruption.positions)


def test_unreadable_images_are_named_and_replaced(image_folder, monkeypatch):
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
    monkeypatch.setattr("mpp.data.views.MAX_REPLACEMENTS", 2)
    for count in (2, 3):  # as many as are let through, and one more
        left = iter([*[UnreadableImage("broken")] * count, torch.zeros(3, 40, 48)])
        monkeypatch.setattr(type(train), "decode", lambda *given, left=left: take(next(left)))
        with pytest.raises(Undecodable, match="3 images in a row") if count == 3 else nullcontext():
            assert len(views[0, 0].unreadable) == 2


def take(result: Tensor | Exception) -> Tensor:
    """What a decoder returns, or raises."""
    if isinstance(result, Exception):
        raise result
    return result


# --- batches that loader processes send ---


@pytest.mark.parametrize("pattern", ["random", "multiblock", None])
def test_a_loader_process_sends_one_tensor_and_the_batch_arrives_unchanged(pattern, monkeypatch):
    samples = []
    for index in range(3):
        corruption = pattern and draw(CorruptionConfig(pattern=pattern), (14, 14), 0, 0, index)
        pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
        samples.append(Batch(pixels, corruption, torch.tensor([3, -1]), torch.tensor(2**40 + index), []))
    sent = collate(samples)._replace(cursor=torch.arange(6), unreadable=["broken.png: empty"])
    share, files = torch.UntypedStorage._share_fd_cpu_, []
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_fd_cpu_", lambda storage: files.append(storage.nbytes()) or share(storage)
    )
    arrived = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert files == [sent.images.nbytes]
    assert type(arrived) is Batch and type(arrived.corruption) is (Corruption if pattern else type(None))
    for one, other in zip(tree_leaves(sent), tree_leaves(arrived), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other
