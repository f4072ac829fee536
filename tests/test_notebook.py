"""Python's door: what a notebook calls."""

import math
import sys

import numpy as np
import pytest
import timm
import torch
from conftest import refused, run_command
from PIL import Image
from torch.testing import assert_close

import mpp
from evaluation.frozen.encoder import load_frozen_encoder

CELLS = """
import dataclasses, sys
import mpp
assert "torch" not in sys.modules
import timm, mpp.models
assert timm.is_model("mpp_vit") and "accelerate" not in sys.modules
from mpp.pretrain import pretrain
config = {"run.dir": sys.argv[1], "run.steps": 2, "run.precision": "fp32", "run.threads": 1, "run.report": False}
config |= {"model.width": 16, "model.depth": 1, "model.heads": 2, "model.img_size": 32, "data.workers": 0}
folder = pretrain(config | {"data.eval_images": 8, "config": ["birds", "corruption_15"], "corruption.rate": 0.5})
assert pretrain(config | {"data.eval_images": 8}) == folder  # it is finished
config = mpp.Config()
encoder = mpp.load_encoder(folder)
import torch
images = torch.randint(0, 256, (3, 3, 40, 50), dtype=torch.uint8)
print(tuple(mpp.extract_features(encoder, images).shape))
try:
    pretrain(dataclasses.replace(config, objective=dataclasses.replace(config.objective, grid=2)))
except ValueError as error:
    print(error)
"""


@pytest.mark.faults
def test_a_fresh_kernel_trains_loads_and_extracts(tmp_path):
    ended = run_command(sys.executable, "-c", CELLS, str(tmp_path / "run"))
    *_, shape, refused = ended.stdout.splitlines()
    assert shape == "(3, 16)" and refused.startswith("objective.grid is 2; it must be 4 or left out"), ended.stderr


def test_features_of_images_in_memory_are_those_of_the_evaluation(finished_run):
    encoder = mpp.load_encoder(finished_run)
    images = torch.randint(0, 256, (70, 3, 32, 32), dtype=torch.uint8)
    timm_config = timm.data.resolve_model_data_config(encoder)
    assert math.floor(32 / timm_config["crop_pct"]) == 37  # of the whole image the run's share, 0.875, to the nearest
    found = mpp.extract_features(encoder, images, representation="both")
    assert found.shape == (70, 32) and found.dtype == torch.float32
    pictures = [Image.fromarray(np.asarray(image.permute(1, 2, 0))) for image in images]
    assert_close(mpp.extract_features(encoder, pictures, representation="both"), found)
    encoder.pretrained_cfg["crop_pct"] = 1.0  # nothing is resized then
    (expected,) = load_frozen_encoder(str(finished_run))(images, "both", [2])
    assert_close(mpp.extract_features(encoder, images, representation="both"), expected)
    for dtype in (torch.bfloat16, torch.float16):
        half = mpp.extract_features(encoder.to(dtype), images, representation="both")
        assert_close(half, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "images, said",
    [
        (torch.rand(2, 3, 32, 32), r"torch.float32 \(3, 32, 32\) each up to .*; it must be PIL images"),
        (torch.zeros(2, 32, 32, 3, dtype=torch.uint8), r"torch.uint8 \(32, 32, 3\) each"),
        ([np.zeros((32, 32, 3), np.uint8)], "of ndarray"),
        ([], "empty"),
    ],
)
def test_images_that_are_none_are_refused(finished_run, images, said):
    with refused(f"images is {said}"):
        mpp.extract_features(mpp.load_encoder(finished_run), images)


def test_an_encoder_of_another_size_sees_images_of_that_size(finished_run):
    image = Image.effect_noise((100, 90), 50)  # grey
    larger = mpp.load_encoder(finished_run, img_size=96, num_classes=10)
    seen = []
    larger.patch_embed.register_forward_hook(lambda _, args, out: seen.append(args[0].shape))
    assert mpp.extract_features(larger, image).shape == (1, 16) and seen == [(1, 3, 96, 96)]


def test_what_the_package_has_is_offered_and_what_it_has_not_is_said():
    assert set(dir(mpp)) == {"Config", "extract_features", "load_encoder"}
    with pytest.raises(AttributeError, match="module mpp has no attribute train"):
        _ = mpp.train
