"""`mpp prepare` writes pixels alone: no EXIF with a place, no comment, no preview, no tag of a scan."""

import io

import numpy as np
import pytest
from conftest import encoded, picture
from dicom_files import SECRETS, dicom
from image_files import npy, tiff
from PIL import Image, PngImagePlugin

from mpp.config import ImagesConfig, PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.data.decoding.metadata import has_metadata
from mpp.prepare import prepare_image

SECRET = "Mustermann, Hauptstr. 5"
RGB = picture(0)
CAMERA_OWNER, GPS_FOLDER, LATITUDE, DESCRIPTION, ORIENTATION = 0xA430, 0x8825, 2, 270, 274


def exif(orientation: int = 1) -> Image.Exif:
    """EXIF with an owner and a place."""
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    tags[DESCRIPTION] = SECRET
    tags.get_ifd(GPS_FOLDER)[LATITUDE] = (47.0, 11.0, 8.15)
    return tags


def png_text() -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("dpi", SECRET)
    return text


def private_chunk() -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    chunks.add(b"naMe", SECRET.encode())
    return chunks


def segment(marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment."""
    whole = encoded(RGB, "JPEG")
    return whole[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + whole[2:]


TELLING = {
    "JPEG, EXIF": encoded(RGB, "JPEG", exif=exif()),
    "JPEG, turned": encoded(RGB, "JPEG", exif=exif(6)),
    "JPEG, comment": encoded(RGB, "JPEG", comment=SECRET),
    "JPEG, XMP": segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET.encode()),
    "JPEG, Photoshop": segment(0xED, b"Photoshop 3.0\0" + SECRET.encode()),
    "JPEG, preview": segment(0xE0, b"JFXX\0" + SECRET.encode()),
    "JPEG, a maker's segment": segment(0xE2, b"FPXR\0" + SECRET.encode()),
    "JPEG, a video behind": encoded(RGB, "JPEG") + SECRET.encode(),
    "PNG, EXIF": encoded(RGB, "PNG", exif=exif(3)),
    "PNG, text": encoded(RGB, "PNG", pnginfo=png_text()),
    "PNG, private": encoded(RGB, "PNG", pnginfo=private_chunk()),
    "PNG, behind": encoded(RGB, "PNG") + SECRET.encode(),
    "WebP, EXIF": encoded(RGB, "WEBP", exif=exif(), lossless=True),
    "WebP, XMP": encoded(RGB, "WEBP", xmp=SECRET.encode(), lossless=True),
    "GIF, comment": encoded(RGB, "GIF", comment=SECRET.encode()),
    "TIFF": tiff(RGB, description=SECRET),
    "TIFF, deep": tiff(RGB.astype(np.uint16) * 257, description=SECRET, photometric="rgb"),
    "PPM, comment": b"P6\n# " + SECRET.encode() + b"\n2 2\n255\n" + bytes(12),
}


@pytest.mark.parametrize("kind", TELLING)
def test_metadata_is_dropped_and_pixels_are_not(kind):
    data = TELLING[kind]
    assert SECRET.encode() in data or b"Mustermann" in data
    config = PrepareConfig(data=ImagesConfig())
    prepared = prepare_image(data, config)
    assert b"Mustermann" not in prepared
    np.testing.assert_array_equal(read_values(prepared, config.data), read_values(data, config.data))


PLAIN = {
    "JPEG": encoded(RGB, "JPEG"),
    "JPEG, progressive": encoded(RGB, "JPEG", progressive=True, dpi=(72, 72)),
    "JPEG, CMYK": encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG"),
    "JPEG, colour profile": encoded(RGB, "JPEG", icc_profile=b"a profile"),
    "PNG": encoded(RGB, "PNG", dpi=(72, 72)),
    "PNG, transparent": encoded(Image.fromarray(RGB).quantize(8), "PNG", transparency=0),
    "WebP": encoded(RGB, "WEBP"),
    "GIF": encoded(RGB, "GIF"),
    "BMP": encoded(RGB, "BMP"),
    "PPM": encoded(RGB, "PPM"),
    "npy": npy(RGB),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_small_files_without_metadata_stay_to_the_byte(kind):
    assert not has_metadata(PLAIN[kind])
    assert prepare_image(PLAIN[kind], PrepareConfig(data=ImagesConfig())) == PLAIN[kind]


@pytest.mark.parametrize("format", ["jpeg", "ppm", "npy"])
def test_scans_are_pixels_alone(format):
    data = dicom(RGB)
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(), format=format))
    assert not any(secret.encode() in prepared for secret in SECRETS)
    assert SECRETS[0].encode() in data
    difference = read_values(prepared, ImagesConfig()).astype(int) - RGB.transpose(2, 0, 1)
    assert np.abs(difference).mean() < (4 if format == "jpeg" else 1e-9)


def test_units_of_scans_are_kept():
    hounsfield = np.arange(-1024, 976).reshape(40, 50)
    data = dicom(
        (hounsfield + 1024).astype(np.uint16), RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11
    )
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(channels=1), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(prepared))[..., 0], hounsfield)
