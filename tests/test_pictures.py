"""Image files of every kind become RGB; broken ones and bombs are named."""

import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import encoded, picture
from PIL import ExifTags, Image

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.data.decoding.pictures import to_ppm
from mpp.errors import UnreadableImage

LIMIT = ImagesConfig(max_pixels=10**6)
RGB = picture()
JPEG = encoded(RGB, "JPEG")


def seen(data: bytes) -> np.ndarray:
    """Decoded pixels (H, W, 3)."""
    return decode(data, LIMIT).permute(1, 2, 0).numpy().astype(int)


def assert_close_to_rgb(data: bytes) -> None:
    assert abs(seen(data) - RGB).mean() < 3


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_are_exact(format):
    assert (seen(encoded(RGB, format)) == RGB).all()


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_lossy_formats_are_close(format):
    assert_close_to_rgb(encoded(RGB, format, quality=95))


def test_cmyk_jpeg_is_close():
    cmyk = Image.fromarray(RGB).convert("CMYK")
    assert_close_to_rgb(encoded(cmyk, "JPEG", quality=95))


def test_animated_gif_is_its_first_frame():
    bright = Image.new("RGB", (8, 8), (200, 200, 200))
    dark = Image.new("RGB", (8, 8), (10, 10, 10))
    result = seen(encoded(bright, "GIF", save_all=True, append_images=[dark]))
    assert result.shape == (8, 8, 3)
    assert (result == 200).all()


def test_palette_with_a_transparent_entry_lies_on_white():
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert seen(encoded(image, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_is_grey_in_all_channels(mode):
    grey = np.array([[0, 255], [255, 0]], np.uint8)
    result = seen(encoded(Image.fromarray(grey).convert(mode)))
    assert (result == grey[..., None]).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(format):
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    result = decode(encoded(Image.fromarray(grey), format), LIMIT)
    assert result.dtype == torch.float32
    assert torch.allclose(result[:, 0], torch.tensor([0, 1, 127.50195, 255]))


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def png_16_bit_rgb(pixels: np.ndarray, width: int, height: int) -> bytes:
    """A PNG that PIL cannot write: 16 bits a channel, (H, W, 3), with any width and height in its header."""
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_16_bit_rgb_is_scaled_not_clipped():
    pixels = np.array([[[0, 32768, 65535], [257, 514, 60000]]])
    result = decode(png_16_bit_rgb(pixels, width=2, height=1), LIMIT)
    expected = torch.tensor([[[0, 127.50195, 255], [1, 2, 60000 / 257]]]).permute(2, 0, 1)
    assert result.dtype == torch.float32
    assert torch.allclose(result, expected)


@pytest.mark.parametrize("alpha", [1, 128, 255])
def test_alpha_is_laid_on_white(alpha):
    color = np.array([200, 100, 0])
    pixel = np.array([[[*color, alpha]]], np.uint8)
    expected = (color * alpha + 255 * (255 - alpha)) / 255
    assert abs(seen(encoded(pixel))[0, 0] - expected).max() <= 1


UPRIGHT = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).T,
    8: np.rot90,
}
"""EXIF orientation -> the turn that it asks for."""


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_is_applied(format, orientation):
    corners = np.kron(np.array([[0, 80], [160, 240]], np.uint8), np.ones((16, 24), np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    result = seen(encoded(corners, format, exif=exif))[..., 0]
    expected = UPRIGHT[orientation](corners)
    assert result.shape == expected.shape
    assert abs(result - expected).mean() < 6


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not an image", id="text"),
        pytest.param(JPEG[: len(JPEG) // 2], id="truncated jpeg"),
        pytest.param(encoded(RGB)[:60], id="truncated png"),
        pytest.param(JPEG[:20] + bytes(len(JPEG) - 20), id="zeros"),
    ],
)
def test_broken_files_are_named_as_such(data):
    with pytest.raises(UnreadableImage):
        decode(data, LIMIT)


def test_a_bomb_is_refused_from_its_header():
    bomb = png_16_bit_rgb(np.zeros((1, 1, 3)), width=60_000, height=60_000)
    with pytest.raises(UnreadableImage, match="60000"):
        decode(bomb, LIMIT)
    with pytest.raises(UnreadableImage, match=r"more than data\.max_pixels"):
        decode(JPEG, ImagesConfig(max_pixels=100))
    with pytest.raises(UnreadableImage, match=r"^(?!.*Bomb)"):  # a larger setting lifts PIL's own limit, too
        decode(bomb, ImagesConfig(max_pixels=10**10))


def test_plain_pixels_are_read_as_they_are():
    pixels = torch.from_numpy(RGB).permute(2, 0, 1)
    data = to_ppm(pixels)
    assert encoded(RGB, "PPM") == data
    assert torch.equal(decode(data, LIMIT), pixels)
    commented = data.replace(b"P6\n", b"P6\n# a comment\n")  # read by PIL
    assert torch.equal(decode(commented, LIMIT), pixels)
    for broken in (data[:-1], b"P6\n0 0\n255\n", b"P6\n" + b"9" * 5000 + b" 1\n255\n"):
        with pytest.raises(UnreadableImage):
            decode(broken, LIMIT)
    with pytest.raises(UnreadableImage, match=r"60000 x 60000 pixels are more than data\.max_pixels"):
        decode(b"P6\n60000 60000\n255\n", LIMIT)
