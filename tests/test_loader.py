"""Loaders: the endless sequence of images, how steps are shared out, and loader processes."""

import itertools
import multiprocessing
import os
import threading

import numpy as np
import pytest
import torch
from conftest import refused, views_of

from mpp.config import DataConfig
from mpp.data import workers
from mpp.data.dataset import ImageDataset
from mpp.data.loader import BatchLayout, FixedViewLoader, TrainingBatchSampler, fixed_view_batches, training_loader
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained, kill_workers, loader_processes
from mpp.pretrain import Pretraining
from mpp.runtime import hardware


def assert_same_images(one: Batch, other: Batch) -> None:
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.indices, other.indices)


# --- training: how the images of a step are shared out ---


def keys_of_steps(batch_size: int | None, processes: int, start: int, stop: int) -> list[list[tuple[int, int]]]:
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


@pytest.mark.parametrize(("batch_size", "processes"), [(5, 1), (2, 5)])
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
    ("images", "batch_size", "processes", "words"),
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
    without = list(training_loader(views_of(train, workers=0), layout, 158, 160))
    assert torch.equal(torch.get_rng_state(), before)
    with_two = list(training_loader(views_of(train, workers=2), layout, 158, 160))
    for one, other in zip(without, with_two, strict=True):
        assert_same_images(one, other)
        for tensor, other_tensor in zip(one.corruption, other.corruption, strict=True):
            assert tensor is other_tensor is None or torch.equal(tensor, other_tensor)


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
            assert_same_images(batch, expected_batch)
        next(iter(loader.batches(sets[1 - number])))  # a loop that is left early
    seen = [batch.indices for rank in range(2) for batch in fixed_view_batches(sets[0], 4, 2, rank)]
    assert sorted(torch.cat(seen).tolist()) == list(range(11))


# --- loader processes ---


def test_loader_processes_are_forked_before_there_are_threads_and_none_is_left(pretrain, monkeypatch):
    """But for the one that waits for signals: a fork beside a thread that runs may hang. Evaluations fork none."""
    fork, evaluate = os.fork, Pretraining.evaluate
    forks: list[set[str]] = []  # names of the threads that run
    forks_before_and_after: list[int] = []
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
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    loader = FixedViewLoader(2, workers=1)
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
    ("given", "gpu", "cores", "processes", "bound", "expected"),
    [
        (None, False, 64, 1, False, 2),
        (None, False, 1, 1, False, 1),  # torch would warn of two
        (None, True, 128, 2, False, 16),  # more are of no use
        (None, True, 128, 8, False, 15),
        (None, True, 12, 8, True, 11),  # it has its share of the cores already
        (None, True, 1, 1, False, 1),
        (0, True, 64, 1, False, 0),
    ],
)
def test_loader_processes_follow_the_device(monkeypatch, given, gpu, cores, processes, bound, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", str(int(bound)))
    monkeypatch.setattr(workers, "uses_gpu", lambda: gpu)
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(hardware, "cores", lambda: cores)
    assert loader_processes(DataConfig(workers=given)) == expected
