"""Crops: torchvision's inception crop and RandAugment, timm's centre crop, of oblong images too."""

import math
from itertools import product
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from conftest import picture
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import RandAugment, functional

from mpp.config import DataConfig, resized_side
from mpp.data.crops import MAX_RELATIVE_ASPECT, augment, centre_crop, crop_box, random_crop, to_8_bits
from mpp.models.descriptions import timm_crop_pct
from mpp.runtime.randomness import Stream, random_words

WHOLE_IMAGE = DataConfig(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=False)


def as_tensor(pixels: np.ndarray) -> Tensor:
    """(H, W, C) as (C, H, W)."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


# --- the training crop ---


def test_crop_areas_and_ratios_are_torchvisions():
    count = 4000
    config = DataConfig(crop_area=(0.2, 0.9))
    generator = np.random.default_rng(0)
    ours = np.array([crop_box(60, 90, config, generator.random(40).tolist()) for _ in range(count)])
    torch.manual_seed(0)
    image = torch.zeros(3, 60, 90)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 0.9], [0.75, 4 / 3]) for _ in range(count)])
    # top, left, height, width
    assert (abs(ours.mean(0) - theirs.mean(0)) < 6 * theirs.std(0) / count**0.5).all()
    assert (abs(ours.std(0) / theirs.std(0) - 1) < 0.05).all()


def test_a_ratio_that_never_fits_gives_the_centre():
    for size, box in (((100, 10), (43, 0, 13, 10)), ((10, 100), (0, 43, 10, 13)), ((1, 100), (0, 49, 1, 1))):
        assert crop_box(*size, DataConfig(crop_area=(1.0, 1.0)), [0.5] * 40) == box
    square = DataConfig(crop_ratio=(1.0, 1.0))  # times the proportions of the view
    assert crop_box(30, 100, square, [], proportion=0.5) == (0, 42, 30, 15)
    assert crop_box(100, 40, square, [], proportion=2.0) == (40, 0, 20, 40)


def test_a_crop_may_lie_at_either_edge():
    quarter = DataConfig(crop_area=(0.25, 0.25), crop_ratio=(1.0, 1.0))
    assert crop_box(10, 20, quarter, [0.5, 0.5, 0.0, 0.0] * 10) == (0, 0, 7, 7)
    assert crop_box(10, 20, quarter, [0.5, 0.5, 0.999, 0.999] * 10) == (3, 13, 7, 7)
    assert crop_box(1, 4, quarter, [0.5, 0.5, 0.0, 0.999] * 10) == (0, 3, 1, 1)  # of a single pixel


def test_augmentation_rounds_pixels_of_more_bits():
    pixels = torch.tensor([-3.0, 0.4, 0.6, 254.4, 254.6, 300.0])
    assert to_8_bits(pixels).tolist() == [0, 0, 1, 254, 255, 255]


def test_training_crops_have_the_proportions_of_the_view():
    """With the whole area and a ratio of 1, the crop of an image of the same proportions is the whole image."""
    pixels = torch.randint(0, 256, (3, 24, 72), dtype=torch.uint8)
    for index in range(5):
        assert torch.equal(random_crop(pixels, (24, 72), WHOLE_IMAGE, 0, 0, index), pixels)
    square = random_crop(pixels, (8, 8), WHOLE_IMAGE, 0, 0, 0)
    middle = pixels[None, :, :, 24:48]
    expected = F.interpolate(middle, (8, 8), mode="bilinear", antialias=True)[0]
    assert torch.equal(square, expected)


def test_randaugment_is_torchvisions_and_a_function_of_the_sample():
    image = as_tensor(picture())
    samples = [*product(range(2), range(4))]
    assert augment(image, 0, 0, 0, 0) is image
    runs = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        runs.append([augment(image, 9, 0, *sample) for sample in samples])
        assert torch.equal(torch.get_rng_state(), state)  # the model's dropout draws from it
    assert all(map(torch.equal, *runs))
    assert len({crop.numpy().tobytes() for crop in runs[0]}) > 5  # two operations each, now and then none
    torch.manual_seed(int(random_words(Stream.AUGMENT, 0, 1, 2, 1)[0]) >> 1)
    assert torch.equal(runs[0][samples.index((1, 2))], RandAugment(magnitude=9)(image))


# --- the fixed view ---


def watched_resizes():
    """While it is open: the calls that resize images."""
    return patch.object(functional, "resize", wraps=functional.resize)


def test_a_line_of_pixels_is_not_resized_to_gigabytes():
    line = torch.arange(64_000).remainder(251).to(torch.uint8).expand(3, 1, -1)
    with watched_resizes() as resize:
        shown = [centre_crop(line, 32, 1.0), centre_crop(line.transpose(1, 2), 32, 1.0).transpose(1, 2)]
    assert [math.prod(call.args[1]) for call in resize.call_args_list] == [32 * 32 * 16] * 2
    middle = line[:, :, 31_999:32_001]  # 32 of 2,048,000 columns show these
    for view in shown:
        assert middle.min() <= view.min() and view.max() <= middle.max()


# --- timm's centre crop ---

SHARES = st.sampled_from([0.875, 0.9, 0.95, 1.0]) | st.floats(0.25, 1.0)
IMAGE_SIZES = st.tuples(st.integers(30, 120), st.integers(30, 120))


OBLONG = st.tuples(st.integers(1, 24), st.integers(1, 24)).map(lambda patches: (8 * patches[0], 8 * patches[1]))
SQUARE = st.integers(8, 512).map(lambda side: (side, side))


@settings(max_examples=100)
@given(SQUARE | OBLONG, SHARES, IMAGE_SIZES)
@example((32, 32), 0.875, (48, 64))  # timm makes 36 of 32 / 0.875, mpp 37
@example((24, 40), 0.875, (48, 64))  # 27.4 x 45.7, which no crop_pct makes 27 x 46
@example((128, 192), 1.0, (128, 192))
@example((184, 16), 0.875, (100, 30))  # the two are two levels apart
def test_the_held_out_view_is_timms(size, share, image_size):
    """PIL and torch round after each of the two sides, so each may be off by one from the exact view."""
    relative_aspect = image_size[1] * size[0] / (image_size[0] * size[1])
    assume(1 / MAX_RELATIVE_ASPECT < relative_aspect < MAX_RELATIVE_ASPECT)  # longer images are cut first
    pixels = np.random.default_rng(0).integers(0, 256, (*image_size, 3), dtype=np.uint8)
    crop_pct = timm_crop_pct(size if size[0] != size[1] else size[0], share)
    with watched_resizes() as resize:
        ours = centre_crop(as_tensor(pixels), size, share)
    resized = list(resize.call_args.args[1])
    transform = create_transform(
        (3, *size), crop_pct=crop_pct, is_training=False, interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1)
    )
    image = Image.fromarray(pixels)
    assert [*transform.transforms[0](image).size[::-1]] == resized
    theirs = transform(image) * 255
    exact = F.interpolate(as_tensor(pixels)[None].double(), resized, mode="bilinear", antialias=True)[0]
    for view in (ours, theirs):
        assert (view - functional.center_crop(exact, list(size))).abs().max() <= 1.01
    if size[0] == size[1]:
        assert torch.equal(centre_crop(as_tensor(pixels), size, crop_pct), ours)


@given(st.integers(8, 512), st.floats(0.05, 1.0))
def test_the_crop_that_timm_gets_leaves_the_held_out_view_as_it_is(side, share):
    crop_pct = timm_crop_pct(side, share)
    length = resized_side(side, share)
    assert math.floor(side / crop_pct) == length == resized_side(side, crop_pct)
    assert (crop_pct == share) == (math.floor(side / share) == length)
