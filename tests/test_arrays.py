"""Arrays that may be larger than memory: the same wherever they lie, and bounded."""

import errno
import os
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from test_fewshot import features

from evaluation import fewshot, knn, linear
from evaluation.frozen.labelled_features import ARRAY_NAMES, LabelledFeatures, load_features, save_features
from mpp.data.views import Batch
from mpp.features.arrays import empty_array, in_blocks, let_go, select
from mpp.features.frozen import extract


def in_memory_up_to(monkeypatch, size: int) -> None:
    """Arrays of more bytes are mapped."""
    for module in ("mpp.features.arrays", "evaluation.frozen.labelled_features"):
        monkeypatch.setattr(f"{module}.IN_MEMORY", size)


@pytest.fixture
def peak():
    """peak() -> bytes that Python and numpy had allocated at most since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("count", [0, 50])
def test_arrays_to_be_filled(tmp_path, monkeypatch, in_file, count):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole = np.random.default_rng(0).normal(size=(count, 3))
    array = empty_array(whole.shape, np.float32, in_file)
    array[:] = whole
    assert (array == whole.astype(np.float32)).all() and array.dtype == np.float32
    assert isinstance(array, np.memmap) == (in_file and count > 0)
    assert not list(tmp_path.iterdir())  # nothing is left, however the process ends


def test_a_full_disk_is_named(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"TMPDIR is .*No space left.*; choose another"):
        empty_array((10, 10), np.float32, in_file=True)


def test_features_of_all_depths_are_collected_in_files_where_they_are_large(monkeypatch, peak):
    """Eight depths of 4,000 images are 8 MB."""
    monkeypatch.setattr("mpp.features.frozen.IN_MEMORY", 10**6)
    whole = [np.random.default_rng(depth).normal(size=(4000, 64)).astype(np.float32) for depth in range(8)]
    held = peak()

    def batches():
        for first in range(0, 4000, 50):
            indices = torch.arange(first, first + 50)
            yield Batch(indices[:, None], None, indices % 7, indices, [])

    def encode(images):
        return [torch.from_numpy(depth)[images[:, 0]] for depth in whole]

    found, labels = extract(batches(), encode, 4000, Accelerator(cpu=True))
    assert peak() - held < 10**6
    assert all((one == other).all() for one, other in zip(found, whole, strict=True))
    assert (labels == np.arange(4000) % 7).all()


def test_probes_find_the_same_in_files(tmp_path, monkeypatch):
    data = features()
    save_features(tmp_path / "f.npz", data)
    configs = [(fewshot, fewshot.FewshotConfig()), (knn, knn.KnnConfig()), (linear, linear.LinearConfig())]
    held = [without_outcomes(module.evaluate(data, config)) for module, config in configs]
    in_memory_up_to(monkeypatch, 0)
    mapped = load_features(tmp_path / "f.npz")
    assert all(isinstance(part, np.memmap) for part in (mapped.train, mapped.test, mapped.dev_split().train))
    assert [without_outcomes(module.evaluate(mapped, config)) for module, config in configs] == held


def without_outcomes(results):
    return [result | {"outcomes": result["outcomes"].predictions.tolist()} for result in results]


def test_a_choice_of_rows_is_bounded(monkeypatch, peak):
    in_memory_up_to(monkeypatch, 10**6)
    array = np.random.default_rng(0).normal(size=(60_000, 32)).astype(np.float32)  # 7.7 MB
    indices = np.random.default_rng(1).permutation(50_000)
    held = peak()
    chosen = select(array, indices)
    assert peak() - held < 2.5 * 10**6
    assert (chosen == array[indices]).all()


def resident() -> int:
    """Bytes that this process has mapped of files and that are in memory."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssFile", "RssShmem"))


@pytest.mark.parametrize("way", [in_blocks, lambda array: [select(array, np.arange(0, len(array), 7))]])
def test_what_was_read_of_a_mapped_array_is_let_go(way):
    mapped = empty_array((2**14, 2**10), np.float32, in_file=True)  # 67 MB
    mapped[:] = 1
    let_go(mapped)
    before = resident()
    assert sum(block.sum(dtype=np.float64) for block in way(mapped)) in (mapped.size, 2**10 * len(range(0, 2**14, 7)))
    assert resident() - before < 10**7
    assert mapped[-1, -1] == 1  # it can be read again


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_saved_features_are_mapped_where_they_are_large(tmp_path, monkeypatch, dtype, order):
    train, train_labels, test, test_labels, *_ = features(test=201)
    data = LabelledFeatures(
        np.asarray(train / 100, dtype, order), train_labels, np.asarray(test / 100, dtype, order), test_labels
    )
    save_features(tmp_path / "f.npz", data)
    np.savez_compressed(tmp_path / "small.npz", **dict(zip(ARRAY_NAMES, data[:4], strict=True)))
    for in_memory in (10**9, 0):
        in_memory_up_to(monkeypatch, in_memory)
        for name in ("f.npz", "small.npz"):
            loaded = load_features(tmp_path / name)
            for ours, saved in zip(loaded[:4], data[:4], strict=True):
                assert (ours == saved).all() and ours.dtype == saved.dtype
            assert {isinstance(loaded.train, np.memmap), isinstance(loaded.test, np.memmap)} == {in_memory == 0}


def test_loading_large_features_takes_no_memory_for_them(tmp_path, monkeypatch, peak):
    in_memory_up_to(monkeypatch, 10**6)
    data = features(per_class=5000, width=64)
    save_features(tmp_path / "f.npz", data)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    loaded = load_features(tmp_path / "f.npz")
    assert data.train.nbytes > 8 * 10**6 and peak() - held < 4 * 10**6
    save_features(tmp_path / "f.npz", data._replace(train=data.train + 1))
    assert (loaded.train == data.train).all()  # another file took its place: this one is still there


@pytest.mark.parametrize("in_memory", [0, 10**9])
@pytest.mark.parametrize("name", ARRAY_NAMES)
def test_a_flipped_bit_is_noticed(tmp_path, monkeypatch, name, in_memory):
    in_memory_up_to(monkeypatch, in_memory)
    path = tmp_path / "f.npz"
    save_features(path, features())
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        content[archive.getinfo(f"{name}.npy").header_offset + 400] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"features is .* which cannot be read: .*CRC"):
        load_features(path)
