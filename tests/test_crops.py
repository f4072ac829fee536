"""Files become RGB."""

import math
import struct
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import encoded, picture
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import RandAugment, functional

from mpp.config import DataConfig, ImagesConfig, resized_side
from mpp.data.crops import MAX_RELATIVE_ASPECT, augment, centre_crop, crop_box, random_crop
from mpp.data.decoding.decode import decode
from mpp.data.decoding.pictures import to_ppm
from mpp.errors import UnreadableImage
from mpp.models.descriptions import timm_crop_pct
from mpp.runtime.randomness import Stream, random_words

LIMIT = ImagesConfig(max_pixels=10**6)
RGB = picture()


def seen(data: bytes) -> np.ndarray:
    return decode(data, LIMIT).permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_are_exact(format):
    assert (seen(encoded(RGB, format)) == RGB).all()


@pytest.mark.parametrize(("format", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"quality": 95})])
def test_lossy_formats_are_close(format, options):
    assert abs(seen(encoded(RGB, format, **options)) - RGB).mean() < 3


def test_cmyk_jpeg_is_close():
    assert abs(seen(encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95)) - RGB).mean() < 3


def test_animated_gif_is_its_first_frame():
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (200, 10)]
    result = seen(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert result.shape == (8, 8, 3) and (result == 200).all()


def test_palette_with_a_transparent_entry_lies_on_white():
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert seen(encoded(image, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_is_grey_in_all_channels(mode):
    grey = np.array([[0, 255], [255, 0]], np.uint8)
    assert (seen(encoded(Image.fromarray(grey).convert(mode))) == grey[..., None]).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(format):
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    result = decode(encoded(Image.fromarray(grey), format), LIMIT)
    assert result.dtype == torch.float32 and torch.allclose(result[:, 0], torch.tensor([0, 1, 127.50195, 255]))


def png_16_bit_rgb(pixels: np.ndarray) -> bytes:
    """A PNG that PIL cannot write: 16 bits a channel, (H, W, 3)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_16_bit_rgb_is_scaled_not_clipped():
    result = decode(png_16_bit_rgb(np.array([[[0, 32768, 65535], [257, 514, 60000]]])), LIMIT)
    expected = torch.tensor([[[0, 127.50195, 255], [1, 2, 60000 / 257]]]).permute(2, 0, 1)
    assert result.dtype == torch.float32 and torch.allclose(result, expected)


@pytest.mark.parametrize("alpha", [1, 128, 255])
def test_alpha_is_laid_on_white(alpha):
    pixel = np.array([[[200, 100, 0, alpha]]], np.uint8)
    expected = (pixel[0, 0, :3].astype(float) * alpha + 255 * (255 - alpha)) / 255
    assert abs(seen(encoded(pixel))[0, 0] - expected).max() <= 1


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format, orientation):
    corners = np.kron(np.array([[0, 80], [160, 240]], np.uint8), np.ones((16, 24), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: np.transpose,
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).T,
        8: np.rot90,
    }[orientation](corners)
    result = seen(encoded(corners, format, exif=exif))[..., 0]
    assert result.shape == upright.shape
    assert abs(result - upright.astype(int)).mean() < 6


JPEG = encoded(RGB, "JPEG")


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", JPEG[: len(JPEG) // 2], encoded(RGB)[:60], JPEG[:20] + bytes(len(JPEG) - 20)],
    ids=["empty", "text", "truncated jpeg", "truncated png", "zeros"],
)
def test_broken_files_are_named_as_such(data):
    with pytest.raises(UnreadableImage):
        decode(data, LIMIT)


def test_a_bomb_is_refused_from_its_header():
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = bytearray(png_16_bit_rgb(np.zeros((1, 1, 3))))
    bomb[16:29] = header
    bomb[29:33] = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(UnreadableImage, match="60000"):
        decode(bytes(bomb), LIMIT)
    with pytest.raises(UnreadableImage, match=r"more than data\.max_pixels"):
        decode(JPEG, ImagesConfig(max_pixels=100))
    with pytest.raises(UnreadableImage, match=r"^(?!.*Bomb)"):  # who allows more is not stopped by PIL's own limit
        decode(bytes(bomb), ImagesConfig(max_pixels=10**10))


def test_plain_pixels_are_read_as_they_are():
    pixels = torch.from_numpy(RGB).permute(2, 0, 1)
    data = to_ppm(pixels)
    assert torch.equal(decode(data, LIMIT), pixels) and encoded(RGB, "PPM") == data
    assert torch.equal(decode(data.replace(b"P6\n", b"P6\n# a comment\n"), LIMIT), pixels)  # by PIL
    for broken in (data[:-1], b"P6\n0 0\n255\n", b"P6\n" + b"9" * 5000 + b" 1\n255\n"):
        with pytest.raises(UnreadableImage):
            decode(broken, LIMIT)
    with pytest.raises(UnreadableImage, match=r"60000 x 60000 pixels are more than data\.max_pixels"):
        decode(b"P6\n60000 60000\n255\n", LIMIT)


def test_crop_areas_and_ratios_are_torchvisions():
    config, generator = DataConfig(crop_area=(0.2, 0.9)), np.random.default_rng(0)
    ours = np.array([crop_box(60, 90, config, generator.random(40).tolist()) for _ in range(4000)])
    torch.manual_seed(0)
    image = torch.zeros(3, 60, 90)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 0.9], [0.75, 4 / 3]) for _ in range(4000)])
    for column in range(4):  # top, left, height, width
        spread = theirs[:, column].std() / 4000**0.5
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) < 6 * spread
        assert abs(ours[:, column].std() / theirs[:, column].std() - 1) < 0.05


def test_a_ratio_that_never_fits_gives_the_centre():
    assert crop_box(100, 10, DataConfig(crop_area=(1.0, 1.0)), [0.5] * 40) == (43, 0, 13, 10)


def test_crop_is_the_resized_box_and_perhaps_flipped():
    image = decode(encoded(RGB), LIMIT)
    whole = DataConfig(crop_area=(1.0, 1.0), crop_ratio=(1.2, 1.2))  # the picture is 40 x 48
    plain = random_crop(image, 20, whole, 0, 0, 0), random_crop(image, 20, whole, 0, 0, 1)
    expected = np.array(Image.fromarray(RGB).resize((20, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    flips = [min(abs(p.numpy().astype(int) - e).max() for e in (expected, expected[..., ::-1])) for p in plain]
    assert max(flips) <= 1
    seen_both = {torch.equal(random_crop(image, 20, whole, 0, 0, i), plain[0]) for i in range(20)}
    assert seen_both == {True, False}


def test_centre_crop_is_the_centre():
    ramp = torch.arange(80, dtype=torch.uint8).expand(3, 40, 80)
    assert torch.equal(centre_crop(ramp, 40, 1.0), ramp[:, :, 20:60])
    assert centre_crop(ramp, 28, 0.875).shape == (3, 28, 28)
    assert centre_crop(torch.zeros(3, 1, 1, dtype=torch.uint8), 8, 0.875).shape == (3, 8, 8)


def views_of(pixels: np.ndarray, size: tuple[int, int], share: float, crop_pct: float):
    """The held-out view and what timm's transform makes of the same image, with the sizes to which they resize it."""
    sizes, resize = [], functional.resize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "resize", lambda image, to, **how: sizes.append(list(to)) or resize(image, to, **how))
        ours = centre_crop(torch.from_numpy(pixels).permute(2, 0, 1), size, share)
    as_it_is = dict(interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1))
    transform = create_transform((3, *size), crop_pct=crop_pct, is_training=False, **as_it_is)
    sizes.append([*reversed(transform.transforms[0](Image.fromarray(pixels)).size)])
    return ours, transform(Image.fromarray(pixels)) * 255, *sizes


def off_by(views, pixels: np.ndarray, resized: list[int], size: tuple[int, int]) -> float:
    """By how many of 255 levels views are off the crop of the image resized in floating point. PIL and torch round
    after each of the two sides, so each may be off by one, and the two by two from each other."""
    whole = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    exact = functional.center_crop(F.interpolate(whole, resized, mode="bilinear", antialias=True)[0], list(size))
    return max(float((view - exact).abs().max()) for view in views)


SHARES = st.sampled_from([0.875, 0.9, 0.95, 1.0]) | st.floats(0.25, 1.0)
IMAGE_SIZES = st.tuples(st.integers(30, 120), st.integers(30, 120))


def noise(size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 512), SHARES, IMAGE_SIZES)
@example(32, 0.875, (48, 64))  # timm makes 36 of 32 / 0.875, mpp 37
def test_timms_crop_is_the_held_out_view(side, share, image_size):
    pixels, crop_pct = noise(image_size), timm_crop_pct(side, share)
    ours, theirs, own_size, their_size = views_of(pixels, (side, side), share, crop_pct)
    assert own_size == their_size
    assert off_by((ours, theirs), pixels, own_size, (side, side)) <= 1.01
    assert torch.equal(centre_crop(torch.from_numpy(pixels).permute(2, 0, 1), side, crop_pct), ours)


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 24), st.integers(1, 24)), SHARES, IMAGE_SIZES)
@example((3, 5), 0.875, (48, 64))  # 27.4 x 45.7, which no crop_pct makes 27 x 46
@example((16, 24), 1.0, (128, 192))
@example((23, 2), 0.875, (100, 30))  # the two are two levels apart
def test_the_oblong_held_out_view_is_timms(patches, share, image_size):
    size = tuple(8 * side for side in patches)
    (height, width), proportion = image_size, patches[1] / patches[0]
    assume(
        1 / MAX_RELATIVE_ASPECT < width / height / proportion < MAX_RELATIVE_ASPECT
    )  # what is longer is cut before it is resized
    pixels = noise(image_size)
    ours, theirs, own_size, their_size = views_of(pixels, size, share, timm_crop_pct(size, share))
    assert own_size == their_size
    assert off_by((ours, theirs), pixels, own_size, size) <= 1.01


@given(st.integers(8, 512), st.floats(0.05, 1.0))
def test_the_crop_that_timm_gets_leaves_the_held_out_view_as_it_is(side, share):
    crop_pct, length = timm_crop_pct(side, share), resized_side(side, share)
    assert math.floor(side / crop_pct) == length == resized_side(side, crop_pct)
    assert (crop_pct == share) == (math.floor(side / share) == length)


@pytest.mark.parametrize("upright", [False, True])
def test_a_line_of_pixels_is_not_resized_to_gigabytes(monkeypatch, upright):
    line = torch.arange(64_000).remainder(251).to(torch.uint8).expand(3, 1, -1)
    turned = line.transpose(1, 2) if upright else line
    sizes, resize = [], functional.resize
    monkeypatch.setattr(functional, "resize", lambda *a, **k: sizes.append(resize(*a, **k).numel()) or resize(*a, **k))
    seen = centre_crop(turned, 32, 1.0)
    seen = seen.transpose(1, 2) if upright else seen
    assert sizes == [3 * 32 * 32 * 16]
    middle = line[:, :, 31_999:32_001]  # what 32 of 2,048,000 columns show
    assert middle.min() <= seen.min() and seen.max() <= middle.max()


def test_randaugment_is_torchvisions_and_a_function_of_the_sample():
    image = torch.from_numpy(RGB).permute(2, 0, 1)
    assert augment(image, 0, 0, 0, 0) is image
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = [augment(image, 9, 0, epoch, index) for epoch in range(2) for index in range(4)]
    assert torch.equal(torch.get_rng_state(), state)  # the model's dropout draws from it
    torch.manual_seed(4)
    again = [augment(image, 9, 0, epoch, index) for epoch in range(2) for index in range(4)]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert len({part.numpy().tobytes() for part in first}) > 5  # two operations each, now and then none
    number = int(random_words(Stream.AUGMENT, 0, 1, 2, 1)[0]) >> 1
    torch.manual_seed(number)
    assert torch.equal(first[6], RandAugment(magnitude=9)(image))
