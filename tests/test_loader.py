"""Loaders: the endless sequence of images, how steps are shared out, and loader processes."""

import itertools
import multiprocessing
import os
import threading
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from unittest.mock import patch

import numpy as np
import pytest
import torch
from colours import load
from comparisons import noted
from conftest import dataset_of, encoded, picture, refused, views_of
from torch.testing import assert_close

from mpp.config import CorruptionConfig, DataConfig, ImagesConfig
from mpp.corruption import Corruption, draw
from mpp.data import loader, workers
from mpp.data.columns import without_decoding
from mpp.data.dataset import ImageDataset
from mpp.data.loader import (
    BatchLayout,
    FixedViewLoader,
    TrainingBatchSampler,
    WholeImages,
    cache_decoded,
    fixed_view_batches,
    in_memory,
    training_loader,
)
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch, ViewDataset, collate
from mpp.data.workers import deaths_explained, kill_workers, loader_processes
from mpp.errors import UnreadableImage
from mpp.pretrain import Pretraining
from mpp.runtime import hardware
from mpp.runtime.randomness import FIXED_VIEW

# --- training: how the images of a step are shared out ---


def keys_of_steps(batch_size, processes, start, stop):
    """(epoch, index) of the images of each step of 12, in the order of forward passes and processes."""
    layouts = [BatchLayout.of(12, batch_size, processes, rank) for rank in range(processes)]
    samplers = [TrainingBatchSampler(7, 0, layout, start, stop) for layout in layouts]
    batches = [list(sampler) for sampler in samplers]
    assert list(map(len, samplers)) == list(map(len, batches))
    passes = layouts[0].accumulation_steps
    steps = []
    for step in range(stop - start):
        keys = []
        for forward in range(step * passes, (step + 1) * passes):
            for of_process in batches:
                keys += of_process[forward]
        steps.append(keys)
    return steps


@pytest.mark.parametrize("batch_size, processes", [(5, 1), (2, 5)])
def test_a_steps_images_do_not_depend_on_how_they_are_shared_out(batch_size, processes):
    """Every epoch shows every image once, in another order."""
    expected = keys_of_steps(None, 1, 0, 5)
    assert all(len(keys) == 12 for keys in expected)
    assert keys_of_steps(batch_size, processes, 3, 5) == expected[3:]  # resumed
    assert keys_of_steps(batch_size, processes, 0, 5) == expected
    in_turn = list(itertools.chain(*expected))
    orders = [[image for _, image in in_turn[7 * epoch : 7 * (epoch + 1)]] for epoch in range(8)]
    assert [epoch for epoch, _ in in_turn] == [number // 7 for number in range(60)]
    assert all(sorted(order) == list(range(7)) for order in orders) and orders[0] != orders[1]


def test_shares_differ_by_one_image_at_most_and_fit():
    for images, batch_size, processes in itertools.product(range(1, 70), (None, 1, 2, 3, 8, 99), (1, 2, 3, 5, 7, 8)):
        if images < processes or (batch_size == 1 and images % processes):
            continue
        limit = batch_size or images
        layouts = [BatchLayout.of(images, batch_size, processes, rank) for rank in range(processes)]
        passes = layouts[0].accumulation_steps
        sizes = [len(layout.share(forward)) for forward in range(passes) for layout in layouts]
        assert sum(sizes) == images
        assert passes == -(-images // (processes * limit))
        assert (min(sizes), max(sizes)) == (layouts[0].smallest_share, layouts[0].largest_share)
        assert 0 < max(sizes) <= min(min(sizes) + 1, limit)
        divisors = [layout.loss_divisor(forward) for forward in range(passes) for layout in layouts]
        assert [images / (processes * divisor) for divisor in divisors] == pytest.approx(sizes)


@pytest.mark.parametrize(
    "images, batch_size, processes, words",
    [
        (12, None, 13, r"global_batch_size is 12; .* at least 13"),
        (64, 1, 3, r"batch_size is 1; it must be larger"),
        (5, None, 3, "images in a forward pass is 1; it must be at least 2"),
        (8, 1, 1, "images in a forward pass is 1; it must be at least 2"),
    ],
)
def test_a_global_batch_that_cannot_be_shared_out_is_an_error(images, batch_size, processes, words):
    """The last two where single images are refused."""
    BatchLayout.of(2 * processes, None, processes, 0).require_several("")
    with refused(words):
        BatchLayout.of(images, batch_size, processes, 0).require_several("")


def test_samples_do_not_depend_on_workers_and_loading_draws_nothing_from_torchs_generator():
    train, _ = load_image_datasets(DataConfig())
    layout = BatchLayout.of(4, 4, 1, 0)
    before = torch.get_rng_state()
    without, with_two = (
        list(training_loader(views_of(train, workers=workers), layout, 158, 160)) for workers in (0, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(with_two, without)


# --- fixed views ---


@pytest.mark.parametrize("workers", [0, 2])
def test_sets_are_loaded_again_and_again(workers):
    """Each image once, by one of the processes."""
    train, test = load_image_datasets(DataConfig())
    loader = FixedViewLoader(4, workers, world_size=2, rank=1)
    loader.start()
    assert not multiprocessing.active_children()  # there is nothing to load
    sets = [loader.add(views_of(train.choose(11, 0))), loader.add(views_of(test.choose(5, 0)))]
    for number in (0, 1, 0, 0, 1):
        batches = loader.batches(sets[number])
        expected = fixed_view_batches(sets[number], 4, world_size=2, rank=1)
        for batch, expected_batch in zip(batches, expected, strict=True):
            assert_close(batch, expected_batch)
        next(iter(loader.batches(sets[1 - number])))  # a loop that is left early
    seen = [batch.indices for rank in range(2) for batch in fixed_view_batches(sets[0], 4, 2, rank)]
    assert sorted(torch.cat(seen).tolist()) == list(range(11))
    assert len(torch.cat([batch.indices for batch in fixed_view_batches(sets[0], 4)])) == 11


# --- loader processes ---


def test_loader_processes_are_forked_before_there_are_threads_and_none_is_left(pretrain, monkeypatch):
    """But for the one that waits for signals: a fork beside a thread that runs may hang. Evaluations fork none."""
    fork, evaluate = os.fork, Pretraining.evaluate
    forks = []  # names of the threads that run
    forks_before_and_after = []
    of_others = {thread.name for thread in threading.enumerate()}

    def noted_fork():
        forks.append({thread.name for thread in threading.enumerate()} - of_others)
        return fork()

    def noted_evaluate(*given):
        forks_before_and_after.append(len(forks))
        scalars = evaluate(*given)
        forks_before_and_after.append(len(forks))
        return scalars

    monkeypatch.setattr(os, "fork", noted_fork)
    monkeypatch.setattr(Pretraining, "evaluate", noted_evaluate)
    options = ("--run.eval_every=2", "--probe.every=2", "--probe.images=20", "--data.workers=1")
    pretrain(*options, without="--data.workers")
    assert forks_before_and_after == [2, 2, 2, 2]
    assert not multiprocessing.active_children()
    assert len(forks) == 2 and all("listen" in name for names in forks for name in names), forks


def test_the_death_of_a_process_that_stays_names_an_image_of_the_set_that_it_loads(image_folder, monkeypatch):
    dataset, _ = load(image_folder)
    loader = FixedViewLoader(2, workers=1, world_size=1, rank=0)
    fine = loader.add(views_of(dataset.select(np.array([0, 1]))))
    deadly = loader.add(views_of(dataset.select(np.array([2, 3]))))
    name, decode_image = dataset.image_name(3), ImageDataset.decode

    def deadly_decode(self, index, *given):
        if self.image_name(index) == name:
            os.kill(os.getpid(), 9)
        return decode_image(self, index, *given)

    monkeypatch.setattr(ImageDataset, "decode", deadly_decode)
    assert len(list(loader.batches(fine))) == 1
    with refused(f"a loader process died .* while it read {name};"), deaths_explained():
        list(loader.batches(deadly))
    kill_workers()


@pytest.mark.parametrize(
    "given, gpu, cores, processes, expected",
    [
        (None, False, 64, 1, 2),
        (None, False, 1, 1, 1),  # torch would warn of two
        (None, True, 128, 2, 16),  # more are of no use
        (None, True, 128, 8, 15),
        (0, True, 64, 1, 0),
    ],
)
def test_loader_processes_follow_the_device(monkeypatch, given, gpu, cores, processes, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(workers, "uses_gpu", lambda: gpu)
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(hardware, "cores", lambda: cores)
    assert loader_processes(DataConfig(workers=given)) == expected


# --- decoded images kept in memory ---


IMAGE_BYTES = 40 * 48 * 3


@pytest.fixture
def one_broken(image_folder):
    """Twelve images of 40 x 48 pixels, one of which is no image: its name is 01.png."""
    (image_folder / "cat" / "01.png").write_bytes(b"no image")
    dataset, _ = load(image_folder, eval_fraction=0.01)
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


def test_images_that_will_not_fit_are_not_all_decoded(monkeypatch):
    """The first 64 tell how much memory all will take."""
    monkeypatch.setattr(loader, "CHUNK_BYTES", 1)
    many = ImageDataset(without_decoding(dataset_of([encoded(picture())] * 200), "image"), "image", None, "train")
    with patch.object(ImageDataset, "decode", autospec=True, side_effect=ImageDataset.decode) as decode:
        assert not cache_decoded(many, DataConfig(workers=0, cache_gb=90 * IMAGE_BYTES / 1e9)).decoded
    assert decode.call_count == 64


@pytest.mark.parametrize(
    "randaugment, threads, device, missing, workers",
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
    monkeypatch.setattr(loader, "WORKERS_ARE_FORKS", False)  # others do not inherit what is held
    one_worker = replace(views, data=DataConfig(workers=1))
    assert not in_memory(one_worker, 99, torch.device(device)).dataset.decoded


# --- samples: one view of held-out images, others in each epoch, and replacements of images that cannot be decoded ---


def test_held_out_images_have_one_view_and_training_images_one_an_epoch():
    """Also where runs have other seeds, but for another cut."""
    _, test = load_image_datasets(DataConfig())
    views = views_of(test)
    other = replace(views, seed=1)
    assert_close(views[FIXED_VIEW, 3], other[FIXED_VIEW, 3])
    assert not torch.equal(views[0, 3].images, views[1, 3].images)
    assert not torch.equal(views[0, 3].images, other[0, 3].images)
    assert views_of(replace(test, labels=None))[FIXED_VIEW, 3].labels == -1
    moved = replace(views, data=replace(views.data, cut_seed=1))
    assert not torch.equal(views[FIXED_VIEW, 3].corruption.positions, moved[FIXED_VIEW, 3].corruption.positions)


def test_unreadable_images_are_named_and_replaced(image_folder):
    (image_folder / "cat" / "broken.png").write_bytes(b"nothing")
    (image_folder / "cat" / "text.jpg").write_text("this is no image")
    train, _ = load(image_folder, eval_fraction=0.01)
    views = views_of(train)
    names = {index: train.image_name(index) for index in range(len(train))}
    broken = {index for index, name in names.items() if name.endswith(("broken.png", "text.jpg"))}
    for index in broken:
        sample = views[0, index]
        assert int(sample.indices) not in broken
        assert names[index] in sample.unreadable[0]
        assert torch.equal(sample.images, views[0, index].images)  # always replaced by the same
    assert views[0, min(names.keys() - broken)].unreadable == []


# --- batches that loader processes send ---


@pytest.mark.parametrize("pattern", ["random", "multiblock", None])
def test_a_loader_process_sends_one_tensor_and_the_batch_arrives_unchanged(pattern, monkeypatch):
    samples = []
    for index in range(3):
        corruption = pattern and draw(CorruptionConfig(pattern=pattern), (14, 14), 0, 0, index)
        pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
        samples.append(Batch(pixels, corruption, torch.tensor([3, -1]), torch.tensor(2**40 + index), []))
    sent = collate(samples)._replace(cursor=torch.arange(6), unreadable=["broken.png: empty"])
    files = noted(monkeypatch, torch.UntypedStorage, "_share_fd_cpu_")
    arrived = ForkingPickler.loads(ForkingPickler.dumps(sent))
    assert [each.nbytes() for each in files] == [sent.images.nbytes]
    assert type(arrived) is Batch and type(arrived.corruption) is (Corruption if pattern else type(None))
    assert arrived.unreadable == sent.unreadable
    assert_close(arrived._replace(unreadable=[]), sent._replace(unreadable=[]))
