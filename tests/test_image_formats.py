"""One property of all formats: whatever writes an image, its pixels are those that were written, upright."""

import io
import struct
import zipfile
import zlib

import imagecodecs
import numpy as np
import pytest
import torch
from conftest import encoded, picture
from dicom_files import described, dicom, file_of
from hypothesis import assume, given
from hypothesis import strategies as st
from image_files import decode_with, npy, npz, packed_tiff, tiff
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
    payload = b"eXIfII*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)
    whole = imagecodecs.png_encode(pixels)
    chunk = struct.pack(">I", len(payload) - 4) + payload + struct.pack(">I", zlib.crc32(payload))
    return whole[:-12] + chunk + whole[-12:]


def tiff_of(**options):
    """A writer of TIFFs."""

    def write(pixels: np.ndarray, orientation: int) -> bytes:
        planar = {"planarconfig": "contig"} if pixels.ndim == 3 else {}
        about = {"photometric": "minisblack", "extratags": [(274, "H", 1, orientation, True)]}
        return tiff(pixels, **planar, **about, **options)

    return write


def webp(pixels: np.ndarray, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(pixels, "WEBP", lossless=True, exact=True, exif=exif)


def dicom_of(syntax=None, encode=None):
    """A writer of DICOM: colours, or frames."""

    def write(pixels: np.ndarray, _: int) -> bytes:
        assume(pixels.ndim == 2 or pixels.shape[2] == 3)
        return dicom(pixels, [encode(pixels)], syntax) if encode else dicom(pixels)

    return write


def jpeg_2000(pixels: np.ndarray) -> bytes:
    return imagecodecs.jpeg2k_encode(pixels, codecformat="j2k", reversible=True)


UNSIGNED, ALL_TYPES = ["u1", "u2"], ["u1", "u2", "u4", "i1", "i2", "i4", "f4", "f8"]
WRITERS = {  # name -> function, types of numbers, bands, whether it has orientations
    "png": (png, UNSIGNED, [1, 3, 4], True),
    "tiff": (tiff_of(), ALL_TYPES, [1, 2, 3, 4, 5], True),
    "tiff, lzw": (tiff_of(compression="lzw"), ALL_TYPES, [1, 3, 5], True),
    "tiff, tiles": (tiff_of(tile=(16, 16), bigtiff=True, byteorder=">"), ALL_TYPES, [1, 3, 5], True),
    "webp": (webp, ["u1"], [3, 4], True),
    "bmp": (lambda pixels, _: encoded(pixels, "BMP"), ["u1"], [1, 3], False),
    "ppm": (lambda pixels, _: encoded(pixels, "PPM"), ["u1"], [1, 3], False),
    "npy": (lambda pixels, _: npy(pixels), ALL_TYPES, [1, 2, 3, 4, 5], False),
    "npy, bands first": (lambda pixels, _: npy(np.moveaxis(pixels, -1, 0)), ALL_TYPES, [2, 3, 4, 5], False),
    "npz": (lambda pixels, _: npz(pixels), ALL_TYPES, [1, 3, 5], False),
    "jxl": (lambda pixels, _: imagecodecs.jpegxl_encode(pixels, lossless=True), UNSIGNED, [1, 3, 4], False),
    "jp2": (lambda pixels, _: imagecodecs.jpeg2k_encode(pixels, level=0), UNSIGNED, [1, 3, 4, 5], False),
    "dicom": (dicom_of(), ["u1", "u2", "i2"], [1, 3], False),
    "dicom, JPEG-LS": (dicom_of(JPEGLSLossless, imagecodecs.jpegls_encode), UNSIGNED, [1, 3], False),
    "dicom, JPEG 2000": (dicom_of(JPEG2000Lossless, jpeg_2000), ["u1"], [1, 3], False),
    "dicom, JPEG": (
        dicom_of(JPEGLosslessSV1, lambda pixels: imagecodecs.jpeg8_encode(pixels, lossless=True)),
        ["u1"],
        [1, 3],
        False,
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
@given(data=st.data(), seed=st.integers(0, 99))
def test_pixels_are_those_that_were_written(writer, data, seed):
    write, types, bands, has_orientations = WRITERS[writer]
    dtype, count = np.dtype(data.draw(st.sampled_from(types))), data.draw(st.sampled_from(bands))
    orientation = data.draw(st.sampled_from([*UPRIGHT])) if has_orientations else 1
    random = np.random.default_rng(seed)
    values = random.integers(-(2**15), 2**16, (19, 23, count)).astype(dtype)
    file = write(values if count > 1 else values[..., 0], orientation)
    settings = {"channels": count, "bands": tuple(range(1, count + 1))}
    expected = UPRIGHT[orientation](values).transpose(2, 0, 1)
    stored = read_values(file, ImagesConfig(**settings))
    assert stored.dtype == dtype and np.array_equal(stored, expected)
    assert is_image(file) != writer.startswith("np")
    has_limits = dtype.kind != "f" and dtype.itemsize <= 2
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if has_limits else (-1000.0, 30000.0)
    decoded = decode_with(file, **settings, **({} if has_limits else {"range": (low, high)}))
    assert decoded.dtype == (torch.uint8 if dtype == np.uint8 else torch.float32)
    scaled = np.clip((expected.astype(np.float64) - low) * 255 / (high - low), 0, 255)
    np.testing.assert_allclose(decoded, scaled, rtol=1e-5, atol=1e-4)
    if dtype.kind != "f" and count == 1 and what_is(file)[2:5] in ("PNG", "TIF", "BMP", "PPM", ".np"):
        np.testing.assert_array_equal(read_mask(file, ImagesConfig()), expected[0])
    if not has_limits:
        with pytest.raises(UnreadableImage, match=r"data\.range"):
            decode_with(file, **settings)


RGB = picture(0)  # 40 x 48
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
    for pixels in (RGB, OPACITY, RGB[..., 0].copy()):
        decoded = decode_with(AS_PNG[writer](pixels), channels=channels)
        assert decoded.dtype == torch.uint8
        assert torch.equal(decoded, decode_with(encoded(pixels), channels=channels))
        if writer in ("tiff", "jxl"):
            deep = decode_with(AS_PNG[writer](pixels.astype(np.uint16) * 257), channels=channels)
            assert deep.dtype == torch.float32 and (deep - decoded).abs().max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_mode_of_pil_is_a_picture(form, mode):
    image = Image.fromarray(RGB).convert(mode)
    try:
        data = encoded(image, form)
    except (OSError, KeyError, ValueError):
        pytest.skip("PIL writes no such file")
    assert is_image(data[:18])
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.array(opened.convert("RGB")).astype(int)
    assert abs(decode_with(data).permute(1, 2, 0).numpy() - expected).mean() < 1


def grey_png(bits: int, *transparent: int) -> bytes:
    """A grey PNG of 4 x 8 pixels with all numbers of its bits, one of which may be transparent."""
    digits = np.unpackbits(numbers(bits).astype(">u2")[..., None].view(np.uint8), axis=2)
    rows = np.packbits(digits[..., -bits:].reshape(4, -1), axis=1)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 4, bits, 0, 0, 0, 0))]
    chunks += [(b"tRNS", struct.pack(">H", number)) for number in transparent]
    chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def numbers(bits: int) -> np.ndarray:
    return np.arange(32).reshape(4, 8) % 2**bits


def pgm(bits: int) -> bytes:
    values = numbers(bits).astype(np.uint8 if bits <= 8 else ">u2")
    return b"P5\n# 8 x 4\n8 4 %d\n" % (2**bits - 1) + values.tobytes()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
def test_masks_keep_the_numbers_of_any_bits(bits):
    files = [pgm(bits)]
    files += [grey_png(bits)] if bits != 12 else []
    files += [packed_tiff(numbers(bits).astype(np.uint8), bits)] if bits <= 8 else []
    for file in files:
        assert np.array_equal(read_mask(file, ImagesConfig()), numbers(bits))
        assert np.allclose(decode_with(file, channels=1)[0], numbers(bits) * (255 / (2**bits - 1)), rtol=1e-5)
    if bits > 8:
        decoded = decode_with(pgm(bits), channels=1, range=(0, 20))
        assert np.allclose(decoded[0], np.minimum(numbers(bits), 20) * (255 / 20), rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_transparent_number_of_a_grey_png_is_white(bits, channels):
    decoded = decode_with(grey_png(bits, 1), channels=channels)[0]
    assert np.allclose(decoded, np.where(numbers(bits) == 1, 255, numbers(bits) * (255 / (2**bits - 1))), rtol=1e-5)


RARE_JPEGS = {
    "of 12 bits": imagecodecs.jpeg8_encode(RGB[..., 0].astype(np.uint16), bitspersample=12),
    "a lossless JPEG": imagecodecs.jpeg8_encode(RGB[..., 0].copy(), lossless=True),
    "a lossless JPEG of 16 bits": imagecodecs.ljpeg_encode(RGB[..., 0].astype(np.uint16)),
    "a JPEG-LS": imagecodecs.jpegls_encode(RGB),
}


@pytest.mark.parametrize("kind", RARE_JPEGS)
def test_rare_kinds_of_jpeg_are_named(kind):
    with pytest.raises(UnreadableImage, match=f"{kind.removesuffix(' of 16 bits')}.*; convert it"):
        decode_with(RARE_JPEGS[kind])


LOSSY = {
    "jpeg": encoded(RGB[..., 0], "JPEG"),
    "tiff": tiff(RGB[..., 0], compression="jpeg"),
    "webp": encoded(RGB, "WEBP"),
    "avif": AS_PNG["avif"](RGB),
    "jp2": imagecodecs.jpeg2k_encode(RGB[..., 0].copy(), level=0),
    "jxl": AS_PNG["jxl"](RGB[..., 0].copy()),
    "colours": encoded(RGB),
    "fractions": npy(np.zeros((4, 4), np.float32)),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_no_mask_of_changed_numbers(kind):
    with pytest.raises(UnreadableImage, match="mask"):
        read_mask(LOSSY[kind], ImagesConfig())


def animation(form: str) -> bytes:
    first, *others = (Image.fromarray(picture(number)) for number in range(3))
    return encoded(first, form, save_all=True, append_images=others)


@pytest.mark.parametrize(
    "image",
    [
        *(animation(form) for form in ("GIF", "PNG", "WEBP", "TIFF")),
        tiff(np.stack([RGB, picture(3)]), photometric="rgb"),
        tiff(RGB.transpose(2, 0, 1), imagej=True, metadata={"axes": "CYX"}),
    ],
)
def test_the_first_frame_counts(image):
    first = decode_with(image).permute(1, 2, 0).numpy()
    assert abs(first - RGB.astype(int)).mean() < 3 or form_of_palette(image)


def form_of_palette(image: bytes) -> bool:
    return image[:3] == b"GIF"


# files that are no images, broken ones, and bombs ---------------------------------------------------------------------

STAND_INS = {
    "an empty file": b"",
    "a file of zeros": bytes(500),
    "an HTML file": b"\n<!DOCTYPE html>\n<html><svg /></html>",
    "an XML file": b'\xef\xbb\xbf<?xml version="1.0"?>\n<Error>',
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00",
    "": b"P6 is a protein; BM and other words in a text",
}


@pytest.mark.parametrize("kind", STAND_INS)
def test_files_that_are_no_images_are_named_by_their_kind(kind):
    assert what_is(STAND_INS[kind]) == kind and not is_image(STAND_INS[kind])
    with pytest.raises(UnreadableImage, match=f"^{kind}"):
        decode_with(STAND_INS[kind])


HUGE = (
    b"\x93NUMPY\x01\0v\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (90000, 90000, 5)}".ljust(117) + b"\n"
)
GREY = RGB[..., 0].copy()


def with_sides(data: bytes, start: bytes, skipped: int, count: int = 1) -> bytes:
    """A file whose header announces 60,000 x 60,000 pixels."""
    at = data.index(start) + skipped
    return data[:at] + struct.pack(">II", 60_000, 60_000) + data[at + 8 :]


def damaged_lzma() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy(RGB))
    data = bytearray(file.getvalue())
    data[60:90] = bytes(30)
    return bytes(data)


BROKEN = {
    "npy, a bomb": HUGE,
    "npy, objects": npy(np.array([[print]], object)),
    "npy, text": npy(np.full((4, 4, 3), "a")),
    "npy, four dimensions": npy(RGB[None]),
    "npy, empty": npy(RGB[:0]),
    "npy, not finite": npy(np.full((4, 4, 3), np.nan, np.float32)),
    "npz, several": npz(RGB, RGB),
    "png, a bomb": with_sides(encoded(RGB), b"IHDR", 4),
    "jp2, a bomb": with_sides(imagecodecs.jpeg2k_encode(RGB, level=0), b"\xff\x4f\xff\x51", 8),
    "jxl, a bomb": b"\xff\x0a" + (0b11 << 1 | (2**30 - 1) << 3 | 1 << 33 | 1 << 36).to_bytes(40, "little"),
    "ppm, a bomb": b"P6\n60000 60000\n255\n",
    "ppm, no pixels": b"P6\n0 0\n255\n",
    "ppm, many digits": b"P6\n" + b"9" * 5000 + b" 1\n255\n",
    "dicom, a report": file_of(described((4, 4))),
    "dicom, no rows": dicom(GREY, Rows=0),
    "dicom, a bomb": dicom(GREY, Rows=60000, Columns=60000),
    "dicom, many frames": dicom(GREY, NumberOfFrames=2000000),
    "dicom, more rows than pixels": dicom(GREY, Rows=41),
    "dicom, frames in colour": dicom(RGB, NumberOfFrames=2, PixelData=2 * RGB.tobytes()),
    "dicom, large JPEG": dicom(GREY[:10], [imagecodecs.jpeg8_encode(GREY)], JPEGBaseline8Bit),
    "dicom, large JPEG-LS": dicom(GREY[:10], [imagecodecs.jpegls_encode(GREY)], JPEGLSLossless),
    "dicom, large JPEG 2000": dicom(GREY[:10], [imagecodecs.jpeg2k_encode(GREY, codecformat="j2k")], JPEG2000Lossless),
    "npz, damaged LZMA": damaged_lzma(),
    "dicom, no JPEG": dicom(GREY, [b"\xff\xd8 no frame"], JPEGLSLossless),
    "dicom, a scale of 0": dicom(GREY, RescaleSlope=0, RescaleIntercept=3),
    "dicom, half a scale": dicom(GREY, RescaleSlope=2),
    "dicom, high bits": dicom(GREY.astype(np.uint16), BitsStored=12, HighBit=15),
    "dicom, deflated": dicom(GREY, syntax=DeflatedExplicitVRLittleEndian),
    "dicom, an unknown syntax": dicom(GREY).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("settings", [{}, {"bands": (1,), "channels": 1}])
def test_broken_files_and_bombs_are_named(kind, settings):
    with pytest.raises(UnreadableImage) as error:
        decode_with(BROKEN[kind], **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"\x93NUMPY\x01\0\x0a\0Doe^John x", b"P5\n# \nDoe^John 2\n255\n"])
def test_messages_do_not_quote_a_file(data):
    with pytest.raises(UnreadableImage) as error:
        decode_with(data)
    assert "Doe" not in str(error.value)


@pytest.mark.parametrize(
    "writer", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "JPEG2000", *AS_PNG, "npy", "npz", "dicom"]
)
@given(
    length=st.integers(20, 10**6), changes=st.lists(st.tuples(st.integers(20, 10**6), st.integers(0, 255)), max_size=4)
)
def test_no_damaged_file_ends_a_run(writer, length, changes):
    others = {"npy": npy, "npz": npz, "dicom": dicom} | AS_PNG
    whole = others[writer](RGB) if writer in others else encoded(RGB, writer)
    data = bytearray(whole[: 20 + length % (len(whole) - 20)])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        decoded = decode_with(bytes(data))
    except UnreadableImage as error:
        assert "\n" not in str(error) and "<_io" not in str(error)
    else:
        assert len(decoded) == 3


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_the_cause_is_in_the_message(form):
    data = encoded(RGB.repeat(4, 0), form)
    with pytest.raises(UnreadableImage, match=f"^a {form} file that cannot be decoded: [^/]+$"):
        decode_with(data[: len(data) // 2])


def test_errors_of_ours_are_no_damaged_files(monkeypatch):
    monkeypatch.setattr("mpp.data.decoding.channels.select_channels", None)
    with pytest.raises(TypeError):
        decode_with(encoded(RGB))


@pytest.mark.parametrize("kind, package", [("heic", "pi-heif"), ("dicom", "pydicom")])
def test_the_package_of_a_missing_decoder_is_named(kind, package, without_module):
    head = b"\0\0\0\x18ftypheic" + bytes(9) if kind == "heic" else dicom(GREY)
    without_module(package.replace("-", "_"))
    with pytest.raises(UnreadableImage, match=f"pip install {package}"):
        decode_with(head)


def test_plain_pixels_are_read_as_they_are():
    pixels = torch.from_numpy(RGB).permute(2, 0, 1)
    data = encoded(RGB, "PPM")
    for file in (data, data.replace(b"P6\n", b"P6\n# a comment\n")):
        assert torch.equal(decode_with(file), pixels)


def test_the_largest_number_of_pixels_is_that_of_the_setting():
    for file in (
        encoded(RGB),
        encoded(RGB, "JPEG"),
        tiff(RGB),
        npy(RGB),
        encoded(RGB, "PPM"),
    ):
        with pytest.raises(UnreadableImage, match=r"data\.max_pixels"):
            decode_with(file, max_pixels=1000)
