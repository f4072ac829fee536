"""Files of features: the same when they are read again; damage, and what is no features, is named."""

import pickle
import zipfile

import numpy as np
import pytest
from conftest import refused
from test_fewshot import features

from evaluation.frozen.features import ARRAY_NAMES, LabelledFeatures, load_features, save_features


def named(data):
    """The arrays of features by their names in a file."""
    return dict(zip(ARRAY_NAMES, data[:4], strict=True))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_saved_features_are_loaded_as_they_were(tmp_path, dtype):
    """In the other order of memory, and with labels of any integer type."""
    data = features(test=201)
    train, test = (np.asarray(part / 100, dtype, "F") for part in (data.train, data.test))
    data = data._replace(train=train, train_labels=data.train_labels.astype(np.uint8), test=test)
    save_features(tmp_path / "f.npz", data)
    np.savez_compressed(tmp_path / "small.npz", **named(data))
    for name in ("f.npz", "small.npz"):
        loaded = load_features(tmp_path / name)
        for ours, saved in zip(loaded[:4], data[:4], strict=True):
            assert (ours == saved).all() and ours.dtype == (saved.dtype if saved.ndim == 2 else np.int64)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "f.npz"
    for name in ARRAY_NAMES:
        save_features(path, features())
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            content[archive.getinfo(f"{name}.npy").header_offset + 400] ^= 1
        path.write_bytes(content)
        with refused(r"features is .* which cannot be read: .*CRC"):
            load_features(path)


@pytest.mark.parametrize(
    "name, array, words",
    [
        ("train_labels", None, "train_labels"),
        ("train_features", np.full((210, 20), np.nan), "train_features is float64 .* finite"),
        ("train_labels", np.full(210, -1), "train_labels must be integers from 0"),
        ("test_labels", np.full(200, 2**63, np.uint64), "test_labels must be integers from 0 and below"),
        ("train_labels", np.zeros(210, np.int64), "all training images have the same label"),
        ("train_labels", np.arange(3), "as many as labels"),
        ("test_features", np.zeros((200, 3), np.float32), "test_features is .* as wide in both splits"),
    ],
)
def test_bad_features_are_named(tmp_path, name, array, words):
    file = tmp_path / "f.npz"
    arrays = named(features())
    del arrays[name]
    np.savez(file, **arrays, **{} if array is None else {name: array})
    with refused(rf"{file}.*{words}"):
        load_features(file)


NUMBERS = np.linspace(0, 1, 30)
MARKS = np.arange(30)[:, None] // [1, 2] % 2
OF_SEVERAL = "_labels must be 1 where an image is of a class, and 0 where not"


@pytest.mark.parametrize(
    "kind, train, test, words",
    [
        ("number", np.where(NUMBERS < 0.1, np.nan, NUMBERS), NUMBERS, "train_labels must be finite floating-point"),
        ("number", np.zeros((30, 2)), NUMBERS, "train_labels must be finite floating-point"),
        ("several", MARKS + 2, MARKS, f"train{OF_SEVERAL}"),
        ("several", MARKS, np.where(NUMBERS[:, None] < 0.1, -1, MARKS), f"test{OF_SEVERAL}"),
        ("several", MARKS, np.ones((30, 3), int), "train_labels and test_labels have other numbers of classes"),
    ],
)
def test_bad_labels_of_other_kinds_are_named(rng, kind, train, test, words):
    cloud = rng.normal(size=(30, 4)).astype(np.float32)
    if kind == "several":
        train, test = train.astype(np.int8), test.astype(np.int8)
    with refused(words):
        LabelledFeatures(cloud, train, cloud, test, kind=kind).checked("here")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran')",)


def test_files_that_are_no_features_are_refused_and_never_run(tmp_path):
    path = tmp_path / "f.npz"
    save_features(path, features())
    for content in (b"nonsense", pickle.dumps(Bomb()), path.read_bytes()[:500], None):
        path.write_bytes(content) if content else path.unlink()
        with refused(r"features is .* cannot be read"):
            load_features(path)
    np.savez(path, **{name: np.array([Bomb()], dtype=object) for name in ARRAY_NAMES})
    with refused(r"features is .*allow_pickle"):
        load_features(path)
    np.save(tmp_path / "f.npy", np.zeros(3))
    with refused("cannot be read"):
        load_features(tmp_path / "f.npy")
