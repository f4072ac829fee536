"""Heads that probes keep: their weights, what they predict, and the encoder that they are of."""

import numpy as np
import pytest
import torch

from evaluation import features, linear
from evaluation.frozen.features import load_features
from evaluation.frozen.kept_heads import load_head, rebuild_linear
from mpp.errors import UserError
from mpp.runtime.weights import fingerprint

FAST = ("--precision=fp32", "--data.workers=0", "--threads=1", "--l2=0.01", "--iterations=3")
BIRDS = ["fowl", "owl", "parrot", "penguin", "raptor", "seabird", "songbird", "wader", "waterfowl"]


def test_a_kept_head_is_the_one_that_was_tested(trained, tmp_path):
    """Its accuracy on the features that `mpp features` writes is that of the report."""
    common = (f"--encoder={trained}", *FAST[:3])
    linear.main([f"--encoder={trained}", *FAST, "--depth=dev", "--save=true"])
    (folder,) = (trained / "evaluation").glob("linear*_head")
    report = read_json(folder.with_name(folder.name.replace("_head", ".json")))
    kept = load_head(folder)
    depth = report["protocol"]["chosen_depth"]
    features.main([*common, f"--depth={depth}", f"--out={tmp_path / 'f.npz'}"])
    data = load_features(tmp_path / "f.npz")
    predicted = rebuild_linear(kept)(torch.from_numpy(data.test)).argmax(1).numpy()
    assert report["results"][0]["accuracy"] == pytest.approx(np.mean(predicted == data.test_labels))
    about = kept.description
    assert about.class_names == BIRDS and about.depth == depth and about.representation == "mean"
    assert about.weights == fingerprint(trained)
    assert about.input["img_size"] == [32, 32] and about.input["precision"] == "fp32"


def test_a_head_that_cannot_be_read_is_refused_in_a_line(trained):
    linear.main([f"--encoder={trained}", *FAST, "--save=true"])
    (folder,) = (trained / "evaluation").glob("linear*_head")
    weights = (folder / "head.safetensors").read_bytes()
    (folder / "head.safetensors").write_bytes(weights[:100])
    with pytest.raises(UserError, match=r"classifier is .*linear_.*_head, which cannot be read: "):
        load_head(folder)
    (folder / "head.json").write_text("{}")
    with pytest.raises(UserError, match=r"classifier is .*linear_.*_head, which cannot be read"):
        load_head(folder)


def test_a_head_of_no_encoder_is_not_kept(trained, tmp_path):
    with pytest.raises(UserError, match="save is true; it must be left out: a colour baseline has no weights"):
        linear.main(["--encoder=floor:pixels", "--save=true", *FAST])
    features.main([f"--encoder={trained}", f"--out={tmp_path / 'f.npz'}", *FAST[:3]])
    with pytest.raises(UserError, match="it has no effect unless features is not set"):
        linear.main([f"--features={tmp_path / 'f.npz'}", "--save=true", "--l2=0.01"])
