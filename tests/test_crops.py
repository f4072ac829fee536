"""Crops: torchvision's inception crop and RandAugment, timm's centre crop, of oblong images too."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
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
from mpp.data.crops import MAX_RELATIVE_ASPECT, augment, centre_crop, crop_box, random_crop
from mpp.models.descriptions import timm_crop_pct
from mpp.runtime.randomness import Stream, random_words

WHOLE_IMAGE = DataConfig(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=False)


def random_image(height: int, width: int) -> Tensor:
    """Random pixels (3, height, width)."""
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


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
    parameters = dict(scale=[0.2, 0.9], ratio=[0.75, 4 / 3])
    theirs = np.array([RandomResizedCrop.get_params(image, **parameters) for _ in range(count)])
    for column in range(4):  # top, left, height, width
        our_values = ours[:, column]
        their_values = theirs[:, column]
        standard_error = their_values.std() / count**0.5
        assert abs(our_values.mean() - their_values.mean()) < 6 * standard_error
        assert abs(our_values.std() / their_values.std() - 1) < 0.05


def test_a_ratio_that_never_fits_gives_the_centre():
    assert crop_box(100, 10, DataConfig(crop_area=(1.0, 1.0)), [0.5] * 40) == (43, 0, 13, 10)


def test_crop_is_the_resized_box_and_perhaps_flipped():
    pixels = picture()  # 40 x 48
    image = as_tensor(pixels)
    config = DataConfig(crop_area=(1.0, 1.0), crop_ratio=(1.2, 1.2))
    crops = [random_crop(image, 20, config, 0, 0, index) for index in range(20)]
    resized = np.array(Image.fromarray(pixels).resize((20, 20), Image.Resampling.BILINEAR)).astype(int)
    expected = as_tensor(resized)
    for crop in crops[:2]:
        difference = (crop.int() - expected).abs().max()
        difference_flipped = (crop.int() - expected.flip(-1)).abs().max()
        assert min(difference, difference_flipped) <= 1
    assert {torch.equal(crop, crops[0]) for crop in crops} == {True, False}


def test_training_crops_have_the_proportions_of_the_view():
    """With the whole area and a ratio of 1, the crop of an image of the same proportions is the whole image."""
    pixels = random_image(24, 72)
    for index in range(5):
        assert torch.equal(random_crop(pixels, (24, 72), WHOLE_IMAGE, 0, 0, index), pixels)
    square = random_crop(pixels, (8, 8), WHOLE_IMAGE, 0, 0, 0)
    middle = pixels[None, :, :, 24:48]
    expected = F.interpolate(middle, (8, 8), mode="bilinear", antialias=True)[0]
    assert torch.equal(square, expected)


def test_randaugment_is_torchvisions_and_a_function_of_the_sample():
    image = as_tensor(picture())
    samples = [(epoch, index) for epoch in range(2) for index in range(4)]
    assert augment(image, 0, 0, 0, 0) is image
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = [augment(image, 9, 0, *sample) for sample in samples]
    assert torch.equal(torch.get_rng_state(), state)  # the model's dropout draws from it
    torch.manual_seed(4)
    second = [augment(image, 9, 0, *sample) for sample in samples]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert len({crop.numpy().tobytes() for crop in first}) > 5  # two operations each, now and then none
    word = random_words(Stream.AUGMENT, 0, 1, 2, 1)[0]
    torch.manual_seed(int(word) >> 1)
    assert torch.equal(first[samples.index((1, 2))], RandAugment(magnitude=9)(image))


# --- the fixed view ---


def test_centre_crop_is_the_centre():
    ramp = torch.arange(80, dtype=torch.uint8).expand(3, 40, 80)
    assert torch.equal(centre_crop(ramp, 40, 1.0), ramp[:, :, 20:60])
    assert centre_crop(ramp, 28, 0.875).shape == (3, 28, 28)
    assert centre_crop(torch.zeros(3, 1, 1, dtype=torch.uint8), 8, 0.875).shape == (3, 8, 8)


@contextmanager
def watched_resizes() -> Iterator[list[Tensor]]:
    """The images that are resized while it is open."""
    resize = functional.resize
    resized = []

    def watched_resize(*args, **options):
        resized.append(resize(*args, **options))
        return resized[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "resize", watched_resize)
        yield resized


@pytest.mark.parametrize("upright", [False, True])
def test_a_line_of_pixels_is_not_resized_to_gigabytes(upright):
    line = torch.arange(64_000).remainder(251).to(torch.uint8).expand(3, 1, -1)
    with watched_resizes() as resized:
        view = centre_crop(line.transpose(1, 2) if upright else line, 32, 1.0)
    if upright:
        view = view.transpose(1, 2)
    assert [image.numel() for image in resized] == [3 * 32 * 32 * 16]
    middle = line[:, :, 31_999:32_001]  # 32 of 2,048,000 columns show these
    assert middle.min() <= view.min()
    assert view.max() <= middle.max()


# --- timm's centre crop ---

SHARES = st.sampled_from([0.875, 0.9, 0.95, 1.0]) | st.floats(0.25, 1.0)
IMAGE_SIZES = st.tuples(st.integers(30, 120), st.integers(30, 120))


def our_view(pixels: np.ndarray, size: tuple[int, int], share: float) -> tuple[Tensor, list[int]]:
    """The fixed view, and the size to which the image was resized for it."""
    with watched_resizes() as resized:
        view = centre_crop(as_tensor(pixels), size, share)
    return view, list(resized[0].shape[-2:])


def timms_view(pixels: np.ndarray, size: tuple[int, int], crop_pct: float) -> tuple[Tensor, list[int]]:
    """The view of timm's transform, and the size to which it resizes the image."""
    unnormalized = dict(mean=(0, 0, 0), std=(1, 1, 1))
    transform = create_transform(
        (3, *size), crop_pct=crop_pct, is_training=False, interpolation="bilinear", **unnormalized
    )
    image = Image.fromarray(pixels)
    resized = transform.transforms[0](image)
    return transform(image) * 255, [resized.height, resized.width]


def largest_error(view: Tensor, pixels: np.ndarray, resized: list[int], size: tuple[int, int]) -> float:
    """Largest difference, in levels of 255, of a view from the crop of the image resized in floating point.

    PIL and torch round after each of the two sides, so each may be off by one, and the two by two from each other.
    """
    image = as_tensor(pixels)[None].double()
    exact = F.interpolate(image, resized, mode="bilinear", antialias=True)[0]
    difference = view - functional.center_crop(exact, list(size))
    return float(difference.abs().max())


def assert_views_agree(pixels: np.ndarray, size: tuple[int, int], share: float, crop_pct: float) -> Tensor:
    """Our view and timm's resize the image to the same size, and each is within a level of the exact one."""
    ours, our_size = our_view(pixels, size, share)
    theirs, their_size = timms_view(pixels, size, crop_pct)
    assert our_size == their_size
    assert largest_error(ours, pixels, our_size, size) <= 1.01
    assert largest_error(theirs, pixels, our_size, size) <= 1.01
    return ours


def noise(size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 512), SHARES, IMAGE_SIZES)
@example(32, 0.875, (48, 64))  # timm makes 36 of 32 / 0.875, mpp 37
def test_timms_crop_is_the_held_out_view(side, share, image_size):
    pixels = noise(image_size)
    crop_pct = timm_crop_pct(side, share)
    view = assert_views_agree(pixels, (side, side), share, crop_pct)
    assert torch.equal(centre_crop(as_tensor(pixels), side, crop_pct), view)


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 24), st.integers(1, 24)), SHARES, IMAGE_SIZES)
@example((3, 5), 0.875, (48, 64))  # 27.4 x 45.7, which no crop_pct makes 27 x 46
@example((16, 24), 1.0, (128, 192))
@example((23, 2), 0.875, (100, 30))  # the two are two levels apart
def test_the_oblong_held_out_view_is_timms(patches, share, image_size):
    size = (8 * patches[0], 8 * patches[1])
    height, width = image_size
    relative_aspect = (width / height) / (patches[1] / patches[0])
    assume(1 / MAX_RELATIVE_ASPECT < relative_aspect < MAX_RELATIVE_ASPECT)  # longer images are cut first
    assert_views_agree(noise(image_size), size, share, timm_crop_pct(size, share))


@given(st.integers(8, 512), st.floats(0.05, 1.0))
def test_the_crop_that_timm_gets_leaves_the_held_out_view_as_it_is(side, share):
    crop_pct = timm_crop_pct(side, share)
    length = resized_side(side, share)
    assert math.floor(side / crop_pct) == length == resized_side(side, crop_pct)
    assert (crop_pct == share) == (math.floor(side / share) == length)
