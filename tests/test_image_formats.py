"""One property of all formats: whatever writes an image, its pixels are those that were written, upright."""

import io
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from conftest import each_of, encoded, picture
from dicom_files import described, dicom, file_of, in_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import (
    PNG_END,
    PNG_HEADER,
    decode_with,
    exif,
    j2k,
    npy,
    npz,
    packed_rows,
    packed_tiff,
    tiff,
    unreadable,
    with_chunk,
)
from PIL import Image
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
)

from mpp.config import ImagesConfig
from mpp.data.decoding.decode import read_mask, read_values
from mpp.data.decoding.formats import is_image, what_is
from mpp.errors import UnreadableImage

PNG_START = b"\x89PNG\r\n\x1a\n"
CODED = Path(__file__).parent / "coded"
UPRIGHT = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: np.rot90,
}
"""EXIF orientation -> the turn that it asks for."""


def png(pixels: np.ndarray, orientation: int) -> bytes:
    """A PNG with a chunk of EXIF behind its pixels."""
    return with_chunk(imagecodecs.png_encode(pixels), b"eXIf", exif(orientation), -PNG_END)


def tiff_of(**options):
    """A writer of TIFFs."""

    def write(pixels: np.ndarray, orientation: int) -> bytes:
        planar = {"planarconfig": "contig"} if pixels.ndim == 3 else {}
        about = {"photometric": "minisblack", "extratags": [(274, "H", 1, orientation, True)]}
        return tiff(pixels, **planar, **about, **options)

    return write


def webp(pixels: np.ndarray, orientation: int) -> bytes:
    return encoded(pixels, "WEBP", lossless=True, exact=True, exif=b"Exif\0\0" + exif(orientation))


def dicom_of(syntax, encode):
    """A writer of DICOM that is compressed."""
    return lambda pixels: dicom(pixels, [encode(pixels)], syntax)


def lossless_jpeg(pixels: np.ndarray) -> bytes:
    return imagecodecs.jpeg8_encode(pixels, lossless=True)


UNSIGNED, ALL_TYPES = "u1 u2", "u1 u2 u4 i1 i2 i4 f4 f8"
WRITERS = {  # name -> function, types of numbers, numbers of bands
    "png": (png, UNSIGNED, "134"),
    "tiff": (tiff_of(), ALL_TYPES, "12345"),
    "tiff, lzw": (tiff_of(compression="lzw", predictor=True), UNSIGNED, "135"),
    "tiff, tiles": (tiff_of(tile=(16, 16), bigtiff=True, byteorder=">"), ALL_TYPES, "135"),
    "webp": (webp, "u1", "34"),
    "bmp": (lambda pixels: encoded(pixels, "BMP"), "u1", "13"),
    "ppm": (lambda pixels: encoded(pixels, "PPM"), "u1", "13"),
    "npy": (npy, ALL_TYPES, "12345"),
    "npy, bands first": (lambda pixels: npy(np.moveaxis(pixels, -1, 0)), ALL_TYPES, "2345"),
    "npz": (npz, ALL_TYPES, "135"),
    "jxl": (lambda pixels: imagecodecs.jpegxl_encode(pixels, lossless=True), UNSIGNED, "134"),
    "jp2": (lambda pixels: imagecodecs.jpeg2k_encode(pixels, level=0), UNSIGNED, "1345"),
    "dicom": (dicom, "u1 u2 i2", "13"),
    "dicom, JPEG-LS": (dicom_of(JPEGLSLossless, imagecodecs.jpegls_encode), UNSIGNED, "13"),
    "dicom, JPEG 2000": (dicom_of(JPEG2000Lossless, j2k), UNSIGNED, "13"),
    "dicom, JPEG": (dicom_of(JPEGLosslessSV1, lossless_jpeg), "u1", "13"),
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 99))
def test_pixels_are_those_that_were_written(writer, data, seed):
    write, types, bands = WRITERS[writer]
    dtype, count = np.dtype(data.draw(st.sampled_from(types.split()))), int(data.draw(st.sampled_from(bands)))
    takes_orientation = writer.startswith(("png", "tiff", "webp"))
    orientation = data.draw(st.sampled_from([*UPRIGHT])) if takes_orientation else 1
    random = np.random.default_rng(seed)
    values = random.integers(-(2**15), 2**16, (19, 23, count)).astype(dtype)
    pixels = values if count > 1 else values[..., 0]
    file = write(pixels, orientation) if takes_orientation else write(pixels)
    bands_of_file = {"channels": count, "bands": tuple(range(1, count + 1))}
    expected = UPRIGHT[orientation](values).transpose(2, 0, 1)
    stored = read_values(file, ImagesConfig(**bands_of_file))
    assert stored.dtype == dtype and np.array_equal(stored, expected)
    assert is_image(file) != writer.startswith("np")
    has_limits = dtype.kind != "f" and dtype.itemsize <= 2
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if has_limits else (-1000.0, 30000.0)
    decoded = decode_with(file, **bands_of_file, range=None if has_limits else (low, high))
    assert decoded.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)
    scaled = np.clip((expected.astype(np.float64) - low) * 255 / (high - low), 0, 255)
    np.testing.assert_allclose(decoded, scaled, rtol=1e-5, atol=1e-4)
    if dtype.kind != "f" and count == 1 and what_is(file)[2:5] in ("PNG", "TIF", "BMP", "PPM", ".np"):
        np.testing.assert_array_equal(read_mask(file, ImagesConfig()), expected[0])
    if not has_limits:
        with unreadable(r"data\.range"):
            decode_with(file, **bands_of_file)


RGB = picture(0)  # 40 x 48
GREY = RGB[..., 0].copy()
OPACITY = np.dstack([RGB, np.linspace(0, 255, 40 * 48).reshape(40, 48).astype(np.uint8)])
AS_PNG = {
    "tiff": tiff,
    "webp": lambda pixels: encoded(pixels, "WEBP", lossless=True, exact=True),
    "jxl": lambda pixels: imagecodecs.jpegxl_encode(pixels, lossless=True),
    "avif": lambda pixels: imagecodecs.avif_encode(pixels, level=100, pixelformat="444"),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("writer", AS_PNG)
def test_pictures_of_8_bits_are_the_png_of_the_same_pixels(writer, channels):
    """Grey, and opacity that is laid on white, too."""
    for pixels in (RGB, OPACITY, GREY):
        decoded = decode_with(AS_PNG[writer](pixels), channels=channels)
        assert decoded.dtype == torch.uint8
        assert torch.equal(decoded, decode_with(encoded(pixels), channels=channels))
        if writer in ("tiff", "jxl"):
            deep = decode_with(AS_PNG[writer](pixels.astype(np.uint16) * 257), channels=channels)
            assert deep.dtype == torch.float32 and (deep - decoded).abs().max() <= 1


MODES = ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK")
NOT_WRITTEN = {"JPEG": 3, "BMP": 2, "PPM": 3, "PNG": 1, "GIF": 1, "WEBP": 0, "TIFF": 0}


@pytest.mark.parametrize("form", NOT_WRITTEN)
def test_every_mode_of_pil_is_a_picture(form):
    read = 0
    for mode in MODES:
        with suppress(OSError, KeyError, ValueError):  # it cannot be written
            data = encoded(Image.fromarray(RGB).convert(mode), form)
            read += 1
            assert is_image(data[:18])
            with Image.open(io.BytesIO(data)) as opened:
                expected = np.array(opened.convert("RGB")).astype(int)
            assert abs(decode_with(data).permute(1, 2, 0).numpy() - expected).mean() < 1, mode
    assert read == len(MODES) - NOT_WRITTEN[form]


def grey_png(bits: int, *transparent: int) -> bytes:
    """A grey PNG of 4 x 8 pixels with all numbers of its bits, one of which may be transparent."""
    file = PNG_START
    for kind, payload in (
        (b"IHDR", struct.pack(">IIBBBBB", 8, 4, bits, 0, 0, 0, 0)),
        *((b"tRNS", struct.pack(">H", number)) for number in transparent),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed_rows(numbers(bits), bits)))),
        (b"IEND", b""),
    ):
        file = with_chunk(file, kind, payload, len(file))
    return file


def numbers(bits: int) -> np.ndarray:
    return np.arange(32).reshape(4, 8) % 2**bits


def pgm(bits: int) -> bytes:
    values = numbers(bits).astype(np.uint8 if bits <= 8 else ">u2")
    return b"P5\n# 8 x 4\n8 4 %d\n" % (2**bits - 1) + values.tobytes()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
def test_masks_keep_the_numbers_of_any_bits_and_pictures_spread_them(bits):
    """Of a grey PNG one number may be transparent: it is white."""
    files = [pgm(bits)]
    files += [grey_png(bits)] if bits != 12 else []
    files += [packed_tiff(numbers(bits).astype(np.uint8), bits)] if bits <= 8 else []
    spread = numbers(bits) * (255 / (2**bits - 1))
    for file in files:
        assert np.array_equal(read_mask(file, ImagesConfig()), numbers(bits))
        assert np.allclose(decode_with(file, channels=1)[0], spread, rtol=1e-5)
    if bits > 8:
        decoded = decode_with(pgm(bits), channels=1, range=(0, 20))
        assert np.allclose(decoded[0], np.minimum(numbers(bits), 20) * (255 / 20), rtol=1e-5)
    for channels in (1, 3) if bits != 12 else ():
        decoded = decode_with(grey_png(bits, 1), channels=channels)[0]
        assert np.allclose(decoded, np.where(numbers(bits) == 1, 255, spread), rtol=1e-5)


NO_MASKS = {
    "JPEG": encoded(GREY, "JPEG"),
    "JPEG in a TIFF": tiff(GREY, compression="jpeg"),
    "colours": encoded(RGB),
    "bands": npy(RGB),
    "fractions": npy(np.zeros((4, 4), np.float32)),
}


@each_of("data", NO_MASKS)
def test_no_mask_of_changed_numbers(data):
    with unreadable("mask"):
        read_mask(data, ImagesConfig())


FRAMES = [Image.fromarray(picture(number)) for number in range(3)]
ANIMATIONS = {
    **{form: encoded(FRAMES[0], form, save_all=True, append_images=FRAMES[1:]) for form in ("PNG", "WEBP", "TIFF")},
    "JPEG XL": AS_PNG["jxl"](np.stack([RGB, 255 - RGB])),
    "AVIF": AS_PNG["avif"](np.stack([RGB, 255 - RGB])),
}


@each_of("data", ANIMATIONS)
def test_the_first_frame_counts(data):
    first = decode_with(data).permute(1, 2, 0).numpy()
    assert abs(first - RGB.astype(int)).mean() < 3


# --- files that are no images, broken ones, and bombs ---

STAND_INS = {
    "an empty file": b"",
    "a file of zeros": bytes(500),
    "an HTML file": b"\n<!DOCTYPE html>\n<html><svg /></html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00",
    "": b"P6 is a protein; BM and other words in a text",
}


@pytest.mark.parametrize("kind, data", STAND_INS.items(), ids=STAND_INS)
def test_files_that_are_no_images_are_named_by_their_kind(kind, data):
    assert what_is(data) == kind and not is_image(data)
    with unreadable(f"^{kind}"):
        decode_with(data)


def with_sides(data: bytes, start: bytes, skipped: int, side: int = 60_000) -> bytes:
    """A file whose header announces other sides."""
    at = data.index(start) + skipped
    return data[:at] + struct.pack(">II", side, side) + data[at + 8 :]


def tiff_of_large_tiles() -> bytes:
    """The same of the tiles of a TIFF of five bands."""
    tiles = dict(photometric="minisblack", planarconfig="contig", tile=(16, 16), compression="zlib")
    data = bytearray(tiff(np.zeros((40, 48, 5), np.uint16), **tiles))
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        for name in ("TileWidth", "TileLength"):
            place = file.pages[0].tags[name].valueoffset
            data[place : place + 4] = (60_000).to_bytes(4, "little")
    return bytes(data)


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    return file.getvalue()


def array_header(description: bytes) -> bytes:
    return b"\x93NUMPY\x01\0v\0" + description.ljust(117) + b"\n"


LARGE_PNG = with_chunk(b"", b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0), 0)
REFUSED = {  # kind -> file, what the line says
    "npy, a bomb": (
        array_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (90000, 90000, 5)}"),
        r"90000 x 90000 x 5 .*data\.max_pixels",
    ),
    "npz, a bomb": (
        zipped(array_header(b"{'descr': '<u2', 'fortran_order': False, 'shape': (5000, 5000, 5)}") + bytes(10**7)),
        "cannot be decoded",
    ),
    "npy, objects": (npy(np.array([[print]], object)), "object values"),
    "npy, four dimensions": (npy(RGB[None]), r"shape \(1, 40, 48, 3\)"),
    "npy, not finite": (npy(np.full((4, 4, 3), np.nan, np.float32)), "not finite.*data.nodata"),
    "npy, a name": (b"\x93NUMPY\x01\0\x0a\0Doe^John x", "^a .npy file"),
    "npz, several": (npz(RGB, RGB), "2 arrays"),
    "png, a bomb": (PNG_START + LARGE_PNG + encoded(RGB)[PNG_HEADER:], "max_pixels"),
    "jpeg, half": (encoded(RGB, "JPEG")[:700], "^a JPEG file that cannot be decoded: [^/]+$"),
    "tiff, a bomb in a tile": (
        tiff_of_large_tiles(),
        "60000 x 60000 x 5 pixels are more",
    ),
    "avif, a bomb": (with_sides((CODED / "rgb_8.avif").read_bytes(), b"ispe", 8, 15_000), "max_pixels|be read"),
    "jp2, a bomb": (with_sides(imagecodecs.jpeg2k_encode(RGB, level=0), b"\xff\x4f\xff\x51", 8), "max_pixels"),
    "ppm, a bomb": (b"P6\n60000 60000\n255\n", "max_pixels"),
    "pgm, a name": (b"P5\n# \nDoe^John 2\n255\n", "^a PPM file"),
    "jpeg of 12 bits": (imagecodecs.jpeg8_encode(GREY.astype(np.uint16), bitspersample=12), "of 12 bits; convert it"),
    "jpeg, lossless": (lossless_jpeg(GREY), "^a lossless JPEG file; convert it"),
    "dicom, a report": (file_of(described((4, 4))), "report"),
    "dicom, many frames": (dicom(GREY, NumberOfFrames=2000000), "max_pixels"),
    "dicom, frames in colour": (dicom(RGB, NumberOfFrames=2, PixelData=2 * RGB.tobytes()), "of 2 frames"),
    "dicom, large JPEG": (dicom(GREY[:10], [imagecodecs.jpeg8_encode(GREY)], JPEGBaseline8Bit), "^a DICOM file"),
    "dicom, a scale of 0": (dicom(GREY, RescaleSlope=0, RescaleIntercept=3), "rescale slope"),
    "dicom, a table of units": (dicom(GREY, ModalityLUTSequence=in_groups(LUTExplanation="HU")), "units in a table"),
    "dicom, high bits": (dicom(GREY.astype(np.uint16), BitsStored=12, HighBit=15), "bits"),
    "dicom, deflated": (dicom(GREY, syntax=DeflatedExplicitVRLittleEndian), "deflated"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_broken_files_and_bombs_are_named_and_not_quoted(kind):
    data, words = REFUSED[kind]
    with unreadable(words) as error:
        decode_with(data)
    assert "Doe" not in str(error.value)
    if not kind.startswith("jpeg"):
        with unreadable():
            decode_with(data, bands=(1,), channels=1)


WHOLE = {
    **{form: encoded(RGB, form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM")},
    **{"TIFF": tiff(RGB), ".npy": npy(RGB), ".npz": npz(RGB), "DICOM": dicom(RGB)},
    **{end: (CODED / f"rgb_8.{end}").read_bytes() for end in ("heic", "avif", "jxl", "j2k", "jp2")},
}


of_whole_files = each_of("whole", WHOLE)


@of_whole_files
def test_the_largest_number_of_pixels_is_that_of_the_setting(whole):
    decoded = decode_with(whole)
    pixels = decoded[0].numel()
    assert torch.equal(decode_with(whole, max_pixels=pixels), decoded)
    with unreadable(rf"pixels are more than data.max_pixels \({pixels - 1}\)"):
        decode_with(whole, max_pixels=pixels - 1)


PLACES = st.integers(20, 10**6)


@of_whole_files
@settings(max_examples=60)
@given(length=PLACES, changes=st.lists(st.tuples(PLACES, st.integers(0, 255)), max_size=4))
def test_no_damaged_file_ends_a_run(whole, length, changes):
    data = bytearray(whole[: 20 + length % (len(whole) - 20)])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        decoded = decode_with(bytes(data))
    except UnreadableImage as error:
        assert "\n" not in str(error) and "<_io" not in str(error)
    else:
        assert len(decoded) == 3


def test_errors_of_ours_are_no_damaged_files(monkeypatch):
    monkeypatch.setattr("mpp.data.decoding.channels.select_channels", None)
    with pytest.raises(TypeError):
        decode_with(encoded(RGB))


def test_the_package_of_a_missing_decoder_is_named(without_module):
    without_module("pydicom")
    with unreadable("^DICOM files need pydicom: pip install pydicom$"):
        decode_with(WHOLE["DICOM"])
