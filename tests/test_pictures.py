"""Image files of every kind become RGB; broken ones and bombs are named."""

import struct
import zlib

import numpy as np
import pytest
import torch
from conftest import encoded, picture
from PIL import Image

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import decode
from mpp.data.decoding.pictures import to_ppm
from mpp.errors import UnreadableImage

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
