"""Loaders: the endless sequence of images, how steps are shared out, and loader processes."""

import itertools
import json
import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import views_of

from mpp.config import DataConfig
from mpp.data import workers
from mpp.data.decoding.decode import decode
from mpp.data.loader import BatchLayout, FixedViewLoader, TrainingBatchSampler, fixed_view_batches, training_loader
from mpp.data.sources import load_image_datasets
from mpp.data.views import Batch
from mpp.data.workers import deaths_explained, kill_workers, loader_processes
from mpp.errors import UserError
from mpp.pretrain import Pretraining
from mpp.runtime import hardware

EVALUATED_METRICS = ("heldout", "features", "knn")


def assert_same_images(one: Batch, other: Batch) -> None:
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.indices, other.indices)


# --- training: how the images of a step are shared out ---


def test_every_epoch_shows_every_image_once_in_another_order():
    layout = BatchLayout.of(6, 3, world_size=1, rank=0)
    orders: dict[int, list[int]] = {}
    for batch in TrainingBatchSampler(9, seed=0, layout=layout, start=0, stop=6):
        for epoch, index in batch:
            orders.setdefault(epoch, []).append(index)
    assert list(orders) == [0, 1, 2, 3]
    assert all(sorted(order) == list(range(9)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4


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


@pytest.mark.parametrize(
    ("batch_size", "processes"),
    [(5, 1), (3, 3), (None, 5), (2, 5)],
)
def test_a_steps_images_do_not_depend_on_how_they_are_shared_out(batch_size, processes):
    expected = keys_of_steps(None, 1, 0, 5)
    assert all(len(keys) == 12 for keys in expected)
    assert keys_of_steps(batch_size, processes, 0, 5) == expected
    assert keys_of_steps(batch_size, processes, 3, 5) == expected[3:]  # resumed


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
        assert min(sizes) == layouts[0].smallest_share
        assert max(sizes) == layouts[0].largest_share
        assert 0 < max(sizes) <= min(min(sizes) + 1, limit)


@pytest.mark.parametrize(
    ("images", "batch_size", "processes", "words"),
    [
        (12, None, 13, r"global_batch_size is 12; .* at least 13"),
        (64, 1, 3, r"batch_size is 1; it must be larger"),
    ],
)
def test_a_global_batch_that_cannot_be_shared_out_is_an_error(images, batch_size, processes, words):
    with pytest.raises(UserError, match=words):
        BatchLayout.of(images, batch_size, processes, 0)


@pytest.mark.parametrize(("images", "batch_size", "processes"), [(1, 8, 1), (5, None, 3), (8, 1, 1), (9, 2, 2)])
def test_single_images_are_refused_where_several_are_needed(images, batch_size, processes):
    BatchLayout.of(2 * processes, None, processes, 0).require_several("")
    with pytest.raises(UserError, match="images in a forward pass is 1; it must be at least 2"):
        BatchLayout.of(images, batch_size, processes, 0).require_several("")


def test_samples_do_not_depend_on_workers():
    train, _ = load_image_datasets(DataConfig())
    layout = BatchLayout.of(4, 4, 1, 0)
    without = list(training_loader(views_of(train, workers=0), layout, 158, 160))
    with_two = list(training_loader(views_of(train, workers=2), layout, 158, 160))
    for one, other in zip(without, with_two, strict=True):
        assert_same_images(one, other)
        for name, tensor in one.corruption._asdict().items():
            other_tensor = getattr(other.corruption, name)
            assert tensor is other_tensor is None or torch.equal(tensor, other_tensor)


def test_loading_draws_nothing_from_torchs_generator():
    train, _ = load_image_datasets(DataConfig())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    next(iter(training_loader(views_of(train, workers=0), BatchLayout.of(2, 2, 1, 0), 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)


# --- fixed views ---


@pytest.mark.parametrize("workers", [0, 2])
def test_sets_are_loaded_again_and_again(workers):
    """Each image once, by one of the processes."""
    train, test = load_image_datasets(DataConfig())
    loader = FixedViewLoader(4, workers, world_size=2, rank=1)
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


def test_loader_processes_are_forked_before_there_are_threads_and_none_is_left(pretrain, tmp_path, monkeypatch):
    """But for the one that waits for signals: a fork beside a thread that runs may hang. Evaluations fork none."""
    fork, evaluate = os.fork, Pretraining.evaluate
    threads_at_forks: list[list[threading.Thread]] = []
    forks_in_evaluations: list[int] = []
    threads_of_others = {thread.name for thread in threading.enumerate()}

    def counted_fork():
        threads_at_forks.append(threading.enumerate())
        return fork()

    def counted_evaluate(self, model, step, tracker):
        before = len(threads_at_forks)
        scalars = evaluate(self, model, step, tracker)
        forks_in_evaluations.append(len(threads_at_forks) - before)
        return scalars

    def evaluated_metrics(workers: int) -> list[dict]:
        options = ("--run.eval_every=2", "--probe.every=2", "--probe.images=20", f"--data.workers={workers}")
        folder = pretrain(*options, dir=tmp_path / str(workers), without="--data.workers")
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{name: line[name] for name in line if name.startswith(EVALUATED_METRICS)} for line in lines]

    monkeypatch.setattr(os, "fork", counted_fork)
    monkeypatch.setattr(Pretraining, "evaluate", counted_evaluate)
    metrics = evaluated_metrics(workers=1)
    assert forks_in_evaluations == [0, 0]
    assert not multiprocessing.active_children()
    assert len(threads_at_forks) == 2
    names = {thread.name for threads in threads_at_forks for thread in threads} - threads_of_others
    assert all("listen" in name for name in names), names
    for line, expected in zip(metrics, evaluated_metrics(workers=0), strict=True):
        assert line == pytest.approx(expected, rel=1e-6)


def test_the_death_of_a_process_that_stays_names_an_image_of_the_set_that_it_loads(image_folder, monkeypatch):
    dataset, _ = load_image_datasets(DataConfig(path=str(image_folder), eval_split=None))
    loader = FixedViewLoader(2, workers=1)
    fine = loader.add(views_of(dataset.select(np.array([0, 1]))))
    deadly = loader.add(views_of(dataset.select(np.array([2, 3]))))
    deadly_name = dataset.image_name(3)
    deadly_data = dataset.rows[3]["image"]["bytes"] or Path(deadly_name).read_bytes()

    def deadly_decode(*given):
        if given[0] == deadly_data:
            os.kill(os.getpid(), 9)
        return decode(*given)

    monkeypatch.setattr("mpp.data.decoding.decode.decode", deadly_decode)
    assert len(list(loader.batches(fine))) == 1
    with (
        pytest.raises(UserError, match=f"a loader process died .* while it read {deadly_name};"),
        deaths_explained(),
    ):
        list(loader.batches(deadly))
    kill_workers()


@pytest.mark.parametrize(
    ("given", "gpu", "cores", "local_processes", "expected"),
    [
        (None, False, 64, 1, 2),
        (None, False, 1, 1, 1),  # torch would warn of two
        (None, True, 12, 1, 11),
        (None, True, 128, 8, 15),
        (None, True, 128, 1, 16),  # more are of no use
        (None, True, 8, 8, 1),
        (5, True, 128, 8, 5),
        (0, False, 64, 1, 0),
    ],
)
def test_loader_processes_follow_the_device(monkeypatch, given, gpu, cores, local_processes, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_processes))
    monkeypatch.setattr(workers, "uses_gpu", lambda: gpu)
    monkeypatch.setattr(workers, "cores", lambda: cores)
    monkeypatch.setattr(hardware, "cores", lambda: cores)
    assert loader_processes(DataConfig(workers=given)) == expected


def test_a_bound_process_has_its_share_of_the_cores_already(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    monkeypatch.setattr(hardware, "cores", lambda: 12)
    assert hardware.share_of_cores() == 12
