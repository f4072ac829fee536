"""Patches without any value: found after crops and flips, and of no weight in loss and accuracy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import picture, read_metrics
from image_files import decode_with, npy
from torch.utils._pytree import tree_leaves

from mpp.config import Config, CorruptionConfig, DataConfig, ImagesConfig, ObjectiveConfig
from mpp.corruption import Corruption, Kind
from mpp.data.dataset import ImageDataset
from mpp.data.decoding.decode import decode
from mpp.data.loader import cache_decoded
from mpp.data.sources import load_image_datasets
from mpp.data.views import ViewDataset, collate, patches_with_value
from mpp.features.metrics import measure_predictions, summarize
from mpp.objectives import MeanColor, Pixels
from mpp.pretrain import Pretraining
from mpp.runtime.randomness import FIXED_VIEW

NODATA = 0.0
NODATA_TAG = (42113, "s", 0, "-9999", True)  # GDAL_NODATA


@pytest.fixture
def tiles(tmp_path):
    """Eight tiles of 64 x 64 float numbers, whose right half has no value."""
    folder = tmp_path / "tiles"
    folder.mkdir()
    for number in range(8):
        tile = picture(number, (64, 64)).astype(np.float32)
        tile[:, 32:] = NODATA
        (folder / f"{number}.npy").write_bytes(npy(tile))
    return folder


def settings(folder, **more) -> DataConfig:
    return DataConfig(path=str(folder), nodata=NODATA, range=(0.0, 255.0), workers=0, eval_crop=1.0, **more)


def views_of(dataset: ImageDataset, data: DataConfig, marks_nodata: bool = True) -> ViewDataset:
    return ViewDataset(dataset, data, 64, 0, CorruptionConfig(), (8, 8), marks_nodata=marks_nodata)


def test_a_mark_is_one_more_channel():
    tile = picture(0).astype(np.float32)
    tile[:5] = NODATA
    tile[10, :, 1] = NODATA  # two channels have a value there
    config = ImagesConfig(nodata=NODATA, range=(0.0, 255.0))
    marked = decode(tile, config, marks_nodata=True)
    assert torch.equal(marked[:3], decode_with(tile, nodata=NODATA, range=(0.0, 255.0)))
    expected = torch.full((40, 48), 255.0)
    expected[:5] = 0
    assert torch.equal(marked[3], expected)
    assert (decode(picture(0), ImagesConfig(), marks_nodata=True)[3] == 255).all()


@pytest.mark.parametrize("in_memory", [False, True])
def test_batches_say_which_patches_have_a_value(tiles, in_memory):
    data = settings(tiles)
    train, _ = load_image_datasets(data)
    dataset = cache_decoded(train, data, True) if in_memory else train
    views = views_of(dataset, data)
    batch = collate([views[FIXED_VIEW, index] for index in range(len(train))])
    halves = batch.has_value.view(-1, 8, 8)
    assert halves[:, :, :4].all() and not halves[:, :, 5:].any()  # resizing mixes the border
    for epoch in range(4):  # crops, and flips
        crop = views[epoch, 0]
        plain = views_of(train, data, marks_nodata=False)[epoch, 0]
        assert torch.equal(crop.images, plain.images) and plain.has_value is None
        flat = crop.images.unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).std(-1).amax(0).flatten() < 1e-3
        assert (~crop.has_value <= flat).all()


def test_the_mark_travels_with_a_batch(tiles):
    data = settings(tiles)
    train, _ = load_image_datasets(data)
    views = ViewDataset(train, data, 56, 0, CorruptionConfig(), (7, 7), marks_nodata=True)
    batch = collate([views[0, index] for index in range(3)])._replace(cursor=torch.tensor([1, 2]))
    assert batch.has_value.nbytes % 8  # int64 behind it would begin in the middle of a number
    for labels in (batch.labels, torch.ones(3, 5, dtype=torch.int8), torch.rand(3, dtype=torch.double)):
        sent = batch._replace(labels=labels)
        rebuild, arguments = sent.__reduce__()
        again = rebuild(*arguments)
        assert type(again.corruption) is Corruption
        for one, other in zip(tree_leaves(sent), tree_leaves(again), strict=True):
            assert torch.equal(one, other) if torch.is_tensor(one) else one == other


def test_images_in_memory_have_a_mark_or_not_as_they_were_decoded(tiles):
    data = settings(tiles)
    train, _ = load_image_datasets(data)
    for marks_nodata in (False, True):
        kept = cache_decoded(train, data, marks_nodata)
        assert torch.equal(kept.decode(0, data, marks_nodata), train.decode(0, data, marks_nodata))


def test_a_patch_has_a_value_if_any_of_its_pixels_has_one():
    mark = torch.zeros(16, 24, dtype=torch.uint8)
    mark[7, 8] = 1
    mark[15, 23] = 255
    assert patches_with_value(mark, (2, 3)).tolist() == [False, True, False, False, False, True]


def test_accuracy_is_of_patches_that_count():
    objective = MeanColor(ObjectiveConfig(), 8, 3)
    images = torch.stack([torch.from_numpy(picture(seed, (32, 32))).permute(2, 0, 1) for seed in range(4)])
    positions = torch.arange(8).expand(4, 8)
    corruption = Corruption(
        positions, torch.full((4, 8), int(Kind.MASK)), positions, torch.zeros_like(positions), positions[:, :0]
    )
    truth = objective.targets(images, positions)
    predictions = torch.nn.functional.one_hot(truth[..., 0], objective.outputs).float()
    predictions[:, 4:] = predictions[:, 4:].roll(1, -1)  # wrong
    counted = (torch.arange(8) < 5).expand(4, 8)
    scalars = summarize(measure_predictions(objective, predictions, images, corruption, counted=counted))
    assert scalars["accuracy"] == pytest.approx(4 / 5)
    places = torch.arange(4)
    sums = measure_predictions(objective, predictions, images, corruption, places, 4, counted)
    assert sums["by_image"][:, :2].tolist() == [[5, 4]] * 4


def test_the_loss_is_of_patches_that_count(pretrain, tiles, monkeypatch):
    losses = []
    original = Pretraining.loss_of

    def noted(self, predictions, targets, counted):
        loss = original(self, predictions, targets, counted)
        losses.append((float(loss.detach()), predictions.detach(), targets, counted))
        return loss

    monkeypatch.setattr(Pretraining, "loss_of", noted)
    data = (f"--data.path={tiles}", "--data.nodata=0", "--data.range=[0,255]", "--run.steps=2")
    pretrain(*data, "--objective.predict_nodata=false")
    assert losses
    for loss, predictions, targets, counted in losses:
        assert 0 < counted.float().mean() < 1
        logits, classes = predictions[counted], targets[counted][:, 0]
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits.float(), classes)), rel=1e-5)


def test_the_held_out_loss_does_not_depend_on_the_size_of_a_pass(pretrain, tiles, tmp_path):
    """Each patch that counts has the same weight in it, however few of them a pass has."""
    for number in range(4):
        tile = picture(number, (64, 64)).astype(np.float32)
        tile[9:] = NODATA
        tile[:, 9:] = NODATA
        (tiles / f"{number}.npy").write_bytes(npy(tile))
    words = (f"--data.path={tiles}", "--data.nodata=0", "--data.range=[0,255]", "--data.eval_fraction=0.8")
    words += ("--objective.predict_nodata=false", "--run.steps=1", "--optim.lr=1e-9", "--run.precision=fp32")
    losses = []
    for size in (1, 2, 8):
        folder = pretrain(*words, f"--data.batch_size={size}", dir=tmp_path / f"run{size}")
        losses.append(read_metrics(folder, "heldout/loss")[1])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def test_without_any_patch_that_counts_the_loss_is_0():
    predictions = torch.randn(2, 3, 4, requires_grad=True)
    loss = Pretraining.loss_of(None, predictions, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert float(loss.detach()) == 0 and not predictions.grad.any()


def test_no_pass_waits_for_the_device_to_know_which_patches_count(tiles):
    """Tensors on the device "meta" have no values that a program could ask for."""
    data = settings(tiles)
    train, _ = load_image_datasets(data)
    views = views_of(train, data)
    batch = collate([views[0, index] for index in range(3)])
    device = torch.device("meta")
    task = object.__new__(Pretraining)  # without a model of its own
    task.accelerator = SimpleNamespace(device=device)
    task.predicts_features = False
    task.objective = Pixels(ObjectiveConfig(), 8, 3)
    outputs = torch.empty(*batch.corruption.positions.shape, task.objective.outputs, device=device)
    loss, _ = task.loss(lambda images, corruption: outputs, batch, False)
    assert loss.shape == () and loss.device == device


def test_all_patches_count_unless_the_setting_says_so():
    assert Config().objective.predict_nodata
