"""Files of features: the same when they are read again, and damage is noticed."""

import zipfile

import numpy as np
import pytest
from test_fewshot import features

from evaluation.frozen.features import ARRAY_NAMES, LabelledFeatures, load_features, save_features


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_saved_features_are_loaded_as_they_were(tmp_path, dtype, order):
    train, train_labels, test, test_labels, *_ = features(test=201)
    data = LabelledFeatures(
        np.asarray(train / 100, dtype, order), train_labels, np.asarray(test / 100, dtype, order), test_labels
    )
    save_features(tmp_path / "f.npz", data)
    np.savez_compressed(tmp_path / "small.npz", **dict(zip(ARRAY_NAMES, data[:4], strict=True)))
    for name in ("f.npz", "small.npz"):
        loaded = load_features(tmp_path / name)
        for ours, saved in zip(loaded[:4], data[:4], strict=True):
            assert (ours == saved).all() and ours.dtype == saved.dtype


@pytest.mark.parametrize("name", ARRAY_NAMES)
def test_a_flipped_bit_is_noticed(tmp_path, name):
    path = tmp_path / "f.npz"
    save_features(path, features())
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        content[archive.getinfo(f"{name}.npy").header_offset + 400] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"features is .* which cannot be read: .*CRC"):
        load_features(path)
