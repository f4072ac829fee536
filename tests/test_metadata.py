"""`mpp prepare` writes pixels alone: no EXIF with a place, no comment, no preview, no tag of a scan."""

import io

import imagecodecs
import numpy as np
import pytest
from conftest import encoded, picture
from dicom_files import SECRETS, dicom
from image_files import npy, tiff
from PIL import Image, PngImagePlugin

from mpp.config import ImagesConfig, PrepareConfig
from mpp.data.decoding.decode import read_values
from mpp.errors import UserError
from mpp.prepare import prepare_image

SECRET = "Mustermann, Hauptstr. 5"
RGB = picture(0)
GPS_FOLDER, LATITUDE, DESCRIPTION, ORIENTATION = 0x8825, 2, 270, 274
JPEG = encoded(RGB, "JPEG")
JFIF_END = 20  # of PIL's JPEG


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


def segment(marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment."""
    return JPEG[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + JPEG[2:]


def jfif_preview() -> bytes:
    """A JPEG whose first segment holds a preview of 3 x 3 pixels."""
    preview = SECRET.encode().ljust(27)
    numbers = JPEG[6 : JFIF_END - 2] + bytes([3, 3])
    return JPEG[:4] + (2 + len(numbers) + len(preview)).to_bytes(2, "big") + numbers + preview + JPEG[JFIF_END:]


TELLING = {
    "EXIF": encoded(RGB, "JPEG", exif=exif()),
    "comment": encoded(RGB, "JPEG", comment=SECRET),
    "XMP": segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET.encode()),
    "Photoshop": segment(0xED, b"Photoshop 3.0\0" + SECRET.encode()),
    "preview": segment(0xE0, b"JFXX\0" + SECRET.encode()),
    "a maker's segment": segment(0xE2, b"FPXR\0" + SECRET.encode()),
    "a video behind": JPEG + SECRET.encode(),
    "a second JPEG behind": JPEG + encoded(RGB, "JPEG", exif=exif()),
    "a preview in JFIF": jfif_preview(),
    "colour profile": encoded(RGB, "JPEG", icc_profile=SECRET.encode()),
    "an unknown segment": segment(0xE9, SECRET.encode()),
    "JPEG, turned": encoded(RGB, "JPEG", exif=exif(6)),
    "JPEG, text behind Adobe's numbers": segment(0xEE, b"Adobe\0\x64\0\0\0\0\1" + SECRET.encode()),
    "PNG, EXIF": encoded(RGB, "PNG", exif=exif(3)),
    "PNG, text": encoded(RGB, "PNG", pnginfo=png_text()),
    "WebP, turned": encoded(RGB, "WEBP", exif=exif(6), lossless=True),
    "GIF, comment": encoded(RGB, "GIF", comment=SECRET.encode()),
    "BMP, behind": encoded(RGB, "BMP") + SECRET.encode(),
    "PPM, behind": encoded(RGB, "PPM") + SECRET.encode(),
    "PPM, comment": b"P6\n# " + SECRET.encode() + b"\n2 2\n255\n" + bytes(12),
    "npy, header": npy(RGB).replace(b", }".ljust(40), b", } # " + SECRET.encode().ljust(34)),
    "TIFF": tiff(RGB, description=SECRET),
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
    "JPEG": JPEG,
    "JPEG, progressive": encoded(RGB, "JPEG", progressive=True, dpi=(72, 72)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_small_files_without_metadata_stay_to_the_byte(kind):
    assert prepare_image(PLAIN[kind], PrepareConfig(data=ImagesConfig())) == PLAIN[kind]


def test_bands_that_are_chosen_of_a_plain_jpeg_are_those_of_the_shard():
    data = ImagesConfig(bands=(3, 2, 1))
    prepared = prepare_image(JPEG, PrepareConfig(data=data))
    np.testing.assert_array_equal(read_values(prepared, ImagesConfig()), read_values(JPEG, data))


def test_cmyk_keeps_its_colours():
    data = encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG", exif=exif())
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig()))
    np.testing.assert_array_equal(read_values(prepared, ImagesConfig()), read_values(data, ImagesConfig()))


@pytest.mark.parametrize("format", ["jpeg", "ppm", "npy"])
def test_scans_are_pixels_alone(format):
    data = dicom(RGB)
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(), format=format))
    assert SECRETS[0].encode() in data
    assert not any(secret.encode() in prepared for secret in SECRETS)
    np.testing.assert_array_equal(read_values(prepared, ImagesConfig()), RGB.transpose(2, 0, 1))


def test_units_of_scans_are_kept():
    hounsfield = np.arange(-1024, 976).reshape(40, 50)
    data = dicom(
        (hounsfield + 1024).astype(np.uint16), RescaleSlope=1, RescaleIntercept=-1024, BitsStored=12, HighBit=11
    )
    prepared = prepare_image(data, PrepareConfig(data=ImagesConfig(channels=1), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(prepared))[..., 0], hounsfield)


@pytest.mark.parametrize("side", [8, 256])
@pytest.mark.parametrize("format", ["jpeg", "ppm"])
def test_more_than_8_bits_are_not_made_8_bits(format, side):
    """An array does not say how many bits its numbers use."""
    deep = np.random.default_rng(0).integers(0, 1024, (40, 48, 3), dtype=np.uint16)
    data = imagecodecs.jpeg2k_encode(deep, level=0, bitspersample=10)
    with pytest.raises(UserError, match=f"format is {format}, which holds 8 bits; it must be npy"):
        prepare_image(data, PrepareConfig(data=ImagesConfig(), format=format, short_side=side))
    kept = prepare_image(data, PrepareConfig(data=ImagesConfig(), format="npy"))
    np.testing.assert_array_equal(np.load(io.BytesIO(kept)), deep)
